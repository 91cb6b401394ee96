// SPDX-License-Identifier: Apache-2.0
// plan() and write() of coded rows: what the host decides, what it works out from the first tokens
// of a layer (means, steps, codebooks), and the kernels in their order.
#pragma once

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "attention/coded/weighted_tables.h"
#include "store/place/place.h"
#include "store/rows/coded/device_coded_attention.cuh"
#include "store/rows/coded/device_encode.cuh"

namespace tierkv::store {

class PlannedCodedRows : public AttendedCodedRows {
 public:
  using AttendedCodedRows::AttendedCodedRows;

  bool checks_chunks() const override { return true; }
  bool may_rewrite(const DeviceWorks& works) const override { return host_plan(works).saved > 0; }

  Status require_capturable(const DeviceWorks& works) const override {
    for (int32_t e = 0; e < works.entries(); ++e) {
      const LayerMove& move = works.moves[e];
      if (host_->is_raw_layer(move.layer)) continue;
      const bool is_ready = host_layers_[move.layer].is_ready != 0 && move.from.body_end == 0;
      if (is_fixed(move) || is_ready) continue;
      return Status(StatusCode::kInvalidArgument,
                    name_of(move.id()) + ", layer " + std::to_string(move.layer) +
                        ": a step cannot be captured before its codebooks and steps are fixed");
    }
    return Status::ok();
  }

  int64_t most_pages(const DeviceWorks& works) const override {
    const HostPlan host = host_plan(works);
    int64_t pages = 0;
    for (int32_t e = 0; e < works.entries(); ++e) {
      const LayerMove& move = works.moves[e];
      if (move.to.body_end <= move.from.body_end) continue;
      pages += device_.shape.most_pages(int64_t{host.blocks_of(e, move)} * 2 * heads()) + 1;
    }
    return pages;
  }

  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override {
    planned_ = host_plan(works);
    forget_books();
    if (Status s = prepare(works); !s) return s;
    Result<CodedCall> made = planned_call(works);
    if (!made) return made.status();
    CodedCall& call = *made;
    call.counts = counts;
    if (Status s = open_entries(call); !s) return s;
    is_saved_ = planned_.saved > 0 && !is_one_group(call);
    if (is_saved_) {
      if (Status s = save(&call); !s) return s;
    }
    Status s = for_groups(call, [&](const CodedCall& of_group) {
      Status loaded = load_group(of_group);
      return loaded ? encode_group(of_group) : loaded;
    });
    if (!s) return s;
    const int64_t items = round_up(int64_t{2} * call.blocks * heads(), kWarpLanes);
    const auto threads = static_cast<int32_t>(std::min<int64_t>(items, PlaceBlocks::kThreads));
    return launch(PlaceBlocks{call}, grid_of(works.entries(), 1), PlaceBlocks::kSharedBytes,
                  threads);
  }

  Status write(const DeviceWorks& works, const PageCopy* copies) override {
    Result<CodedCall> made = planned_call(works);
    if (!made) return made.status();
    CodedCall& call = *made;
    call.copies = copies;
    call.saved = is_saved_ ? saved_.get() : nullptr;
    call.saved_bytes = device_.shape.largest_block_bytes();
    const int64_t rows = int64_t{works.entries()} * heads() * 2;
    if (copies != nullptr) {
      Status s = run(RelocateBlocks{call}, rows, RelocateBlocks::kThreads / kWarpLanes);
      if (!s) return s;
    }
    if (Status s = keep_books(); !s) return s;
    const bool is_loaded = is_one_group(call) || call.by_entry;
    call.writes = true;
    Status s = for_groups(call, [&](const CodedCall& of_group) {
      if (!is_loaded) {
        if (Status loaded = load_group(of_group); !loaded) return loaded;
      }
      const int64_t items = int64_t{of_group.group.cells} * heads() * 2;
      Status moved = run(OfCall<MoveBlocks>{of_group}, items, MoveBlocks::kThreads / kWarpLanes);
      if (!moved || call.by_entry) return moved;
      Status encoded = encode_group(of_group);
      if (!encoded || !planned_.leaves_raw) return encoded;
      return run(OfCall<WriteRawBlocks>{of_group}, items, 1);
    });
    if (!s) return s;
    is_saved_ = false;
    note(works);
    return call.by_entry ? Status::ok() : run(OfCall<FinishEntries>{call}, works.entries(), 1);
  }

