// SPDX-License-Identifier: Apache-2.0
#include "store/rows/coded/coded_rows.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <variant>

#include "codec/file/container_format.h"
#include "codec/format/byte_cursor.h"
#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "codec/policy/profile.h"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {
namespace {

// Bytes of a block beside its codes, and how full pages are; measured, for estimates alone.
constexpr double kTypicalOverhead = 110, kTypicalFill = 0.93;

bool is_step(double x) {
  return x == 0 || (x >= 1e-6 && x <= 1024);
}

Status check_format(const CodedFormat& f) {
  if (!is_step(f.k) || !is_step(f.v)) return invalid("format.k and format.v: 1e-6 to 1024, or 0");
  if (f.max_length < 8 || f.max_length > kMaxCodeLength) {
    return invalid("format.max_length: not 8 to 14");
  }
  if (f.streams_per_lane != 1 && f.streams_per_lane != 2) {
    return invalid("format.streams_per_lane: not 1 or 2");
  }
  if (f.unit_tokens != 16 && f.unit_tokens != 32 && f.unit_tokens != 64) {
    return invalid("format.unit_tokens: not 16, 32 or 64");
  }
  if (f.key_books < 1 || f.key_books > kMaxFamilyBooks)
    return invalid("format.key_books: not 1 to 4");
  return Status::ok();
}

// Default steps of a profile belong to head scales.
bool has_head_scales(const StoreConfig& config) {
  const Profile* profile = config.profile.get();
  return profile != nullptr && !profile->rows[0].query_energy.empty() &&
         !profile->key_sensitivity.empty();
}

}  // namespace

CodedRows::CodedRows(const StoreConfig& config)
    : config_(config),
      format_(std::get<CodedFormat>(config.format)),
      is_raw_layer_(config.layout.num_layers),
      books_(config.layout.num_layers) {
  for (const int32_t layer : config.raw_layers) is_raw_layer_[layer] = 1;
}

Status CodedRows::prepare_sizes() {
  shape_.head_dim = config_.layout.head_dim;
  shape_.num_kv_heads = config_.layout.num_kv_heads;
  shape_.sink_tokens = config_.sink_tokens;
  shape_.max_blocks = block_count(config_.max_tokens);
  const int32_t block = shape_.largest_block_bytes();
  sizes_.unit_tokens = format_.unit_tokens;
  sizes_.cut_tokens = kBlockTokens;
  const int32_t raw = most(config_.window_tokens + sizes_.unit_tokens, kBlockTokens) - 1;
  sizes_.ring_tokens = static_cast<int32_t>(round_up(raw, kTileTokens));
  sizes_.page_bytes =
      config_.page_bytes != 0 ? config_.page_bytes : round_up(2 * block, kPageAlignment);
  if (sizes_.page_bytes < block) {
    return invalid("page_bytes: a block may take " + std::to_string(block));
  }
  const Result<int32_t> slots = fit_table(config_.page_bytes == 0, &sizes_.page_bytes, [&] {
    shape_.page_units = static_cast<int32_t>(sizes_.page_bytes / kUnitBytes);
    // After a truncation inside the body all tokens may lie in it.
    return layer_pages(0, config_.max_tokens + config_.window_tokens, true);
  });
  if (!slots) return slots.status();
  sizes_.most_pages = (int64_t{1} << 32) / shape_.page_units;
  sizes_.state_bytes = shape_.state_bytes();
  sizes_.table.num_sides = 1;
  sizes_.table.tokens_per_page[0] = shape_.page_units;
  sizes_.table.table_slots[0] = *slots;
  return Status::ok();
}

Status CodedRows::prepare() {
  if (Status s = check_format(format_); !s) return s;
  const StepSizes& steps = has_head_scales(config_) ? kProfileSteps : kOwnSteps;
  if (format_.k == 0) format_.k = steps.k;
  if (format_.v == 0) format_.v = steps.v;
  if (Status s = prepare_sizes(); !s) return s;
  const Profile* profile = config_.profile.get();
  const std::vector<Rope>& ropes =
      config_.rope.empty() && profile != nullptr ? profile->rope : config_.rope;
  for (const Rope& rope : ropes) {
    Result<RopeTable> table = make_rope_table(rope, shape_.head_dim, config_.max_tokens);
    if (!table) return table.status().with_context("rope");
    ropes_.push_back(std::move(*table));
  }
  starts_.resize(static_cast<size_t>(config_.layout.num_layers) * shape_.num_kv_heads);
  for (size_t r = 0; profile != nullptr && r < starts_.size(); ++r) {
    const RowProfile& from = profile->rows[r];
    const auto layer = static_cast<int32_t>(r) / shape_.num_kv_heads;
    RowStart& row = starts_[r];
    row.query_energy.assign(from.query_energy.begin(), from.query_energy.end());
    const std::vector<float>& mean =
        rope(layer) == nullptr ? from.key_mean : from.key_mean_before_rope;
    for (const float x : mean) row.key_mean.push_back(float_to_half(saturate_to_half_range(x)));
    row.key_scale = from.key_scale;
    row.value_scale = from.value_scale;
    const Result<WeightedRow> weighted =
        fit_weighted_row(fit_of(row), shape_.head_dim, WeightedTokens{}, rope(layer));
    if (!weighted) return weighted.status().with_context("profile");
    row.key_weight = weighted->key_weight;
  }
  return Status::ok();
}

