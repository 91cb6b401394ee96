// SPDX-License-Identifier: Apache-2.0
// plan() and write() of coded rows: what the host decides, and the kernels in their order.
#pragma once

#include "store/rows/coded/device_coded_format.cuh"

namespace tierkv::store {

// The entries of a call in their order: the first that fixes a layer brings its codebooks.
template <class Machine>
typename DeviceCodedRows<Machine>::HostPlan DeviceCodedRows<Machine>::host_plan(
    const DeviceWorks& works) const {
  HostPlan plan;
  if (works.moves == nullptr) {  // captured: require_capturable() has looked at the entries
    plan.continues = device_.view.laws.unit_tokens != kBlockTokens;
    for (int32_t l = 0; l < works.num_layers; ++l) {
      plan.leaves_raw |= host_->is_raw_layer(works.first_layer + l);
    }
    return plan;
  }
  std::vector<uint8_t> has(layers());
  for (int32_t l = 0; l < layers(); ++l) has[l] = has_books(l) ? 1 : 0;
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (move.to.body_end <= move.from.body_end) continue;
    const int32_t layer = move.layer;
    uint32_t hint = 0;
    if (!host_->is_raw_layer(layer) && !states_.is_fixed(move)) {
      const bool is_ready = has[layer] != 0 && !host_->needs_tokens(layer);
      if (is_ready || move.to.body_end >= kSampleBlocks * kBlockTokens) {
        hint = kFixesEntry;
        if (move.from.body_end > 0) hint |= kRewritesEntry;
        if (has[layer] == 0) {
          plan.samples.push_back(e);
        } else if (per_slot_) {
          plan.fits.push_back(e);
        }
        has[layer] = 1;
      }
    }
    if (states_.may_share(move) && move.from.body_end % kBlockTokens != 0) {
      hint |= kRewritesEntry;
    }
    const bool starts_coded = host_layers_[layer].is_ready != 0 && move.from.body_end == 0;
    plan.continues |= move.from.body_end % kBlockTokens != 0;
    plan.leaves_raw |= host_->is_raw_layer(layer) ||
                       !(states_.is_fixed(move) || starts_coded || (hint & kFixesEntry) != 0);
    if ((hint & kRewritesEntry) != 0) hint |= static_cast<uint32_t>(plan.saved++) << 8;
    if (hint != 0 && plan.hints.empty()) plan.hints.resize(works.entries());
    if (hint != 0) plan.hints[e] = hint;
  }
  return plan;
}

template <class Machine>
bool DeviceCodedRows<Machine>::may_rewrite(const DeviceWorks& works) const {
  return host_plan(works).saved > 0;
}

template <class Machine>
Status DeviceCodedRows<Machine>::require_capturable(const DeviceWorks& works) const {
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (host_->is_raw_layer(move.layer)) continue;
    const bool is_ready = host_layers_[move.layer].is_ready != 0 && move.from.body_end == 0;
    if (states_.is_fixed(move) || is_ready) continue;
    return Status(StatusCode::kInvalidArgument,
                  "sequence " + std::to_string(move.slot) + ", layer " +
                      std::to_string(move.layer) +
                      ": a step cannot be captured before its codebooks and steps are fixed");
  }
  return Status::ok();
}

// No page but the last has room left for a largest block.
template <class Machine>
int64_t DeviceCodedRows<Machine>::most_pages(const DeviceWorks& works) const {
  const HostPlan host = host_plan(works);
  const CodedShape& shape = device_.shape;
  const int64_t bytes = most(shape.most_block_bytes(), shape.raw_block_bytes(kBlockTokens));
  const int64_t full = int64_t{shape.page_units} * kUnitBytes - bytes + kUnitBytes;
  int64_t pages = 0;
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (move.to.body_end <= move.from.body_end) continue;
    const bool all = !host.hints.empty() && (host.hints[e] & kFixesEntry) != 0;
    const int32_t first = all ? 0 : move.from.body_end / kBlockTokens;
    const int64_t blocks = int64_t{block_count(move.to.body_end) - first} * 2 * heads();
    pages += std::min(blocks, blocks * bytes / full + 1) + 1;
  }
  return pages;
}

