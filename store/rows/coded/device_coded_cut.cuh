// SPDX-License-Identifier: Apache-2.0
// Coded rows that are read, go back to the ring, are truncated or forked.
#pragma once

#include "store/rows/coded/device_coded_format.cuh"

namespace tierkv::store {

template <class Machine>
Status DeviceCodedRows<Machine>::read_to(const ReadTarget& to) {
  const int64_t elements = int64_t{to.range.count()} * heads() * head_dim();
  if (Status s = run(ReadRawTokens{device_, to}, elements, 1024); !s) return s;
  const DeviceLayer& layer = host_layers_[to.layer];
  if (layer.books[0].codebook == nullptr) return Status::ok();
  const MakeReadRanges make{device_, to, scratch_.ranges};
  if (Status s = run(make, 2 * heads(), MakeReadRanges::kThreads); !s) return s;
  for (const Component c : {Component::kKey, Component::kValue}) {
    WeightedDecode decode;
    decode.bytes = device_.view.pages.base;
    decode.size = device_.pool_bytes;
    decode.places = reinterpret_cast<const WeightedPlace*>(directory(to.slot, to.layer, c));
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
    if (Status s = decode.validate(); !s) return s;
    int32_t shared = 0;
    const int32_t warps = decode_warps(decode, &shared);
    const int64_t items = int64_t{decode.num_ranges} * decode.most_blocks;
    const auto ctas =
        static_cast<int32_t>(std::clamp<int64_t>((items + warps - 1) / warps, 1, machine_.sms()));
    Status s =
        machine_.launch(DecodeRanges{decode}, MachineGrid{ctas, 1}, shared, warps * kWarpLanes);
    if (!s) return s;
  }
  return Status::ok();
}

// Shared memory is for the largest block and table that there are, so that many warps fit.
template <class Machine>
Status DeviceCodedRows<Machine>::check_imported(const std::vector<HostLayer>& imported,
                                                const LayerTokens* counts) {
  WeightedDecode decode;
  decode.bytes = device_.view.pages.base;
  decode.size = device_.pool_bytes;
  decode.rows.head_dim = head_dim();
  int32_t blocks = 0;
  uint32_t units = 1;
  for (const HostLayer& layer : imported) {
    const DeviceBook* books = host_layers_[layer.layer].books;
    if (books[0].codebook == nullptr || !host_->is_fixed(layer)) continue;
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
      std::min(kMaxWeightedBlockBytes, static_cast<int32_t>(units) * kUnitBytes);
  int32_t shared = 0, damaged = 0;
  const int32_t warps = decode_warps(decode, &shared);
  const CheckBlocks check = {device_, imported[0].slot, counts, decode, scratch_.left};
  // Each table is loaded for four blocks a warp.
  const MachineGrid grid = {(blocks * heads() + 4 * warps - 1) / (4 * warps), 2 * layers()};
  if (Status s = machine_.clear(scratch_.left, sizeof(damaged)); !s) return s;
  if (Status s = machine_.launch(check, grid, shared, warps * kWarpLanes); !s) return s;
  if (Status s = machine_.download(&damaged, scratch_.left, sizeof(damaged)); !s) return s;
  return damaged == 0 ? Status::ok()
                      : Status(StatusCode::kCorrupt, "body: blocks do not decode on the device");
}

template <class Machine>
Status DeviceCodedRows<Machine>::read(const LayerMove& at, Positions range, DType dtype, void* k,
                                      void* v) {
  return read_to({at.slot, at.layer, at.from.body_end, range, dtype, static_cast<uint16_t*>(k),
                  static_cast<uint16_t*>(v)});
}

// The tokens of less than a block fit into staging memory.
template <class Machine>
Status DeviceCodedRows<Machine>::restore(const LayerMove& move, Positions range) {
  if (range.count() <= 0) return Status::ok();
  const ReadTarget to = {move.slot,
                         move.layer,
                         move.from.body_end,
                         range,
                         DType::kFloat16,
                         scratch_.staged(Component::kKey, 0),
                         scratch_.staged(Component::kValue, 0)};
  if (Status s = read_to(to); !s) return s;
  return run(RestoreTokens{device_, to}, int64_t{range.count()} * heads() * head_dim(), 1024);
}

template <class Machine>
Status DeviceCodedRows<Machine>::cut_counts(const DeviceWorks& works,
                                            const DeviceRowCounts& counts) {
  Result<CodedCall> call = call_of(works, 1);
  if (!call) return call.status();
  call->counts = counts;
  return run(CutCounts{*call}, works.entries(), CutCounts::kThreads);
}

template <class Machine>
Status DeviceCodedRows<Machine>::cut(const DeviceWorks& works, const PageCopy* copies) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    states_.settle(works.moves[e]);
  }
  for (const int32_t slot : std::exchange(copies_, {})) {
    const MakeRowTables make{device_, nullptr, 0, slot, 1, 0, layers()};
    Status s = run(make, layers() * heads(), MakeRowTables::kThreads / kWarpLanes);
    if (!s) return s;
  }
  if (copies == nullptr) return Status::ok();
  Result<CodedCall> call = call_of(works, 1);
  if (!call) return call.status();
  call->copies = copies;
  return run(RelocateBlocks{*call}, int64_t{works.entries()} * heads() * 2,
             RelocateBlocks::kThreads / kWarpLanes);
}

}  // namespace tierkv::store
