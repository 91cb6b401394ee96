// SPDX-License-Identifier: Apache-2.0
#include "store/place/device/device_place.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "gpu/cuda_device.cuh"
#include "gpu/launch.cuh"
#include "store/place/device/raw_append_kernel.cuh"

namespace tierkv::store {
namespace {

Status unsupported(const char* what) {
  return Status(StatusCode::kUnsupported, std::string(what) + ", in a store on a device");
}

}  // namespace

Status DevicePlace::wait() const {
  return cuda_status(cudaStreamSynchronize(stream_), "wait");
}

Status DevicePlace::copy(void* to, const void* from, int64_t bytes) const {
  return cuda_status(
      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault, stream_), "copy");
}

Status DevicePlace::zero(void* at, int64_t bytes) const {
  return cuda_status(cudaMemsetAsync(at, 0, static_cast<size_t>(bytes), stream_), "zero");
}

Result<uint64_t> DevicePlace::capture_of(const char* call, bool can_be_captured) const {
  int device = 0;
  if (Status s = cuda_status(cudaGetDevice(&device), call); !s) return s;
  if (device != device_) {
    return Status(StatusCode::kInvalidArgument,
                  std::string(call) + ": the current device is " + std::to_string(device) +
                      ", that of the store is " + std::to_string(device_));
  }
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  const cudaError_t error = cudaStreamGetCaptureInfo(stream_, &status, &capture);
  if (error != cudaSuccess) return cuda_status(error, "capture");
  const bool is_captured = status != cudaStreamCaptureStatusNone;
  if (is_captured && !can_be_captured) {
    return Status(StatusCode::kUnsupported, std::string(call) + " cannot be captured");
  }
  return is_captured ? uint64_t{capture} : uint64_t{0};
}

Status DevicePlace::enter(const char* call, bool can_be_captured) {
  const Result<uint64_t> capture = capture_of(call, can_be_captured);
  if (!capture) return capture.status();
  book_.enter(*capture);
  return Status::ok();
}

DeviceWorks DevicePlace::works_of(const LayerMoves& moves, Positions layers, int32_t tokens) {
  DeviceWorks works;
  works.slots = batch().slots;
  works.from = batch().from;
  works.to = batch().to;
  works.report = report_;
  works.commit = commit_of(nullptr);
  works.first_layer = layers.first;
  works.num_layers = layers.count();
  works.count = static_cast<int32_t>(moves.size()) / works.num_layers;
  if (book_.is_captured()) {
    works.most_leaving = most_leaving(layout_.laws, tokens);
    return works;
  }
  for (const LayerMove& m : moves) {
    const int32_t first = most(m.from.body_end, layout_.laws.sink_tokens);
    works.most_leaving = most(works.most_leaving, m.to.body_end - first);
  }
  works.moves = moves.data();
  return works;
}

// A captured plan of attention serves all layers.
Status DevicePlace::require_alike(const LayerMoves& moves) const {
  const auto step = static_cast<size_t>(config_.layout.num_layers);
  for (size_t i = 0; i < moves.size(); ++i) {
    if (moves[i].from == moves[i / step * step].from) continue;
    return Status(StatusCode::kInvalidArgument,
                  "the layers of " + name_of(moves[i].id()) +
                      " differ: a step of them cannot be captured or replayed yet");
  }
  return Status::ok();
}

Status DevicePlace::compress(const LayerMoves& moves, int32_t tokens) {
  if (Status s = enter("begin", true); !s) return s;
  const Positions layers = {0, config_.layout.num_layers};
  const Slots slots = slots_of(moves, layers.end);
  if (book_.is_captured()) {
    // A replay for other sequences would find the captured ones in the calls before the step.
    if (book_.has_batch_alone()) {
      return unsupported("begin: capturing it behind an attend() of the same capture");
    }
    if (Status s = require_alike(moves); !s) return s;
  }
  const bool compresses = book_.is_captured() || any_moves_body(moves);
  if (Status s = write_counts(CountLaw::kBegin, tokens, slots, layers, compresses); !s) return s;
  book_.wrote_step(slots, tokens);
  if (!compresses) return Status::ok();
  DeviceWorks works = works_of(moves, layers, tokens);
  works.commit.counts = counts_;
  Status s = compress_works(works, moves);
  if (!s) book_.forget();
  return s;
}

Status DevicePlace::append_raw(const RawAppendCall& call, int32_t count) {
  // Sinks and ring are a few pieces.
  const int32_t most_ctas = call.is_checked ? 16 : 65535;
  const int32_t pieces = (call.chunk.tokens + kAppendTokens - 1) / kAppendTokens;
  const dim3 grid(static_cast<uint32_t>(count * call.num_kv_heads),
                  static_cast<uint32_t>(std::min(pieces, most_ctas)));
  return launch_after_previous(raw_append_kernel, grid, kAppendThreads, 0, stream_, call);
}

