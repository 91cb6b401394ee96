// SPDX-License-Identifier: Apache-2.0
// Coded rows in device memory: the bytes of CodedRows (coded_rows.h). Here body tokens become
// finished keys and values again, for readers and for the ring, and bodies are cut and forked. The
// classes below are memory, attention, and plan() and write().
//
// A call that fixes a layer waits for the device where the host works out something from tokens:
// codebooks, or means and steps. It also takes, and keeps, as much memory as the raw blocks of the
// layers that it fixes.
//
// Where the newest block is continued on a page that a fork shares, a captured step puts the block
// behind all others and leaves the old one as it is; the host's table is shorter then.
#pragma once

#include "codec/gpu/coded/weighted_decode.cuh"
#include "store/rows/coded/device_coded_plan.cuh"

namespace tierkv::store {

// Ranges of a fixed layer for decode_weighted_items(); empty ones where it is not fixed. A thread
// for a kv_head and component.
struct MakeReadRanges {
  static constexpr int32_t kThreads = 128;
  CodedDevice device;
  DeviceRead to;
  WeightedRange* ranges = nullptr;  // [2, num_kv_heads]

  __device__ void operator()(uint8_t*) const {
    const int32_t heads = device.heads();
    for (int32_t i = thread_of_grid(); i < 2 * heads; i += threads_of_grid()) {
      const int32_t h = i % heads;
      WeightedRange r;
      if (device.is_fixed(to.slot, to.layer)) {
        r.body_first = device.shape.sink_tokens, r.body_last = to.body_end;
        r.first = to.range.first, r.last = to.range.end;
        r.row = device.row(to.slot, to.layer, h);
        // The places are those of kv_head 0.
        r.first_block = 2 * h * device.shape.max_blocks;
        r.out = to.of(i < heads ? Component::kKey : Component::kValue) +
                int64_t{h} * device.shape.head_dim;
        r.token_stride = int64_t{heads} * device.shape.head_dim;
      }
      ranges[i] = r;
    }
  }
};

struct DecodeRanges {
  static constexpr int32_t kThreads = kCodedDecodeWarps * kWarpLanes;
  WeightedDecode call;
  __device__ void operator()(uint8_t* shared) const { decode_weighted_items(call, shared); }
};

// Tells blocks of fixed layers of a slot that do not decode. CTAs {x, 2 * layers}.
struct CheckBlocks {
  static constexpr int32_t kThreads = kCodedDecodeWarps * kWarpLanes;
  CodedDevice device;
  int32_t slot = 0, first_layer = 0;
  const LayerTokens* counts = nullptr;  // [num_layers]
  WeightedDecode decode;                // but for component and book
  int32_t* fault = nullptr;             // the least import_fault()

  __device__ void operator()(uint8_t* shared) const {
    const int32_t layer = first_layer + static_cast<int32_t>(blockIdx.y / 2u);
    const int32_t heads = device.heads();
    WeightedDecode call = decode;
    call.component = static_cast<Component>(blockIdx.y % 2u);
    call.book = device.layers[layer].books[blockIdx.y % 2u];
    if (call.book.codebook == nullptr || !device.is_fixed(slot, layer)) return;
    const int32_t end = counts[layer].body_end;
    const auto block_of = [&](int32_t i, WeightedPlace* place) {
      const CodedBlockRef ref = device.refs(slot, layer, i % heads, call.component)[i / heads];
      *place = {ref.offset, ref.units};
      return device.shape.tokens_of(i / heads, end);
    };
    const int32_t found = count_damaged(call, shared, block_count(end) * heads, block_of);
    if (found > 0 && lane_index() == 0) atomicMin(fault, import_fault(layer, ImportFault::kBody));
  }
};

// Where the layer is not fixed.
struct ReadRawTokens {
  static constexpr int32_t kThreads = 256;
  CodedDevice device;
  DeviceRead to;

  __device__ void operator()(uint8_t*) const {
    if (device.is_fixed(to.slot, to.layer)) return;
    const int32_t heads = device.heads(), dims = device.shape.head_dim;
    const int64_t all = int64_t{to.range.count()} * heads * dims;
    for (int64_t i = thread_of_grid(); i < 2 * all; i += threads_of_grid()) {
      const auto c = static_cast<Component>(i / all);
      const int64_t at = i % all;
      const auto p = static_cast<int32_t>(to.range.first + at / (heads * dims));
      const auto h = static_cast<int32_t>(at / dims % heads), d = static_cast<int32_t>(at % dims);
      const CodedBlockRef ref = device.refs(to.slot, to.layer, h, c)[p / kBlockTokens];
      const uint8_t* tiles =
          device.view.pages.base + int64_t{ref.offset} * kUnitBytes + kBlockTokens;
      const int32_t t = p - device.shape.first_of(p / kBlockTokens);
      const uint16_t x = raw_tile_element(tiles, dims, c, t, d);
      to.of(c)[at] = to.dtype == DType::kFloat16 ? x : float_to_bfloat16(half_to_float(x));
    }
  }
};

// Tokens that were read go to the ring, with what the format decided about them: positions of one
// block.
struct RestoreTokens {
  static constexpr int32_t kThreads = 256;
  CodedDevice device;
  DeviceRead from;