WeightedFit CodedRows::fit_of(const RowStart& row) const {
  WeightedFit fit;
  fit.k = format_.k;
  fit.v = format_.v;
  fit.key_scale = row.key_scale;
  fit.value_scale = row.value_scale;
  fit.sm_scale = config_.layout.sm_scale;
  if (!row.query_energy.empty()) fit.query_energy = row.query_energy.data();
  if (!row.key_mean.empty()) fit.key_mean = row.key_mean.data();
  return fit;
}

const RopeTable* CodedRows::rope(int32_t layer) const {
  if (ropes_.empty()) return nullptr;
  const RopeTable& table = ropes_[ropes_.size() == 1 ? 0 : static_cast<size_t>(layer)];
  return table.pairing == RopePairing::kNone ? nullptr : &table;
}

bool CodedRows::needs_tokens(int32_t layer) const {
  bool needs = false;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) needs |= start(layer, h).needs_tokens();
  return needs;
}

int64_t CodedRows::layer_pages(int32_t layer, int32_t tokens, bool at_most) const {
  const int64_t blocks =
      int64_t{block_count(most(0, tokens - config_.window_tokens))} * 2 * shape_.num_kv_heads;
  if (at_most) return shape_.most_pages(blocks);
  double bytes = shape_.raw_block_bytes(kBlockTokens),
         room = static_cast<double>(sizes_.page_bytes);
  if (!is_raw_layer(layer)) {
    const double bits = has_head_scales(config_) ? 2.0 : 3.4;
    bytes = kTypicalOverhead + bits / 8 * kBlockTokens * shape_.head_dim;
    room *= kTypicalFill;
  }
  return static_cast<int64_t>(std::ceil(static_cast<double>(blocks) * bytes / room));
}

const LayerBooks* CodedRows::find_books(int32_t layer, const CodedPlan& plan) const {
  if (!books_[layer].empty()) return &books_[layer];
  const auto made = plan.made.find(layer);
  return made == plan.made.end() ? nullptr : &made->second;
}

WeightedRow CodedRows::row_of(int32_t layer, int32_t kv_head, const CodedRowState& state,
                              const uint16_t* means) const {
  WeightedRow row;
  row.head_dim = shape_.head_dim;
  row.key_step = state.key_step;
  row.value_step = state.value_step;
  row.key_mean.assign(means, means + shape_.head_dim);
  row.key_weight = start(layer, kv_head).key_weight;
  row.rope = rope(layer);
  return row;
}

std::vector<SideCounts> CodedRows::cut_counts(const HostLayer& layer, int32_t body_end) const {
  return {SideCounts{{units_before(layer, body_end / kBlockTokens)}}};
}

void CodedRows::relocate(const HostLayer& layer, const PageCopy* copies) {
  const PageCopy& copy = copies[0];
  if (copy.source == kNoPage) return;
  const auto units = static_cast<uint32_t>(shape_.page_units);
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      CodedBlockRef* ref = refs(layer, h, c);
      for (int32_t b = 0; b < block_count(layer.at.body_end); ++b, ++ref) {
        if (ref->offset / units != static_cast<uint32_t>(copy.source)) continue;
        ref->offset = static_cast<uint32_t>(copy.target) * units + ref->offset % units;
      }
    }
  }
}

int64_t CodedRows::nominal_bytes(const HostLayer& layer) const {
  const int32_t blocks = block_count(layer.at.body_end);
  int64_t bytes = 0;
  for (int32_t h = 0; h < shape_.num_kv_heads; ++h) {
    bytes += body_bytes(layer, h) - head_bytes(is_fixed(layer), blocks);
    bytes += 2 * blocks * int64_t{sizeof(CodedBlockRef)};
    if (is_fixed(layer)) bytes += 2 * shape_.head_dim + 8;
  }
  return bytes;
}

