// SPDX-License-Identifier: Apache-2.0
// Blocks back to finished keys and values.
#include <algorithm>
#include <cstring>

#include "store/rows/coded/coded_rows.h"
#include "store/rows/raw_tiles.h"

namespace tierkv::store {

Status CodedRows::decode(const WeightedRow& row, const LayerBooks& books,
                         const uint8_t* const bytes[2], const int64_t size[2], Positions range,
                         BlockCodes* codes, float* const* x) const {
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto i = static_cast<int32_t>(c);
    codes->codes[i].resize(static_cast<size_t>(range.count()) * shape_.head_dim);
    codes->exponents[i].resize(range.count());
    const WeightedTarget target = {codes->codes[i].data(), codes->exponents[i].data(),
                                   range.count(), shape_.head_dim};
    Status s = decode_weighted_block(bytes[i], size[i], books.family(c), target);
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
  if (is_fixed(layer)) {
    (void)decode(row_of(layer, kv_head), books_[layer.layer], bytes, size, range, codes, x);
  }
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
