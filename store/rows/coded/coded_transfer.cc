// SPDX-License-Identifier: Apache-2.0
// Bodies of coded rows as bytes, and back.
//
// A body is, little-endian: whether it is fixed (u8); tokens of its geometric mean (i32), their sum
// of logarithms (i64, units of
// 2^-24); fixed: steps of keys and values (f32 each), means (fp16 [head_dim]); of each
// block keys, then values: units (u32) and as many times 16 bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "codec/format/byte_cursor.h"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {
namespace {

Status corrupt(const std::string& why) {
  return Status(StatusCode::kCorrupt, "body: " + why);
}

bool all_finite(const std::vector<float>& x) {
  return std::all_of(x.begin(), x.end(), [](float a) { return is_finite(a); });
}

}  // namespace

std::vector<uint8_t> CodedRows::export_shared(const HostLayer& layer) const {
  return is_fixed(layer) ? serialize_books(books_[layer.layer]) : std::vector<uint8_t>();
}

std::vector<uint8_t> CodedRows::export_body(const HostLayer& layer, int32_t kv_head) const {
  std::vector<uint8_t> bytes;
  ByteWriter out(&bytes);
  const auto& state = *state_at<CodedRowState>(layer, shape_.row_byte(kv_head));
  const auto* means = state_at<uint16_t>(layer, shape_.means_byte(kv_head));
  out.u8(is_fixed(layer) ? 1 : 0);
  out.i32(state.mean.seen);
  out.i64(state.mean.logs);
  if (is_fixed(layer)) {
    out.f32(state.key_step);
    out.f32(state.value_step);
    out.bytes(means, shape_.head_dim * sizeof(uint16_t));
  }
  for (int32_t b = 0; b < block_count(layer.at.body_end); ++b) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      const CodedBlockRef ref = refs(layer, kv_head, c)[b];
      out.u32(ref.units);
      out.bytes(block_bytes(ref), static_cast<size_t>(ref.units) * kUnitBytes);
    }
  }
  return bytes;
}

// State of the row, and where its blocks are in the bytes.
Status CodedRows::import_row(const ImportWork& work, int32_t kv_head, LayerDraft* draft,
                             std::vector<const uint8_t*>* blocks,
                             std::vector<int64_t>* sizes) const {
  ByteReader in(work.bodies[kv_head]);
  const uint8_t fixed = in.u8();
  if (kv_head == 0) draft->fixed = fixed == 1;
  if (fixed > 1 || draft->fixed != (fixed == 1)) return corrupt("fixed is neither 0 nor 1");
  CodedRowState state;
  state.mean.seen = in.i32();
  state.mean.logs = in.i64();
  if (!state.mean.is_sound()) return corrupt("its mean is impossible");
  std::vector<uint16_t> means(shape_.head_dim);
  if (draft->fixed) {
    state.key_step = in.f32();
    state.value_step = in.f32();
    for (uint16_t& x : means) x = in.u16();
  }
  if (draft->fixed) {
    Status s = row_of(work.layer.layer, kv_head, state, means.data()).validate();
    if (!s) return corrupt(s.message());
  }
  draft->rows.push_back(state);
  draft->means.push_back(means);
  for (int32_t i = 0; i < 2 * draft->end_block; ++i) {
    const uint32_t units = in.u32();
    if (units > static_cast<uint32_t>(shape_.page_units)) return corrupt("a block is too long");
    blocks->push_back(in.take(uint64_t{units} * kUnitBytes));
    sizes->push_back(int64_t{units} * kUnitBytes);
  }
  return in.at_end() ? Status::ok() : corrupt("wrong size");
}

// Blocks are coded anew, with the books of this store: what comes in is what it would have written.
Status CodedRows::import_layer(const ImportWork& work, CodedPlan* plan, LayerDraft* draft) const {
  const int32_t layer = work.layer.layer, dim = shape_.head_dim, heads = shape_.num_kv_heads;
  draft->end_block = block_count(work.body_end);
  std::vector<std::vector<const uint8_t*>> blocks(heads);
  std::vector<std::vector<int64_t>> sizes(heads);
  for (int32_t h = 0; h < heads; ++h) {
    Status s = import_row(work, h, draft, &blocks[h], &sizes[h]);
    if (!s) return s.with_context("kv_head " + std::to_string(h));
  }
  const bool raw = is_raw_layer(layer);
  if (draft->fixed && raw) return corrupt("a raw layer is fixed");
  if (!draft->fixed && !raw && work.body_end >= kSampleBlocks * kBlockTokens)
    return corrupt("it is not fixed");
  if (draft->fixed == work.shared.empty()) return corrupt("codebooks without blocks, or without");
  LayerBooks theirs;
  if (draft->fixed) {
    Result<LayerBooks> parsed = parse_books(format_, config_.layout, work.shared);
    if (!parsed) return parsed.status();
    theirs = std::move(*parsed);
    if (find_books(layer, *plan) == nullptr) plan->made[layer] = theirs;
  }
  BlockTokens tokens;
  BlockCodes codes;
  for (int32_t b = 0; b < draft->end_block; ++b) {
    const Positions range = {shape_.first_of(b), shape_.end_of(b, work.body_end)};
    if (range.count() < 1) return corrupt("a block without tokens");
    tokens.count = range.count();
    for (std::vector<float>& x : tokens.x) x.assign(static_cast<size_t>(tokens.count) * dim, 0.0f);
    float* const x[2] = {tokens.x[0].data(), tokens.x[1].data()};
    for (int32_t h = 0; h < heads; ++h) {
      const uint8_t* const* bytes = blocks[h].data() + 2 * b;
      const int64_t* size = sizes[h].data() + 2 * b;
      if (draft->fixed) {
        const WeightedRow row = row_of(layer, h, draft->rows[h], draft->means[h].data());
        Status s = decode(row, theirs, bytes, size, range, &codes, x);
        if (!s) return corrupt(s.message());
        if (!all_finite(tokens.x[0]) || !all_finite(tokens.x[1])) return corrupt("beyond fp32");
        s = encode(*find_books(layer, *plan), h, tokens.count, codes, draft);
        if (!s) return corrupt(s.message());
        continue;
      }
      for (const Component c : {Component::kKey, Component::kValue}) {
        const auto i = static_cast<int32_t>(c);
        if (size[i] != shape_.raw_block_bytes(tokens.count))
          return corrupt("a raw block has another size");
        tokens.importance.resize(tokens.count);
        std::memcpy(tokens.importance.data(), bytes[i], tokens.importance.size());
        for (const int8_t g : tokens.importance) {
          if (!is_importance_exponent(g)) return corrupt("an exponent is impossible");
        }
        read_raw_tiles(c, tokens.count, dim, bytes[i] + kBlockTokens, x[i]);
        if (!all_finite(tokens.x[i])) return corrupt("a raw value is not finite");
        draft->blocks.push_back(raw_block(tokens, c));
      }
    }
  }
  return Status::ok();
}

Result<std::unique_ptr<BodyPlan>> CodedRows::plan_import(const std::vector<ImportWork>& works) {
  auto plan = std::make_unique<CodedPlan>();
  for (const ImportWork& work : works) {
    LayerDraft draft;
    if (Status s = import_layer(work, plan.get(), &draft); !s) {
      return s.with_context("layer " + std::to_string(work.layer.layer));
    }
    add_layer_plan(work.layer, draft, plan.get());
    plan->drafts.push_back(std::move(draft));
  }
  return std::unique_ptr<BodyPlan>(std::move(plan));
}

}  // namespace tierkv::store
