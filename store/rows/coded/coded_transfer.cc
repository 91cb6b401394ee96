// SPDX-License-Identifier: Apache-2.0
// Bodies of coded rows as bytes, and back.
//
// A body is, little-endian: whether it is fixed (u32); tokens of its geometric mean (i32), their
// sum of logarithms (i64, units of 2^-24); fixed: steps of keys and values (f32 each), 0 (u64),
// means (fp16 [head_dim]); of each block the units (u32, not 0) of keys, then of values, and zeros
// up to a multiple of 16; then of each block as many times 16 bytes of keys, then of values.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"
#include "store/rows/coded/coded_rows.h"

namespace tierkv::store {
namespace {

// Whether the first `count` are finite.
bool all_finite(const std::vector<float>& x, size_t count) {
  return std::all_of(x.begin(), x.begin() + static_cast<int64_t>(count),
                     [](float a) { return is_finite(a); });
}

// Whether codes and exponents of any size are values within fp32: a code is below 2^15, f(e) below
// 2^16, and a turn adds two of them and of a mean, which is fp16.
bool is_tame(const WeightedRow& row) {
  constexpr float kMost = 0x1p64f;
  int32_t tame = row.value_step < kMost && row.key_step < kMost ? 1 : 0;
  for (const float weight : row.key_weight) {
    tame &= dim_scale(row.key_step, weight) < kMost ? 1 : 0;
  }
  return tame != 0;
}

// What a body begins with comes out of memory while the one before it is read.
void prefetch(std::span<const uint8_t> bytes, int64_t count) {
  constexpr int64_t kLine = 64;
  for (int64_t at = 0; at < std::min(count, static_cast<int64_t>(bytes.size())); at += kLine) {
    __builtin_prefetch(bytes.data() + at);
  }
}

}  // namespace

std::vector<uint8_t> CodedRows::export_shared(const HostLayer& layer) const {
  return is_fixed(layer) ? books_[layer.layer].bytes : std::vector<uint8_t>();
}

int64_t CodedRows::head_bytes(bool fixed, int32_t blocks) const {
  return 16 + (fixed ? 16 + int64_t{2} * shape_.head_dim : 0) + round_up(int64_t{8} * blocks, 16);
}

int64_t CodedRows::body_bytes(const HostLayer& layer, int32_t kv_head) const {
  const int32_t blocks = block_count(layer.at.body_end);
  int64_t bytes = head_bytes(is_fixed(layer), blocks);
  for (const Component c : {Component::kKey, Component::kValue}) {
    const CodedBlockRef* const ref = refs(layer, kv_head, c);
    for (int32_t b = 0; b < blocks; ++b) bytes += int64_t{ref[b].units} * kUnitBytes;
  }
  return bytes;
}

ExportedBody CodedRows::export_body(const HostLayer& layer, int32_t kv_head) const {
  ExportedBody body;
  ByteWriter out(&body.head);
  const auto& state = *state_at<CodedRowState>(layer, shape_.row_byte(kv_head));
  out.u32(is_fixed(layer) ? 1 : 0);
  out.i32(state.mean.seen);
  out.i64(state.mean.logs);
  if (is_fixed(layer)) {
    out.f32(state.key_step);
    out.f32(state.value_step);
    out.u64(0);
    out.bytes(state_at<uint16_t>(layer, shape_.means_byte(kv_head)), shape_.head_dim * 2);
  }
  const int32_t blocks = block_count(layer.at.body_end);
  body.head.reserve(head_bytes(is_fixed(layer), blocks));
  body.pages.reserve(size_t{2} * blocks);
  for (int32_t b = 0; b < blocks; ++b) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      const CodedBlockRef ref = refs(layer, kv_head, c)[b];
      out.u32(ref.units);
      body.add(block_bytes(ref), int64_t{ref.units} * kUnitBytes);
    }
  }
  body.head.resize(head_bytes(is_fixed(layer), blocks));
  return body;
}

// State of the row, and where its blocks are in the bytes.
Status CodedRows::import_row(const ImportWork& work, int32_t kv_head, LayerDraft* draft,
                             std::vector<WeightedRow>* rows) const {
  ByteReader in(work.bodies[kv_head].data(), work.bodies[kv_head].size());
  const uint32_t fixed = in.u32();
  if (kv_head == 0) draft->fixed = fixed == 1;
  if (fixed > 1 || draft->fixed != (fixed == 1)) return corrupt_body("fixed is neither 0 nor 1");
  CodedRowState state;
  state.mean.seen = in.i32();
  state.mean.logs = in.i64();
  if (!state.mean.is_sound()) return corrupt_body("its mean is impossible");
  std::vector<uint16_t> means(shape_.head_dim);
  const int64_t means_bytes = int64_t{2} * shape_.head_dim;
  if (draft->fixed) {
    state.key_step = in.f32();
    state.value_step = in.f32();
    if (in.u64() != 0) return corrupt_body("its steps are impossible");
    const uint8_t* const from = in.take(means_bytes);
    if (from != nullptr) std::memcpy(means.data(), from, means_bytes);
    rows->push_back(row_of(work.layer.layer, kv_head, state, means.data()));
    if (Status s = rows->back().validate(); !s) return corrupt_body(s.message());
  }
  draft->rows.push_back(state);
  draft->means.push_back(std::move(means));
  const uint32_t most_units =
      static_cast<uint32_t>(least(shape_.page_units, shape_.largest_block_bytes() / kUnitBytes));
  const int32_t count = 2 * draft->end_block, padded = static_cast<int32_t>(round_up(count, 4));
  const uint8_t* const units = in.take(size_t{4} * padded);
  if (units == nullptr) return corrupt_body("it ends too early");
  uint64_t sum = 0;
  uint32_t largest = 0;
  int32_t empty = 0;
  uint32_t* to = draft->units.data() + size_t{2} * kv_head;  // in the order of the pages
  for (int32_t i = 0; i < count; i += 2, to += 2 * shape_.num_kv_heads) {
    for (int32_t c = 0; c < 2; ++c) {
      const uint32_t size = load_u32(units + size_t{4} * (i + c));
      to[c] = size;
      sum += size;
      largest = std::max(largest, size);
      empty |= size == 0 ? 1 : 0;
    }
  }
  for (int32_t i = count; i < padded; ++i) empty |= load_u32(units + size_t{4} * i) != 0 ? 1 : 0;
  if (empty != 0) return corrupt_body("a block is empty");
  if (largest > most_units) return corrupt_body("a block is too long");
  draft->brought.push_back(in.take(sum * kUnitBytes));
  if (!in.ok()) return corrupt_body("it ends too early");
  return in.at_end() ? Status::ok() : corrupt_body("wrong size");
}