 protected:
  Result<CodedCall> call_of(const DeviceWorks& works, int32_t blocks) const {
    CodedCall call = scratch_;
    call.works = works;
    call.works.moves = nullptr;
    call.blocks = blocks;
    call.slice_bytes = most_coded_slice_bytes(host_->format(), head_dim());
    if (int64_t{works.entries()} * blocks > cells_) {
      return Status(StatusCode::kInvalidArgument, "coded rows: a call of too many blocks");
    }
    return call;
  }

  // Codebooks of a call that got no pages.
  void forget_books() {
    for (const auto& [layer, books] : made_) clear_books(layer);
    made_.clear();
  }

 private:
  // What plan() and write() of a call share on the host.
  struct HostPlan {
    // An entry whose means and steps come from its tokens, or a layer's codebooks.
    struct Sample {
      int32_t entry;
      bool makes_books;
    };
    std::vector<uint32_t> hints;  // [entries]; empty: all are 0
    std::vector<Sample> samples;
    int32_t saved = 0;        // entries that rewrite
    bool continues = false;   // a block that is there may grow
    bool leaves_raw = false;  // a block may stay raw

    uint32_t hint(int32_t entry) const { return hints.empty() ? 0 : hints[entry]; }
    // That the entry's move writes.
    int32_t blocks_of(int32_t entry, const LayerMove& move) const {
      const bool all = (hint(entry) & kFixesEntry) != 0;
      return block_count(move.to.body_end) - (all ? 0 : move.from.body_end / kBlockTokens);
    }
  };
  Result<CodedCall> planned_call(const DeviceWorks& works) const {
    Result<CodedCall> call = call_of(works, most_blocks(works));
    if (!call) return call;
    if (!planned_.hints.empty()) call->hints = hints_;
    call->by_entry = works.moves == nullptr;
    // A step has two blocks of an entry at most (most_leaving()), staging memory kSampleBlocks.
    if (call->by_entry && call->blocks > call->group_cells) {
      return Status(StatusCode::kInvalidArgument, "coded rows: a captured step of too many blocks");
    }
    return call;
  }

  // The entries of a call in their order: the first that fixes a layer brings its codebooks.
  HostPlan host_plan(const DeviceWorks& works) const {
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
      if (!host_->is_raw_layer(layer) && !is_fixed(move)) {
        const bool is_ready = has[layer] != 0 && !host_->needs_tokens(layer);
        if (is_ready || move.to.body_end >= kSampleBlocks * kBlockTokens) {
          hint = kFixesEntry;
          if (move.from.body_end > 0) hint |= kRewritesEntry;
          if (has[layer] == 0 || per_slot_) plan.samples.push_back({e, has[layer] == 0});
          has[layer] = 1;
        }
      }
      if (state_of(move.slot, layer).shares && move.from.body_end % kBlockTokens != 0) {
        hint |= kRewritesEntry;
      }
      const bool starts_coded = host_layers_[layer].is_ready != 0 && move.from.body_end == 0;
      plan.continues |= move.from.body_end % kBlockTokens != 0;
      plan.leaves_raw |= host_->is_raw_layer(layer) ||
                         !(is_fixed(move) || starts_coded || (hint & kFixesEntry) != 0);
      if ((hint & kRewritesEntry) != 0) hint |= static_cast<uint32_t>(plan.saved++) << 8;
      if (hint != 0 && plan.hints.empty()) plan.hints.resize(works.entries());
      if (hint != 0) plan.hints[e] = hint;
    }
    return plan;
  }