// Cells of an entry.
template <class Machine>
int32_t DeviceCodedRows<Machine>::most_blocks(const DeviceWorks& works,
                                              const HostPlan& host) const {
  const int32_t unit = device_.view.laws.unit_tokens;
  int32_t blocks = (works.most_leaving + 2 * kBlockTokens - unit - 1) / kBlockTokens;
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    const bool all = !host.hints.empty() && (host.hints[e] & kFixesEntry) != 0;
    const int32_t first = all ? 0 : move.from.body_end / kBlockTokens;
    if (e == 0) blocks = 1;
    if (move.to.body_end > move.from.body_end) {
      blocks = most(blocks, block_count(move.to.body_end) - first);
    }
  }
  return most(1, blocks);
}

template <class Machine>
Result<CodedCall> DeviceCodedRows<Machine>::call_of(const DeviceWorks& works,
                                                    int32_t blocks) const {
  CodedCall call = scratch_;
  call.works = works;
  call.works.moves = nullptr;
  call.blocks = blocks;
  if (int64_t{works.entries()} * blocks > cells_) {
    return Status(StatusCode::kInvalidArgument, "coded rows: a call of too many blocks");
  }
  return call;
}

// each(group), the cells of a group in staging memory.
template <class Machine>
template <class Each>
Status DeviceCodedRows<Machine>::for_groups(const CodedCall& call, const Each& each) {
  const int32_t cells = call.layer_cells() * call.works.num_layers;
  for (int32_t first = 0; first < cells; first += call.group_cells) {
    Status s = each(CellGroup{first, std::min(call.group_cells, cells - first)});
    if (!s) return s;
  }
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::load_group(const CodedCall& call, const CellGroup& group) {
  const int64_t rows = int64_t{group.cells} * heads();
  if (Status s = run(GatherTokens{call, group}, rows, 1); !s) return s;
  Status s = run(DecideExponents{call, group}, rows, DecideExponents::kThreads / kWarpLanes);
  if (!s || !planned_.continues) return s;
  const DecodeOldBlocks decode{call, group, kMaxWeightedBlockBytes};
  const int64_t ctas = (int64_t{group.cells} * heads() + 3) / 4;
  const MachineGrid grid = {static_cast<int32_t>(std::clamp<int64_t>(
                                ctas, 1, 2 * machine_.sms() / call.works.num_layers + 1)),
                            2 * call.works.num_layers};
  return machine_.launch(
      decode, grid, DecodeOldBlocks::shared_bytes(decode.shape_of_call(host_->format().max_length)),
      DecodeOldBlocks::kThreads);
}

template <class Machine>
Status DeviceCodedRows<Machine>::encode_group(const CodedCall& call, const CellGroup& group,
                                              bool writes) {
  switch (head_dim()) {
    case 64:
      return encode_group_of<2>(call, group, writes);
    case 96:
      return encode_group_of<3>(call, group, writes);
    case 128:
      return encode_group_of<4>(call, group, writes);
    default:
      return encode_group_of<8>(call, group, writes);
  }
}

template <class Machine>
template <int32_t kPer>
Status DeviceCodedRows<Machine>::encode_group_of(const CodedCall& call, const CellGroup& group,
                                                 bool writes) {
  using Encode = EncodeCells<kPer>;
  const int32_t base = Encode::kCallBytes + kEncodeCtaBytes;
  const int32_t each = encode_warp_bytes(kPer * kWarpLanes, host_->format().max_length);
  const int32_t half = machine_.shared_bytes() / 2 - 1024;
  const int32_t room = half >= base + each ? half : machine_.shared_bytes();
  const int32_t warps = std::min(kWeightedWarps, (room - base) / each);
  const int64_t items = int64_t{2} * group.cells * heads();
  const int64_t ctas = std::clamp<int64_t>((items + warps - 1) / warps, 1,
                                           std::max(1, 2 * machine_.sms() / call.works.num_layers));
  return machine_.launch(Encode{call, group, writes},
                         MachineGrid{static_cast<int32_t>(ctas), call.works.num_layers},
                         base + warps * each, warps * kWarpLanes);
}

template <class Machine>
Status DeviceCodedRows<Machine>::plan(const DeviceWorks& works, const DeviceRowCounts& counts) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    states_.settle(works.moves[e]);
  }
  planned_ = host_plan(works);
  if (Status s = prepare(works, planned_); !s) return s;
  Result<CodedCall> made = call_of(works, most_blocks(works, planned_));
  if (!made) return made.status();
  CodedCall& call = *made;
  call.counts = counts;
  call.hints = planned_.hints.empty() ? nullptr : hints_;
  if (Status s = run(OpenEntries{call}, 1, 1); !s) return s;
  machine_.free(saved_);
  saved_ = nullptr;
  if (planned_.saved > 0 && !is_one_group(call)) {
    if (Status s = save(&call); !s) return s;
  }
  Status s = for_groups(call, [&](const CellGroup& group) {
    Status loaded = load_group(call, group);
    return loaded ? encode_group(call, group, false) : loaded;
  });
  if (!s) return s;
  const int64_t items = round_up(int64_t{2} * call.blocks * heads(), kWarpLanes);
  const auto threads = static_cast<int32_t>(std::min<int64_t>(items, PlaceBlocks::kThreads));
  return machine_.launch(PlaceBlocks{call}, grid_of(works.entries(), 1), PlaceBlocks::kSharedBytes,
                         threads);
}