Status CodedRows::check_raw_block(const uint8_t* bytes, int64_t size, int32_t tokens) const {
  if (size != shape_.raw_block_bytes(tokens)) return corrupt_body("a raw block has another size");
  for (int32_t t = 0; t < kBlockTokens; ++t) {
    const auto g = static_cast<int8_t>(bytes[t]);
    if (t < tokens ? !is_importance_exponent(g) : g != 0) {
      return corrupt_body("an exponent is impossible");
    }
  }
  return Status::ok();
}

// Blocks that were made with the books of this store stay as they are, the others are coded anew.
Status CodedRows::import_layer(const ImportWork& work, LayerBooks* theirs, LayerDraft* draft,
                               bool* is_left) const {
  const int32_t layer = work.layer.layer, heads = shape_.num_kv_heads;
  draft->end_block = block_count(work.body_end);
  draft->units.resize(size_t{2} * draft->end_block * heads);
  std::vector<WeightedRow> rows;
  rows.reserve(heads);
  for (int32_t h = 0; h < heads; ++h) {
    if (h + 1 < heads) prefetch(work.bodies[h + 1], head_bytes(true, draft->end_block));
    Status s = import_row(work, h, draft, &rows);
    if (!s) return s.with_context("kv_head " + std::to_string(h));
  }
  const bool raw = is_raw_layer(layer);
  if (draft->fixed && raw) return corrupt_body("a raw layer is fixed");
  if (!draft->fixed && !raw && work.body_end >= kSampleBlocks * kBlockTokens)
    return corrupt_body("it is not fixed");
  if (draft->fixed == work.shared.empty())
    return corrupt_body("codebooks without blocks, or without");
  if (draft->end_block > 0 && shape_.tokens_of(0, work.body_end) < 1) {
    return corrupt_body("a block without tokens");
  }
  const LayerBooks& held = books_[layer];
  const bool same_books =
      !draft->fixed || held.empty() || std::ranges::equal(held.bytes, work.shared);
  const bool is_held = !held.empty() && same_books;
  if (work.decodes_later && draft->fixed) {
    *is_left = !is_held || !std::all_of(rows.begin(), rows.end(), is_tame);
    return Status::ok();
  }
  if (draft->fixed && !is_held) {
    Result<LayerBooks> parsed = parse_books(format_, config_.layout, work.shared);
    if (!parsed) return parsed.status();
    *theirs = std::move(*parsed);
  }
  std::vector<const uint8_t*> next = draft->brought;
  std::vector<float> values[2];
  for (std::vector<float>& x : values) x.resize(int64_t{kBlockTokens} * shape_.head_dim);
  float* const x[2] = {values[0].data(), values[1].data()};
  BlockCodes codes;
  for (int32_t i = 0; i < draft->end_block * heads; ++i) {
    const int32_t b = i / heads, h = i % heads;
    const Positions range = {shape_.first_of(b), shape_.end_of(b, work.body_end)};
    const uint8_t* bytes[2];
    int64_t size[2];
    for (int32_t c = 0; c < 2; ++c) {
      size[c] = int64_t{draft->units[2 * i + c]} * kUnitBytes;
      bytes[c] = std::exchange(next[h], next[h] + size[c]);
      if (draft->fixed) continue;
      if (Status s = check_raw_block(bytes[c], size[c], range.count()); !s) return s;
    }
    if (!draft->fixed) continue;
    const bool tame = is_tame(rows[h]);
    Status s =
        decode(rows[h], is_held ? held : *theirs, bytes, size, range, &codes, tame ? nullptr : x);
    if (!s) return corrupt_body(s.message());
    const auto count = static_cast<size_t>(range.count()) * shape_.head_dim;
    if (!tame && (!all_finite(values[0], count) || !all_finite(values[1], count))) {
      return corrupt_body("beyond fp32");
    }
    if (same_books) continue;
    s = encode(held, h, range.count(), codes, draft);
    if (!s) return corrupt_body(s.message());
  }
  if (!same_books) draft->brought.clear(), draft->units.clear();
  return Status::ok();
}

Result<std::unique_ptr<BodyPlan>> CodedRows::plan_import(const ImportWork& work) {
  auto plan = std::make_unique<CodedPlan>();
  bool is_left = false;
  LayerBooks books;
  LayerDraft& draft = plan->drafts.emplace_back();
  const int32_t layer = work.layer.layer;
  Status s = import_layer(work, &books, &draft, &is_left);
  if (!s) return s.with_context("layer " + std::to_string(layer));
  if (books_[layer].empty() && !books.empty()) plan->made[layer] = std::move(books);
  add_layer_plan(work.layer, &draft, plan.get());
  return std::unique_ptr<BodyPlan>(is_left ? nullptr : std::move(plan));
}

}  // namespace tierkv::store