  // Cells of an entry.
  int32_t most_blocks(const DeviceWorks& works) const {
    const int32_t unit = device_.view.laws.unit_tokens;
    int32_t blocks = (works.most_leaving + 2 * kBlockTokens - unit - 1) / kBlockTokens;
    for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
      const LayerMove& move = works.moves[e];
      if (e == 0) blocks = 1;
      if (move.to.body_end > move.from.body_end) blocks = most(blocks, planned_.blocks_of(e, move));
    }
    return most(1, blocks);
  }

  // each(call) for every group of cells, and then what is not of groups.
  template <class Each>
  Status for_groups(const CodedCall& call, const Each& each) {
    const int32_t cells = call.layer_cells() * call.works.num_layers;
    CodedCall of_group = call;
    for (int32_t first = 0; first < cells; first += call.group_cells) {
      of_group.group = {first, std::min(call.group_cells, cells - first)};
      Status s = each(of_group);
      if (!s) return s;
      if (call.by_entry) break;
    }
    const bool is_last = call.by_entry && (call.writes || !is_one_group(call));
    return is_last ? encode_entries(of_group) : Status::ok();
  }

  Status open_entries(const CodedCall& call) const {
    return launch(OpenEntries{call}, dim3(static_cast<uint32_t>(call.works.num_layers)), 0,
                  OpenEntries::kThreads);
  }

  Status load_group(const CodedCall& call) {
    const int64_t rows = int64_t{call.group.cells} * heads();
    if (call.blocks == 1) {
      if (Status s = run(OfCall<LoadTokens>{call}, rows, 1); !s) return s;
    } else {
      if (Status s = run(OfCall<GatherTokens>{call}, rows, 1); !s) return s;
      Status s = run(OfCall<DecideExponents>{call}, rows, DecideExponents::kThreads / kWarpLanes);
      if (!s) return s;
    }
    if (!planned_.continues) return Status::ok();
    constexpr int32_t kWarps = DecodeOldBlocks::kThreads / kWarpLanes;
    const int64_t most_ctas = std::max(1, 2 * limits_.sms / call.works.num_layers);
    const dim3 grid(
        static_cast<uint32_t>(std::clamp<int64_t>((rows + kWarps - 1) / kWarps, 1, most_ctas)),
        static_cast<uint32_t>(2 * call.works.num_layers));
    const WeightedDecode shape = decode_shape(call);
    return launch(OfCall<DecodeOldBlocks>{call}, grid, DecodeOldBlocks::shared_bytes(shape, kWarps),
                  DecodeOldBlocks::kThreads);
  }
  WeightedDecode decode_shape(const CodedCall& call) const {
    return DecodeOldBlocks{{call}}.shape_of_call(host_->format().max_length);
  }

  // Warps of a CTA that encodes, two of which an SM has where that is possible, and the bytes of
  // their shared memory.
  struct EncodeShape {
    int32_t warps, bytes;
  };
  EncodeShape encode_shape(int32_t base) const {
    const int32_t each = encode_warp_bytes(head_dim(), host_->format().max_length);
    const int32_t half = limits_.shared_bytes / 2 - 1024;
    const int32_t room = half >= base + each ? half : limits_.shared_bytes;
    const int32_t warps = std::min(kWeightedWarps, (room - base) / each);
    return {warps, base + warps * each};
  }

  Status encode_group(const CodedCall& call) {
    return with_head_dim(head_dim(), [&](auto dim) {
      using Encode = EncodeCells<dim / kWarpLanes>;
      const EncodeShape shape = encode_shape(Encode::kCallBytes + kEncodeCtaBytes);
      const int64_t items = int64_t{2} * call.group.cells * heads();
      const int32_t most_ctas = std::max(1, 2 * limits_.sms / call.works.num_layers);
      const int64_t ctas =
          std::clamp<int64_t>((items + shape.warps - 1) / shape.warps, 1, most_ctas);
      const dim3 grid(static_cast<uint32_t>(ctas), static_cast<uint32_t>(call.works.num_layers));
      return launch(OfCall<Encode>{call}, grid, shape.bytes, shape.warps * kWarpLanes);
    });
  }

  Status encode_entries(const CodedCall& call) {
    return with_head_dim(head_dim(), [&](auto dim) {
      using Encode = EncodeCells<dim / kWarpLanes>;
      using Entries = EncodeEntries<dim / kWarpLanes>;
      const EncodeShape shape =
          encode_shape(Entries::kCallBytes + Encode::kCallBytes + kEncodeCtaBytes);
      const WeightedDecode decode = decode_shape(call);
      const int32_t room = shape.bytes - Entries::kCallBytes - DecodeOldBlocks::cta_bytes(decode);
      const int32_t decode_warps =
          std::clamp(room / weighted_decode_warp_bytes(decode), 1, shape.warps);
      const int32_t bytes = std::max(
          shape.bytes, Entries::kCallBytes + DecodeOldBlocks::shared_bytes(decode, decode_warps));
      const int32_t ctas = 2 * limits_.sms,
                    entry_ctas = std::min(ctas, call.group_cells / call.blocks);
      return launch(Entries{call, decode_warps, entry_ctas}, dim3(static_cast<uint32_t>(ctas)),
                    bytes, shape.warps * kWarpLanes);
    });
  }

  // Blocks that write() reads once it has begun to write over them.
  Status save(CodedCall* call) {
    const int64_t blocks = int64_t{planned_.saved} * kMostSavedBlocks * heads() * 2;
    call->saved_bytes = device_.shape.largest_block_bytes();
    constexpr const char* kWhat = "blocks of layers that are fixed";
    if (Status s = saved_.reserve(blocks * call->saved_bytes, stream_, kWhat); !s) return s;
    call->saved = saved_.get();
    return run(SaveBlocks{*call}, blocks, SaveBlocks::kThreads / kWarpLanes);
  }

  // There are pages for the blocks that were coded with them.
  Status keep_books() {
    if (made_.empty()) return Status::ok();
    for (auto& [layer, books] : made_) set_books(layer, std::move(books));
    made_.clear();
    return upload_layers();
  }

  void note(const DeviceWorks& works) {
    for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
      const LayerMove& move = works.moves[e];
      if (move.to.body_end <= move.from.body_end) continue;
      const uint32_t hint = planned_.hint(e);
      const bool fixed =
          ((hint & kFixesEntry) != 0 || is_fixed(move)) && !host_->is_raw_layer(move.layer);
      const bool shares = state_of(move.slot, move.layer).shares && (hint & kRewritesEntry) == 0;
      state_of(move.slot, move.layer) = {fixed, !fixed, shares};
    }
  }

  Status prepare(const DeviceWorks& works) {
    for (const auto& [entry, makes_books] : planned_.samples) {
      if (Status s = sample(works, entry, makes_books); !s) {
        const LayerMove& move = works.moves[entry];
        return s.with_context(name_of(move.id()) + ", layer " + std::to_string(move.layer));
      }
    }
    return upload(hints_, planned_.hints);
  }

  // The first blocks of an entry come to the host.
  Status sample(const DeviceWorks& works, int32_t entry, bool makes_books) {
    const LayerMove& move = works.moves[entry];
    const int32_t i = entry / works.num_layers;
    DeviceWorks one = works;
    one.slots += i, one.from += entry, one.to += entry;
    one.count = one.num_layers = 1, one.first_layer = move.layer;
    if (one.chunk.k != nullptr) {
      const int64_t skip = int64_t{i} * one.chunk.tokens * heads() * head_dim();
      one.chunk.k += skip, one.chunk.v += skip;
      if (one.chunk.significance != nullptr)
        one.chunk.significance += i * heads() * one.chunk.stride;
    }
    Result<CodedCall> call = call_of(one, block_count(move.to.body_end));
    if (!call) return call.status();
    uint32_t* const hint = hints_ + config_.max_sequences * layers();
    call->hints = hint;
    if (Status s = upload(hint, &kFixesEntry, sizeof(kFixesEntry)); !s) return s;
    if (Status s = open_entries(*call); !s) return s;
    const int32_t blocks = least(kSampleBlocks, call->blocks);
    call->group = {0, blocks};
    if (Status s = load_group(*call); !s) return s;
    std::vector<CodedRows::BlockTokens> tokens(static_cast<size_t>(heads()) * blocks);
    if (Status s = download_tokens(*call, move.to.body_end, &tokens); !s) return s;
    std::vector<WeightedRow> rows;
    LayerBooks books;
    const Status fitted =
        host_->fit_layer(move.layer, tokens, &rows, makes_books ? &books : nullptr);
    if (!fitted) return fitted;
    if (per_slot_) {
      if (Status s = make_tables(move, rows); !s) return s;
    }
    if (!makes_books) return Status::ok();
    const Status uploaded = upload_books(move.layer, books);
    made_[move.layer] = std::move(books);
    return uploaded ? upload_layers() : uploaded;
  }

  Status make_tables(const LayerMove& move, const std::vector<WeightedRow>& rows) {
    const int64_t record_bytes = device_.shape.record_bytes();
    std::vector<uint8_t> records(rows.size() * record_bytes);
    for (size_t h = 0; h < rows.size(); ++h) {
      const Status usable = check_weighted_keys(rows[h]);
      if (!usable) return usable.with_context("kv_head " + std::to_string(h));
      put_record(rows[h], records.data() + h * record_bytes);
    }
    if (Status s = upload(records_, records); !s) return s;
    return make_row_tables(records_, move.slot, {move.layer, move.layer + 1});
  }

  // Staged tokens of a call's only entry: [num_kv_heads, blocks].
  Status download_tokens(const CodedCall& call, int32_t body_end,
                         std::vector<CodedRows::BlockTokens>* tokens) {
    const size_t rows = tokens->size(), blocks = rows / heads();
    const size_t block = static_cast<size_t>(kBlockTokens) * head_dim();
    std::vector<uint16_t> x[2];
    std::vector<uint8_t> decided(rows * kBlockTokens * 4);
    for (const Component c : {Component::kKey, Component::kValue}) {
      std::vector<uint16_t>& of = x[static_cast<int32_t>(c)];
      of.resize(rows * block);
      if (Status s = download(of.data(), call.staged(c, 0), 2 * of.size()); !s) return s;
    }
    if (Status s = download(decided.data(), call.decided, decided.size()); !s) return s;
    for (size_t i = 0; i < rows; ++i) {
      const auto b = static_cast<int32_t>(i % blocks);
      const size_t row = b * static_cast<size_t>(heads()) + i / blocks;
      CodedRows::BlockTokens& of = (*tokens)[i];
      of.first = device_.shape.first_of(b);
      of.count = CodedShape::end_of(b, body_end) - of.first;
      for (int32_t c = 0; c < 2; ++c) {
        const uint16_t* from = x[c].data() + row * block;
        for (int32_t n = 0; n < of.count * head_dim(); ++n)
          of.x[c].push_back(half_to_float(from[n]));
      }
      for (int32_t t = 0; t < of.count; ++t) {
        const uint8_t* word = decided.data() + (row * kBlockTokens + t) * 4;
        of.decided.push_back(
            DecidedExponents::of(word[0] | uint32_t{word[1]} << 8 | uint32_t{word[2]} << 16));
        of.importance.push_back(static_cast<int8_t>(of.decided.back().importance));
      }
    }
    return Status::ok();
  }

  bool is_one_group(const CodedCall& call) const {
    return int64_t{call.layer_cells()} * call.works.num_layers <= call.group_cells;
  }

  PoolMemory saved_;       // kept from call to call; captured ones have nothing to save
  bool is_saved_ = false;  // what the call between plan() and write() writes over
  HostPlan planned_;
  std::map<int32_t, LayerBooks> made_;  // by layer: by plan(), until write() keeps them
};

}  // namespace tierkv::store