// The profile counts by what is taken from it.
std::vector<uint8_t> CodedRows::identity() const {
  std::vector<uint8_t> bytes, rows;
  ByteWriter out(&bytes), row(&rows);
  out.f64(format_.k);
  out.f64(format_.v);
  out.i32(format_.max_length);
  out.i32(format_.streams_per_lane);
  out.i32(format_.key_books);
  out.i32(format_.unit_tokens);
  for (const RowStart& start : starts_) {
    for (const double x : start.query_energy) row.f64(x);
    for (const uint16_t x : start.key_mean) row.u16(x);
    row.f64(start.key_scale);
    row.f64(start.value_scale);
  }
  out.u64(config_.profile == nullptr ? 0 : xxh3(rows.data(), rows.size()));
  return bytes;
}

// ---- blocks back to finished keys and values ----

Status CodedRows::decode(const WeightedRow& row, const LayerBooks& books,
                         const uint8_t* const bytes[2], const int64_t size[2], Positions range,
                         BlockCodes* codes, float* const* x) const {
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto i = static_cast<int32_t>(c);
    codes->codes[i].resize(static_cast<size_t>(range.count()) * shape_.head_dim);
    codes->exponents[i].resize(range.count());
    const BlockTarget target = {codes->codes[i].data(), codes->exponents[i].data(), range.count(),
                                shape_.head_dim};
    Status s = decode_block(bytes[i], size[i], books.family(c).books, target);
    const WeightedSource source = {target.codes, target.exponents, range.count(), range.first};
    if (s && x != nullptr) s = dequantize_weighted(row, c, source, x[i]);
    if (!s) return s;
  }
  return Status::ok();
}

void CodedRows::read_block(const HostLayer& layer, int32_t kv_head, int32_t block,
                           BlockCodes* codes, float* const x[2]) const {
  const uint8_t* bytes[2];
  int64_t size[2];
  const Positions range = {shape_.first_of(block), shape_.end_of(block, layer.at.body_end)};
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto i = static_cast<int32_t>(c);
    const CodedBlockRef ref = refs(layer, kv_head, c)[block];
    bytes[i] = block_bytes(ref);
    size[i] = int64_t{ref.units} * kUnitBytes;
    if (is_fixed(layer)) continue;
    read_raw_tiles(c, range.count(), shape_.head_dim, bytes[i] + kBlockTokens, x[i]);
    codes->exponents[i].resize(range.count());
    std::memcpy(codes->exponents[i].data(), bytes[i], range.count());
  }
  // Blocks were written by this format or checked when they came in.
  if (!is_fixed(layer)) return;
  const auto& state = *state_at<CodedRowState>(layer, shape_.row_byte(kv_head));
  const auto* means = state_at<uint16_t>(layer, shape_.means_byte(kv_head));
  const WeightedRow row = row_of(layer.layer, kv_head, state, means);
  (void)decode(row, books_[layer.layer], bytes, size, range, codes, x);
}

void CodedRows::read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end, float* k,
                     float* v, uint8_t* /*pruned*/) const {
  const int32_t dim = shape_.head_dim;
  std::vector<float> keys(int64_t{kBlockTokens} * dim), values(keys.size());
  float* const x[2] = {keys.data(), values.data()};
  BlockCodes codes;
  for (int32_t b = first / kBlockTokens; shape_.first_of(b) < end; ++b) {
    read_block(layer, kv_head, b, &codes, x);
    const int32_t from = most(first, shape_.first_of(b)),
                  to = least(end, shape_.end_of(b, layer.at.body_end));
    const int64_t skip = int64_t{from - shape_.first_of(b)} * dim;
    const int64_t count = int64_t{to - from} * dim, at = int64_t{from - first} * dim;
    std::copy_n(keys.data() + skip, count, k + at);
    std::copy_n(values.data() + skip, count, v + at);
  }
}

// Tokens of a raw layer are as free as before.
void CodedRows::read_decided(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end,
                             RawScore* scores) const {
  const int32_t block = first / kBlockTokens;
  std::vector<float> keys(int64_t{kBlockTokens} * shape_.head_dim), values(keys.size());
  float* const x[2] = {keys.data(), values.data()};
  BlockCodes codes;
  read_block(layer, kv_head, block, &codes, x);
  for (int32_t p = first; p < end; ++p) {
    const int32_t t = p - shape_.first_of(block);
    DecidedExponents decided;
    decided.importance = codes.exponents[0][t];
    decided.has_value = is_fixed(layer);
    if (decided.has_value) decided.value = codes.exponents[1][t];
    scores[p - first] = {bits_float(decided.bits()), RawScore::kDecided};
    if (is_raw_layer(layer.layer)) scores[p - first] = {};
  }
}

}  // namespace tierkv::store
