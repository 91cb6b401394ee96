// SPDX-License-Identifier: Apache-2.0
// Attention over the bodies of coded rows: directories in the slots are read where they are.
#pragma once

#include "store/rows/coded/device_attend.cuh"
#include "store/rows/coded/device_coded_format.cuh"

namespace tierkv::store {

// A slice that is coded has fewer bytes: words of pairs, all exceptions, and what precedes them.
inline int32_t most_coded_slice_bytes(const CodedFormat& format, int32_t head_dim) {
  const int32_t dims = std::min(head_dim, kSliceDims);
  const int32_t words = kBlockTokens * dims / 2 * format.max_length / 8;
  const int32_t lengths = kWarpLanes * format.streams_per_lane * kMaxLengthBits / 8;
  return static_cast<int32_t>(round_up(kCodedBlockHeaderBytes + kBlockTokens + lengths + words +
                                           kExceptionBytes * kMaxWeightedExceptions + 8,
                                       kBlockAlignment));
}

template <class Machine>
int64_t DeviceCodedRows<Machine>::most_workspace(int32_t rows) const {
  CodedAttention call = call_of_layer(0);
  call.num_rows = rows;
  call.q_len = kMaxStepTokens;
  call.dtype = DType::kBFloat16;
  CodedAttentionGrid grid;
  grid.num_ctas = machine_.sms();
  grid.warps = coded_warps(call.head_dim);
  return machine_.attention_workspace(call, grid);
}

// The turns of each rotation, and which one a layer has; -1: none.
template <class Machine>
Status DeviceCodedRows<Machine>::make_turns(std::vector<WeightedTurns>* made,
                                            std::vector<int32_t>* turns_of) const {
  for (int32_t l = 0; l < layers(); ++l) {
    const RopeTable* rope = host_->rope(l);
    if (rope == nullptr || host_->is_raw_layer(l)) continue;
    for (int32_t other = 0; other < l; ++other) {
      if (host_->rope(other) == rope && (*turns_of)[other] >= 0)
        (*turns_of)[l] = (*turns_of)[other];
    }
    if ((*turns_of)[l] >= 0) continue;
    Result<WeightedTurns> turns = weighted_turns(*rope, head_dim(), device_.shape.sink_tokens);
    if (!turns) return turns.status();
    (*turns_of)[l] = static_cast<int32_t>(made->size());
    made->push_back(std::move(*turns));
  }
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::bind_attention() {
  const DeviceStoreView& view = device_.view;
  if (view.slots.slot_bytes / 8 * config_.max_sequences > INT32_MAX) {
    return Status(StatusCode::kUnsupported, "coded rows: slots of more than 16 GiB on a device");
  }
  const int32_t rows = config_.max_sequences * heads();
  const int64_t workspace = most_workspace(rows);
  std::vector<WeightedTurns> made;
  std::vector<int32_t> turns_of(layers(), -1);
  if (Status s = make_turns(&made, &turns_of); !s) return s;
  std::vector<std::pair<uint16_t*, uint16_t*>> at(made.size());
  const auto carve = [&](Carving* memory) {
    attended_rows_ = memory->take<CodedRow>(rows);
    item_count_ = memory->take<int32_t>(1);
    row_status_ = memory->take<StatusCode>(rows);
    workspace_ = memory->take<uint8_t>(workspace);
    for (size_t i = 0; i < made.size(); ++i) {
      at[i].first = memory->take<uint16_t>(static_cast<int64_t>(made[i].place.size()));
      at[i].second = memory->take<uint16_t>(static_cast<int64_t>(made[i].block.size()));
    }
  };
  Carving sizes{nullptr};
  carve(&sizes);
  attention_bytes_ = sizes.bytes;
  if (Status s = machine_.allocate(attention_bytes_, "attention of coded rows", &attention_memory_);
      !s) {
    return s;
  }
  Carving memory{static_cast<uint8_t*>(attention_memory_)};
  carve(&memory);
  for (size_t i = 0; i < made.size(); ++i) {
    const std::vector<uint16_t>& place = made[i].place;
    const std::vector<uint16_t>& block = made[i].block;
    Status of_place =
        machine_.upload(at[i].first, place.data(), static_cast<int64_t>(2 * place.size()));
    if (!of_place) return of_place;
    Status of_block =
        machine_.upload(at[i].second, block.data(), static_cast<int64_t>(2 * block.size()));
    if (!of_block) return of_block;
  }
  weighted_.assign(layers(), WeightedRows{});
  for (int32_t l = 0; l < layers(); ++l) {
    WeightedRows& w = weighted_[l];
    w.key_scales = device_.tables.query_scales;
    w.key_means = device_.tables.query_means;
    w.sink_tokens = device_.shape.sink_tokens;
    if (turns_of[l] < 0) continue;
    const RopeTable& rope = *host_->rope(l);
    w.place_turns = at[turns_of[l]].first;
    w.block_turns = at[turns_of[l]].second;
    w.num_block_turns = rope.blocks;
    w.pairing = rope.pairing;
  }
  return Status::ok();
}

// The call for any rows of a layer, without its codebooks.
template <class Machine>
CodedAttention DeviceCodedRows<Machine>::call_of_layer(int32_t layer) const {
  CodedAttention call;
  for (const Component c : {Component::kKey, Component::kValue}) {
    CodedComponent& of = c == Component::kKey ? call.keys : call.values;
    of.bytes = device_.view.pages.base;
    of.size = device_.pool_bytes;
    of.blocks = directory(0, layer, c);
    of.steps = c == Component::kKey ? device_.tables.query_units : device_.tables.value_steps;
  }
  // The directory of values begins behind that of keys.
  const auto* end = reinterpret_cast<const CodedBlockRef*>(
      device_.view.slots.base + device_.view.slots.slot_bytes * config_.max_sequences);
  call.num_blocks = static_cast<int32_t>(std::min<int64_t>(end - call.values.blocks, INT32_MAX));
  call.num_steps = device_.tables.rows;
  call.columns = config_.layout.num_q_heads / heads();
  call.head_dim = head_dim();
  call.num_kv_heads = heads();
  call.sm_scale = static_cast<float>(config_.layout.sm_scale);
  call.max_block_bytes = most_coded_slice_bytes(host_->format(), head_dim());
  return call;
}

template <class Machine>
Status DeviceCodedRows<Machine>::attend_rows(const DeviceAttendBody& body, AttendedRows which) {
  const MakeAttentionRows make{device_, body, which, attended_rows_, item_count_};
  if (Status s = machine_.launch(make, MachineGrid{}, 8 * body.count, MakeAttentionRows::kThreads);
      !s) {
    return s;
  }
  CodedAttention call = call_of_layer(body.layer);
  if (which == AttendedRows::kCoded) {
    call.weighted = weighted_[body.layer];
    for (const Component c : {Component::kKey, Component::kValue}) {
      CodedComponent& of = c == Component::kKey ? call.keys : call.values;
      of.codebook = host_books_[2 * body.layer + static_cast<int32_t>(c)];
    }
  } else {
    call.raw_blocks = true;
  }
  call.rows = attended_rows_;
  call.q = body.q, call.out = body.out, call.lse = body.lse;
  call.row_status = row_status_;
  call.workspace = workspace_;
  call.item_count = item_count_;
  call.num_rows = body.count * heads();
  call.num_items = call.num_rows * block_count(std::min(body.most_tokens, config_.max_tokens));
  call.q_len = body.q_len;
  call.dtype = body.dtype;
  return machine_.attend(call);
}

template <class Machine>
Status DeviceCodedRows<Machine>::attend(const DeviceAttendBody& body) {
  const bool has_books = host_layers_[body.layer].books[0].codebook != nullptr;
  if (host_->is_raw_layer(body.layer) || !has_books) {
    return attend_rows(body, AttendedRows::kAllAsRaw);
  }
  Status s = attend_rows(body, AttendedRows::kCoded);
  return s && states_.any_waits(body.layer) ? attend_rows(body, AttendedRows::kRaw) : s;
}

}  // namespace tierkv::store