  __device__ void operator()(uint8_t*) const {
    const int32_t heads = device.heads(), dims = device.shape.head_dim;
    const int32_t all = from.range.count() * heads * dims;
    const RawLayout& raw = device.view.raw;
    for (int32_t i = thread_of_grid(); i < all; i += threads_of_grid()) {
      const int32_t p = from.range.first + i / (heads * dims), h = i / dims % heads, d = i % dims;
      uint8_t* const row = device.view.raw_row(from.slot, from.layer, h);
      for (const Component c : {Component::kKey, Component::kValue}) {
        reinterpret_cast<uint16_t*>(row + raw.token_byte(c, p))[d] = from.of(c)[i];
      }
      if (d == 0) *reinterpret_cast<RawScore*>(row + raw.score_byte(p)) = score_of(h, p);
    }
  }

 private:
  __device__ RawScore score_of(int32_t h, int32_t p) const {
    if (device.layers[from.layer].is_raw != 0) return {};
    const int32_t block = p / kBlockTokens, t = p - device.shape.first_of(block);
    DecidedExponents decided;
    decided.importance = exponent_of(h, Component::kKey, block, t);
    decided.has_value = device.is_fixed(from.slot, from.layer);
    if (decided.has_value) decided.value = exponent_of(h, Component::kValue, block, t);
    return {bits_float(decided.bits()), RawScore::kDecided};
  }
  __device__ int32_t exponent_of(int32_t h, Component c, int32_t block, int32_t t) const {
    const CodedBlockRef ref = device.refs(from.slot, from.layer, h, c)[block];
    const uint8_t* bytes = device.view.pages.base + int64_t{ref.offset} * kUnitBytes;
    if (!device.is_fixed(from.slot, from.layer)) return static_cast<int8_t>(bytes[t]);
    const BlockHeader header = load_header(bytes);
    return header.least_exponent + static_cast<int32_t>(load_field(bytes + kCodedBlockHeaderBytes,
                                                                   t, header.exponent_bits));
  }
};

class DeviceCodedRows final : public PlannedCodedRows {
 public:
  using PlannedCodedRows::PlannedCodedRows;

  Status read(const DeviceRead& to) override {
    const int64_t elements = int64_t{to.range.count()} * heads() * head_dim();
    if (Status s = run(ReadRawTokens{device_, to}, elements, 1024); !s) return s;
    if (!has_books(to.layer)) return Status::ok();
    const DeviceLayer& layer = host_layers_[to.layer];
    const MakeReadRanges make{device_, to, scratch_.ranges};
    if (Status s = run(make, 2 * heads(), MakeReadRanges::kThreads); !s) return s;
    for (const Component c : {Component::kKey, Component::kValue}) {
      WeightedDecode decode;
      decode.bytes = device_.view.pages.base;
      decode.size = device_.pool_bytes;
      decode.places = reinterpret_cast<const WeightedPlace*>(device_.refs(to.slot, to.layer, 0, c));
      decode.ranges = scratch_.ranges + (c == Component::kKey ? 0 : heads());
      decode.status = scratch_.status;
      const DeviceRowTables& t = device_.tables;
      decode.rows = {t.key_scales, t.key_means, t.value_steps, layer.rope, t.rows, head_dim()};
      decode.book = layer.books[static_cast<int32_t>(c)];
      decode.component = c;
      decode.dtype = to.dtype;
      decode.token_stride = int64_t{heads()} * head_dim();
      decode.num_ranges = heads();
      decode.most_blocks = block_count(to.range.end) - to.range.first / kBlockTokens;
      int32_t shared = 0;
      const int32_t warps = decode_warps(decode, &shared);
      const int64_t items = int64_t{decode.num_ranges} * decode.most_blocks;
      const int64_t ctas = std::clamp<int64_t>((items + warps - 1) / warps, 1, limits_.sms);
      Status s = launch(DecodeRanges{decode}, dim3(static_cast<uint32_t>(ctas)), shared,
                        warps * kWarpLanes);
      if (!s) return s;
    }
    return Status::ok();
  }