Status DevicePlace::find_significance(const LayerAppend& call, size_t count,
                                      const float** significance) {
  const CacheLayout& layout = config_.layout;
  const int64_t lse = int64_t{layout.num_q_heads} * call.tokens;
  const int64_t of_sequence = int64_t{layout.num_kv_heads} * call.tokens;
  const int64_t values = static_cast<int64_t>(count) * of_sequence + lse;
  if (Status s = scores_.reserve(4 * values, stream_, "q"); !s) return s;
  auto* const scores = reinterpret_cast<float*>(scores_.get());
  *significance = scores;
  float* const of_lse = scores + static_cast<int64_t>(count) * of_sequence;
  for (size_t i = 0; i < count; ++i) {
    const SignificanceCall p = chunk_queries(layout, call, i);
    if (Status s = prompt_lse(p, of_lse, stream_); !s) return s.with_context("q");
    float* const to = scores + static_cast<int64_t>(i) * of_sequence;
    if (Status s = prompt_significance(p, of_lse, to, stream_); !s) return s.with_context("q");
  }
  return Status::ok();
}

Status DevicePlace::append(const LayerAppend& call, const LayerMoves& moves) {
  if (!is_aligned(call.k, 16) || !is_aligned(call.v, 16) || !is_aligned(call.q, 16)) {
    return Status(StatusCode::kInvalidArgument, "k, v or q is not aligned to 16 bytes");
  }
  if (call.q != nullptr) {
    if (Status s = enter("append with q", false); !s) return s;
    const float* significance = nullptr;
    if (Status s = find_significance(call, moves.size(), &significance); !s) return s;
    LayerAppend found = call;
    found.q = nullptr, found.significance = significance, found.stride = call.tokens;
    return append(found, moves);
  }
  if (Status s = enter("append", true); !s) return s;
  const Slots slots = slots_of(moves, 1);
  const auto count = static_cast<int32_t>(moves.size());
  auto raw = raw_call<RawAppendCall>(call.layer);
  raw.slots = batch().slots;
  raw.counts = counts_;
  raw.num_layers = config_.layout.num_layers;
  raw.chunk = chunk_of(call, config_.layout.dtype);
  if (book_.has_step(slots, call.tokens) && !any_moves_body(moves)) {
    raw.to = batch().to + call.layer;
    raw.stride = config_.layout.num_layers;
    raw.added = call.tokens;
    return append_raw(raw, count);
  }
  if (book_.is_captured()) return unsupported("append: capturing it without its step's begin()");
  return append_chunk(call, moves, raw);
}

Status DevicePlace::append_chunk(const LayerAppend& call, const LayerMoves& moves,
                                 RawAppendCall raw) {
  const Positions layer = {call.layer, call.layer + 1};
  const Slots slots = slots_of(moves, 1);
  const bool leaves = any_moves_body(moves);
  if (Status s = write_counts(CountLaw::kAppend, call.tokens, slots, layer, leaves); !s) return s;
  book_.wrote_layer(slots, call.layer);
  raw.to = batch().to;
  if (leaves) {
    DeviceWorks works = works_of(moves, layer, call.tokens);
    works.chunk = raw.chunk;
    raw.is_checked = format_->checks_chunks();
    if (Status s = compress_works(works, moves); !s) {
      book_.forget();
      return s;
    }
  }
  return append_raw(raw, static_cast<int32_t>(moves.size()));
}

Status DevicePlace::decode(const LayerRange& range, const LayerMove& move) {
  if (Status s = enter("decode_range", false); !s) return s;
  return decode_tokens(range, move, nullptr);
}

Status DevicePlace::decode_tokens(const LayerRange& range, const LayerMove& move, uint8_t* pruned) {
  const auto [sinks, body, ring] = parts_of(layout_.laws, move.from, {range.first, range.end});
  auto raw = raw_call<RawReadCall>(move.layer);
  raw.slot = move.slot;
  raw.origin = range.first;
  raw.dtype = range.dtype;
  raw.k = static_cast<uint16_t*>(range.k);
  raw.v = static_cast<uint16_t*>(range.v);
  for (const Positions& part : {sinks, ring}) {
    if (part.count() <= 0) continue;
    raw.first = part.first;
    raw.end = part.end;
    const int64_t threads = int64_t{part.count()} * raw.num_kv_heads * (raw.raw.head_dim / 2);
    const uint32_t ctas = ctas_for(threads, kAppendThreads);
    Status s = launch_after_previous(raw_read_kernel, ctas, kAppendThreads, 0, stream_, raw);
    if (!s) return s;
  }
  if (body.count() <= 0) return Status::ok();
  const int32_t before = body.first - range.first;
  const int64_t at = int64_t{before} * raw.num_kv_heads * config_.layout.head_dim;
  return format_->read({move.slot, move.layer, move.from.body_end, body, range.dtype, raw.k + at,
                        raw.v + at, pruned == nullptr ? nullptr : pruned + before,
                        range.end - range.first});
}

Status DevicePlace::clear_fault() const {
  static constexpr DeviceFault kNone;
  return copy(fault_, &kNone, sizeof(kNone));
}

Status DevicePlace::take_status() {
  if (Status s = enter("take_status", false); !s) return s;
  DeviceFault fault;
  if (Status s = copy(&fault, fault_, sizeof(fault)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (fault.status == StatusCode::kOk) return Status::ok();
  if (Status s = clear_fault(); !s) return s;
  std::string where = "found on the device";
  if (fault.slot >= 0) where += ", slot " + std::to_string(fault.slot);
  if (fault.layer >= 0) where += ", layer " + std::to_string(fault.layer);
  if (fault.kv_head >= 0) where += ", kv_head " + std::to_string(fault.kv_head);
  return Status(fault.status, where);
}

}  // namespace tierkv::store
