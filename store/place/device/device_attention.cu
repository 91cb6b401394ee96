// SPDX-License-Identifier: Apache-2.0
// Attention of a store on a device. Queries of a step go to the kernels of the format, which see
// compressed tokens; other queries to a slower kernel, over tokens that are decoded for it.
#include <cuda_runtime.h>

#include <string>

#include "gpu/launch.cuh"
#include "store/place/device/decoded_attend_kernel.cuh"
#include "store/place/device/device_place.h"
#include "store/place/device/raw_attend_kernel.cuh"

namespace tierkv::store {
namespace {

constexpr int32_t kPieceTokens = 4096;  // of a sequence, decoded at once

}  // namespace

Status DevicePlace::attend(const LayerAttend& call, const LayerMoves& moves) {
  if (!is_aligned(call.q, 16) || !is_aligned(call.out, 16)) {
    return Status(StatusCode::kInvalidArgument, "q or out is not aligned to 16 bytes");
  }
  const bool is_step = call.q_len <= kMaxStepTokens && call.probabilities == nullptr &&
                       std::all_of(moves.begin(), moves.end(), [&](const LayerMove& m) {
                         return m.from.tokens - (call.q_len - 1) >= m.from.body_end;
                       });
  return is_step ? attend_step(call, moves) : attend_decoded(call, moves);
}

Status DevicePlace::find_held(const LayerAttend& call, const LayerMoves& moves) {
  const Slots slots = slots_of(moves, 1);
  if (book_.has_at(slots, call.layer)) return Status::ok();
  const Positions layers = {0, config_.layout.num_layers};
  if (Status s = write_counts(CountLaw::kHeld, 0, slots, layers, false); !s) return s;
  book_.wrote_held(slots);
  return Status::ok();
}

RawAttendCall DevicePlace::raw_attend_call(const LayerAttend& call) const {
  auto raw = raw_call<RawAttendCall>(call.layer);
  const DeviceBatch& batch = batches_[book_.index()];
  raw.slots = batch.slots;
  raw.at = batch.at + int64_t{call.layer} * config_.max_sequences;
  raw.group = config_.layout.group_size();
  raw.q_len = call.q_len;
  raw.q = static_cast<const uint16_t*>(call.q);
  raw.out = static_cast<uint16_t*>(call.out);
  raw.lse = call.lse;
  raw.sinks = call.sinks;
  raw.sm_scale = static_cast<float>(config_.layout.sm_scale);
  raw.dtype = call.dtype;
  return raw;
}

// ---- queries of a step ----

// What the format attends to; count 0: none of the sequences has a body.
DeviceAttendBody DevicePlace::bodies_of(const LayerAttend& call, const LayerMoves& moves) {
  bool has_bodies = book_.is_captured();
  std::vector<int32_t> ends;
  DeviceAttendBody body;
  for (const LayerMove& m : moves) {
    has_bodies |= body_count(layout_.laws, m.from) > 0;
    body.most_tokens = most(body.most_tokens, m.from.tokens);
    ends.push_back(m.from.body_end);
  }
  if (!has_bodies) return body;
  if (book_.is_captured()) body.most_tokens = config_.max_tokens;
  body.slots = batch().slots;
  body.at = batch().at + int64_t{call.layer} * config_.max_sequences;
  body.count = static_cast<int32_t>(moves.size());
  body.layer = call.layer;
  body.q_len = call.q_len;
  body.q = call.q;
  body.out = call.out;
  body.dtype = call.dtype;
  body.is_captured = book_.is_captured();
  body.new_plan = !book_.plan(call.q_len, ends);
  body.prior = {raw_lse_, call.sinks};
  return body;
}

Status DevicePlace::attend_step(const LayerAttend& call, const LayerMoves& moves) {
  if (Status s = enter("attend", true); !s) return s;
  // A replay for other sequences finds those of the step alone.
  if (book_.is_captured() && book_.has_other_step(slots_of(moves, 1))) {
    return Status(StatusCode::kUnsupported,
                  "attend: capturing it for other sequences than its step's begin() named");
  }
  // A graph keeps which kernels attend. Those of a step have been asked for at its beginning.
  if (book_.is_captured() && !book_.has_step(slots_of(moves, 1))) {
    DeviceWorks works;
    works.moves = moves.data();
    works.count = static_cast<int32_t>(moves.size());
    works.num_layers = 1;
    if (Status s = format_->require_capturable(works); !s) return s;
  }
  const bool is_settled = book_.has_at(slots_of(moves, 1), call.layer);
  if (Status s = find_held(call, moves); !s) return s;
  DeviceAttendBody body = bodies_of(call, moves);
  float* const lse = call.lse == nullptr && call.count_query ? whole_lse_ : call.lse;
  body.lse = lse;
  RawAttendCall raw = raw_attend_call(call);
  raw.is_settled = is_settled;
  raw.lse = body.count > 0 ? raw_lse_ : lse;
  if (body.count > 0) raw.sinks = nullptr;
  if (call.count_query && raw.group * raw.q_len <= kRawColumns) raw.kept = kept_scores_;
  const auto rows = static_cast<uint32_t>(moves.size() * raw.num_kv_heads);
  const Status attended = with_head_dim(raw.raw.head_dim, [&](auto dim) -> Status {
    if (Status s = launch_after_previous(raw_attend_kernel<dim>, rows, kAttendThreads,
                                         sizeof(RawAttendShared<dim>), stream_, raw);
        !s) {
      return s;
    }
    if (body.count > 0) {
      if (Status s = format_->attend(body); !s) return s;
    }
    if (!call.count_query) return Status::ok();
    raw.lse = lse;
    return launch_after_previous(raw_count_kernel<dim>, rows, kAttendThreads,
                                 sizeof(RawCountShared), stream_, raw);
  });
  if (!attended) book_.forget();  // the plan may not have been made
  return attended;
}

// ---- other queries ----

// Memory for a piece and its sums; all sequences of the call use it in turn.
Status DevicePlace::take_piece(const LayerAttend& call, int32_t tokens, DecodedAttendCall* taken) {
  const CacheLayout& l = config_.layout;
  const int64_t most_queries = kMostGridRows * (grouped_columns(l.group_size()) / l.group_size());
  if (call.q_len > most_queries) {
    return Status(StatusCode::kUnsupported,
                  "attend: more than " + std::to_string(most_queries) + " queries of a sequence");
  }
  const int64_t piece = int64_t{least(tokens, kPieceTokens)} * l.num_kv_heads;
  const int64_t lines = int64_t{call.q_len} * l.num_q_heads;
  const int64_t ctas =
      l.num_kv_heads * ctas_for(call.q_len * l.group_size(), decoded_columns(l.head_dim));
  const bool needs_lse = call.lse == nullptr && (call.probabilities != nullptr || call.count_query);
  const int64_t sums = tokens <= kPieceTokens ? 0
                                              : ctas * kDecodedThreads * decoded_sets(l.head_dim) *
                                                    decoded_sums(l.head_dim);
  int64_t bytes = 0;
  const auto place = [&bytes](int64_t count, int64_t of_one) {
    const int64_t at = bytes;
    bytes += round_up(count * of_one, 256);
    return at;
  };
  const int64_t k = place(piece * l.head_dim, 2), v = place(piece * l.head_dim, 2);
  const int64_t pruned = place(piece, 1), kept = place(sums, 4), lse = place(lines, 4);
  if (Status s = decoded_.reserve(bytes, stream_, "attend"); !s) return s;
  uint8_t* const memory = decoded_.get();
  taken->k = reinterpret_cast<uint16_t*>(memory + k);
  taken->v = reinterpret_cast<uint16_t*>(memory + v);
  taken->pruned = memory + pruned;
  taken->sums = reinterpret_cast<float*>(memory + kept);
  if (needs_lse) taken->lse = reinterpret_cast<float*>(memory + lse);
  return Status::ok();
}

Status DevicePlace::attend_decoded(const LayerAttend& call, const LayerMoves& moves) {
  if (Status s = enter("attend of many queries, with probabilities or behind a truncation", false);
      !s)
    return s;
  if (Status s = find_held(call, moves); !s) return s;
  int32_t tokens = 0;
  for (const LayerMove& m : moves) tokens = most(tokens, m.from.tokens);
  DecodedAttendCall c;
  static_cast<RawAttendCall&>(c) = raw_attend_call(call);
  if (Status s = take_piece(call, tokens, &c); !s) return s;
  c.probabilities = call.probabilities;
  c.stride = call.stride;
  c.query_stride = static_cast<int64_t>(moves.size()) * c.num_kv_heads * call.stride;
  if (call.probabilities != nullptr) {
    const int64_t bytes = call.q_len * c.query_stride * static_cast<int64_t>(sizeof(float));
    if (Status s = zero(call.probabilities, bytes); !s) return s;
  }
  const int64_t lines = int64_t{call.q_len} * config_.layout.num_q_heads;
  for (const LayerMove& m : moves) {
    if (Status s = attend_sequence(c, m); !s) return s;
    if (call.count_query) {
      if (Status s = count_sequence(c); !s) return s;
    }
    ++c.slots, ++c.at;
    c.q += lines * config_.layout.head_dim, c.out += lines * config_.layout.head_dim;
    if (call.lse != nullptr) c.lse += lines;
    if (c.probabilities != nullptr) c.probabilities += c.num_kv_heads * c.stride;
  }
  return Status::ok();
}

// Calls launch(call) with each piece of the sequence.
template <class Launch>
Status DevicePlace::each_piece(DecodedAttendCall call, const LayerMove& move,
                               const Launch& launch) {
  const int32_t tokens = move.from.tokens;
  for (int32_t first = 0; first < tokens; first += kPieceTokens) {
    call.first = first, call.end = least(tokens, first + kPieceTokens);
    call.is_last = call.end == tokens;
    const int64_t pruned = int64_t{call.end - first} * call.num_kv_heads;
    if (Status s = zero(call.pruned, pruned); !s) return s;
    const LayerRange range = {move.id(),       move.layer, first, call.end,
                              DType::kFloat16, call.k,     call.v};
    if (Status s = decode_tokens(range, move, call.pruned); !s) return s;
    if (Status s = launch(call); !s) return s;
  }
  return Status::ok();
}

Status DevicePlace::attend_sequence(const DecodedAttendCall& call, const LayerMove& move) {
  const int32_t columns = call.group * call.q_len;
  const auto grid = [&](int32_t of_cta) {
    return dim3(static_cast<uint32_t>(call.num_kv_heads), ctas_for(columns, of_cta));
  };
  return with_head_dim(call.raw.head_dim, [&](auto dim) -> Status {
    constexpr size_t kShared = sizeof(DecodedShared<dim>);
    Status s = each_piece(call, move, [&](const DecodedAttendCall& piece) {
      return launch_after_previous(decoded_attend_kernel<dim>, grid(decoded_columns(dim)),
                                   kDecodedThreads, kShared, stream_, piece);
    });
    if (!s || call.probabilities == nullptr) return s;
    return each_piece(call, move, [&](const DecodedAttendCall& piece) {
      return launch_after_previous(decoded_probabilities_kernel<dim>,
                                   grid(grouped_columns(call.group)), kDecodedThreads,
                                   kShared + sizeof(DecodedLargest), stream_, piece);
    });
  });
}

// The counting kernel takes as many queries at once as a step has.
Status DevicePlace::count_sequence(const RawAttendCall& call) {
  const int64_t lines = call.group * call.num_kv_heads;
  for (int32_t first = 0; first < call.q_len; first += kMaxStepTokens) {
    RawAttendCall part = call;
    part.q_len = least(kMaxStepTokens, call.q_len - first);
    part.newer = call.q_len - first - part.q_len;
    part.q += first * lines * call.raw.head_dim;
    part.lse += first * lines;
    const Status s = with_head_dim(call.raw.head_dim, [&](auto dim) {
      return launch_after_previous(raw_count_kernel<dim>, call.num_kv_heads, kAttendThreads,
                                   sizeof(RawCountShared), stream_, part);
    });
    if (!s) return s;
  }
  return Status::ok();
}

}  // namespace tierkv::store