  // Shared memory is for the largest block and table that there are, so that many warps fit. Later
  // layers are on their way meanwhile, so what counts is how soon these are over.
  Status check_imported(std::span<const HostLayer> imported, const LayerTokens* counts,
                        int32_t* fault) override {
    if (per_slot_) {
      if (Status s = check_rows(imported); !s) return s;
    }
    forget_books();  // the kernel decodes with what a layer has
    if (Status s = tell_layers(); !s) return s;
    WeightedDecode decode;
    decode.bytes = device_.view.pages.base;
    decode.size = device_.pool_bytes;
    decode.rows.head_dim = head_dim();
    int32_t blocks = 0;
    uint32_t units = 1;
    for (const HostLayer& layer : imported) {
      const DeviceBook* books = host_layers_[layer.layer].books;
      if (!has_books(layer.layer) || !host_->is_fixed(layer)) continue;
      const int32_t count = block_count(layer.at.body_end);
      blocks = most(blocks, count);
      for (int32_t i = 0; i < 2 * heads(); ++i) {
        decode.book.max_length = most(decode.book.max_length, books[i % 2].max_length);
        const auto* refs = host_->state_at<CodedBlockRef>(
            layer, device_.shape.refs_byte(i / 2, static_cast<Component>(i % 2)));
        for (int32_t b = 0; b < count; ++b) units = std::max(units, refs[b].units);
      }
    }
    if (blocks == 0) return Status::ok();
    decode.max_block_bytes =
        std::min(kMaxCodedBlockBytes, static_cast<int32_t>(units) * kUnitBytes);
    int32_t shared = 0;
    const int32_t warps = decode_warps(decode, &shared);
    const CheckBlocks check = {device_, imported[0].slot, imported[0].layer, counts, decode, fault};
    const auto lines = static_cast<int32_t>(2 * imported.size());
    const int32_t ctas =
        most(1, least((blocks * heads() + warps - 1) / warps, limits_.sms / lines));
    return launch(check, dim3(static_cast<uint32_t>(ctas), static_cast<uint32_t>(lines)), shared,
                  warps * kWarpLanes);
  }

  // The tokens of less than a block fit into staging memory.
  Status restore(const LayerMove& move, Positions range) override {
    const DeviceRead to = {move.slot,
                           move.layer,
                           move.from.body_end,
                           range,
                           DType::kFloat16,
                           scratch_.staged(Component::kKey, 0),
                           scratch_.staged(Component::kValue, 0)};
    if (Status s = read(to); !s) return s;
    return run(RestoreTokens{device_, to}, int64_t{range.count()} * heads() * head_dim(), 1024);
  }

  Status cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) override {
    Result<CodedCall> call = call_of(works, 1);
    if (!call) return call.status();
    call->counts = counts;
    return run(CutCounts{*call}, works.entries(), CutCounts::kThreads);
  }

  Status cut(const DeviceWorks& works, const PageCopy* copies) override {
    for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
      const LayerMove& move = works.moves[e];
      if (move.to.body_end == 0) state_of(move.slot, move.layer).waits = false;
    }
    if (copies == nullptr) return Status::ok();
    Result<CodedCall> call = call_of(works, 1);
    if (!call) return call.status();
    call->copies = copies;
    return run(RelocateBlocks{*call}, int64_t{works.entries()} * heads() * 2,
               RelocateBlocks::kThreads / kWarpLanes);
  }

  Status forked(int32_t from, int32_t to) override {
    for (int32_t l = 0; l < layers(); ++l) {
      state_of(from, l).shares = true;
      state_of(to, l) = state_of(from, l);
    }
    return per_slot_ ? make_row_tables(nullptr, to, {0, layers()}) : Status::ok();
  }

 private:
  // Whether attention has numbers for the means and steps that came with layers.
  Status check_rows(std::span<const HostLayer> imported) const {
    for (const HostLayer& layer : imported) {
      for (int32_t h = 0; host_->is_fixed(layer) && h < heads(); ++h) {
        const auto* state = host_->state_at<CodedRowState>(layer, device_.shape.row_byte(h));
        const auto* means = host_->state_at<uint16_t>(layer, device_.shape.means_byte(h));
        const Status s = check_weighted_keys(host_->row_of(layer.layer, h, *state, means));
        if (!s) {
          return s.with_context("layer " + std::to_string(layer.layer) + ", kv_head " +
                                std::to_string(h));
        }
      }
    }
    return Status::ok();
  }
  // Warps of a CTA that decodes, which takes *bytes of shared memory.
  int32_t decode_warps(const WeightedDecode& decode, int32_t* bytes) const {
    const int32_t base = weighted_region_bytes(decode) + weighted_decode_cta_bytes(decode) + 16;
    const int32_t each = weighted_decode_warp_bytes(decode);
    const int32_t warps = std::min(kCodedDecodeWarps, (limits_.shared_bytes - base) / each);
    *bytes = base + warps * each;
    return warps;
  }
};

}  // namespace tierkv::store