// Blocks that write() reads once it has begun to write over them.
template <class Machine>
Status DeviceCodedRows<Machine>::save(CodedCall* call) {
  const int64_t blocks = int64_t{planned_.saved} * kMostSavedBlocks * heads() * 2;
  call->saved_bytes = saved_bytes();
  Status s =
      machine_.allocate(blocks * call->saved_bytes, "blocks of layers that are fixed", &saved_);
  if (!s) return s;
  call->saved = static_cast<uint8_t*>(saved_);
  return run(SaveBlocks{*call}, blocks, SaveBlocks::kThreads / kWarpLanes);
}

template <class Machine>
Status DeviceCodedRows<Machine>::write(const DeviceWorks& works, const PageCopy* copies) {
  Result<CodedCall> made = call_of(works, most_blocks(works, planned_));
  if (!made) return made.status();
  CodedCall& call = *made;
  call.copies = copies;
  call.hints = planned_.hints.empty() ? nullptr : hints_;
  call.saved = static_cast<uint8_t*>(saved_);
  call.saved_bytes = saved_bytes();
  const int64_t rows = int64_t{works.entries()} * heads() * 2;
  if (copies != nullptr) {
    Status s = run(RelocateBlocks{call}, rows, RelocateBlocks::kThreads / kWarpLanes);
    if (!s) return s;
  }
  const bool is_loaded = is_one_group(call);
  call.reloads = true;
  Status s = for_groups(call, [&](const CellGroup& group) {
    if (!is_loaded) {
      if (Status loaded = load_group(call, group); !loaded) return loaded;
    }
    const int64_t items = int64_t{group.cells} * heads() * 2;
    Status moved = run(MoveBlocks{call, group}, items, MoveBlocks::kThreads / kWarpLanes);
    if (!moved) return moved;
    Status encoded = encode_group(call, group, true);
    if (!encoded || !planned_.leaves_raw) return encoded;
    return run(WriteRawBlocks{call, group}, items, 1);
  });
  if (!s) return s;
  machine_.free(saved_);
  saved_ = nullptr;
  note(works);
  return run(FinishEntries{call}, works.entries(), 1);
}

template <class Machine>
void DeviceCodedRows<Machine>::note(const DeviceWorks& works) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (move.to.body_end <= move.from.body_end) continue;
    const uint32_t hint = planned_.hints.empty() ? 0 : planned_.hints[e];
    const bool fixed = (hint & kFixesEntry) != 0 || states_.is_fixed(move);
    states_.note(move, fixed && !host_->is_raw_layer(move.layer), (hint & kRewritesEntry) != 0);
  }
}

}  // namespace tierkv::store
