#include "codec/format/channel_block.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}
Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}

bool is_aligned(const void* p, uintptr_t to) {
  return reinterpret_cast<uintptr_t>(p) % to == 0;
}

uint16_t half_at(const uint8_t* p) {
  uint16_t x;
  std::memcpy(&x, p, 2);
  return x;
}
void put_half(uint8_t* p, uint16_t x) {
  std::memcpy(p, &x, 2);
}

// The 32-bit word of a code in a tile; codes of other tokens stay.
void put_code(uint8_t* tile, const CodePosition& at, int32_t bits, uint32_t code) {
  uint32_t word;
  std::memcpy(&word, tile + at.byte, 4);
  const uint32_t mask = (bits == 16 ? 0xffffu : (1u << bits) - 1) << at.bit;
  word = (word & ~mask) | code << at.bit;
  std::memcpy(tile + at.byte, &word, 4);
}
uint32_t code_at(const uint8_t* tile, const CodePosition& at, int32_t bits) {
  uint32_t word;
  std::memcpy(&word, tile + at.byte, 4);
  return word >> at.bit & ((1u << bits) - 1);
}

Status check_keys(const ComponentFormat& k) {
  if (k.unit != Unit::kChannel) return unsupported("unit is not channel");
  if (k.group != 64 && k.group != kMaxChannelTokens) {
    return unsupported("group of " + std::to_string(k.group) + " tokens: 64 or 128");
  }
  return Status::ok();
}

Status check_component(const ComponentFormat& f) {
  if (f.step_rule != StepRule::kMinMax) return unsupported("step_rule");
  if (f.bits != 4 && f.bits != 2) {
    return unsupported(std::to_string(f.bits) + " bits: 4 or 2");
  }
  if (f.entropy != Entropy::kNone) return unsupported("entropy coder");
  if (f.basis != BasisKind::kNone) return unsupported("basis");
  return Status::ok();
}

using Values = std::vector<float>;  // [tokens, head_dim]

void encode_keys(const ChannelLayout& l, const float* x, uint8_t* block) {
  const int32_t dim = l.head_dim(), bits = l.k_tile.bits;
  std::vector<uint8_t> codes(static_cast<size_t>(l.tokens) * dim);
  for (int32_t d = 0; d < dim; ++d) {
    QuantParams params;
    (void)quantize_minmax(x + d, l.tokens, dim, 1 << bits, &params, codes.data() + d);
    put_half(block + l.k_metadata + channel_scale_byte(d), params.scale);
    put_half(block + l.k_metadata + channel_zero_point_byte(d), params.zero_point);
    for (int32_t t = 0; t < l.tokens; ++t) {
      put_code(block + l.k_codes + t / kTileTokens * l.k_tile.bytes(),
               code_position(l.k_tile, Component::kKey, t % kTileTokens, d), bits,
               codes[t * dim + d]);
    }
  }
}

void encode_values(const ChannelLayout& l, const float* x, uint8_t* block) {
  const int32_t dim = l.head_dim(), bits = l.v_tile.bits;
  std::vector<uint8_t> codes(dim);
  for (int32_t t = 0; t < l.tokens; ++t) {
    QuantParams params;
    (void)quantize_minmax(x + t * dim, dim, 1, 1 << bits, &params, codes.data());
    put_half(block + l.value_metadata_byte(t), params.scale);
    put_half(block + l.value_metadata_byte(t) + 2, params.zero_point);
    for (int32_t d = 0; d < dim; ++d) {
      put_code(block + l.v_codes + t / kTileTokens * l.v_tile.bytes(),
               code_position(l.v_tile, Component::kValue, t % kTileTokens, d), bits, codes[d]);
    }
  }
}

void put_residual(const ChannelLayout& l, uint8_t* residual, Component c, int32_t token,
                  const uint16_t* x) {
  const TileLayout tile = {16, l.head_dim()};
  for (int32_t d = 0; d < l.head_dim(); ++d) {
    put_code(residual + l.residual_tile(c, token / kTileTokens),
             code_position(tile, c, token % kTileTokens, d), 16, x[d]);
  }
}

bool is_finite_half(uint16_t x) {
  return (x & 0x7c00u) != 0x7c00u;
}
bool are_finite(const uint16_t* x, int32_t n) {
  return std::all_of(x, x + n, is_finite_half);
}

StatusCode append_row(const ChannelCache& cache, int32_t row, const uint16_t* k,
                      const uint16_t* v) {
  const ChannelLayout& l = cache.layout;
  const int32_t dim = l.head_dim(), at = cache.residual_tokens[row];
  if (at < 0 || at >= l.tokens || cache.block_count[row] < 0) return StatusCode::kCorrupt;
  const bool fills = at + 1 == l.tokens;
  const int32_t id = fills ? cache.block_id(row, cache.block_count[row]) : 0;
  if (id < 0) return StatusCode::kOutOfPages;
  if (!are_finite(k, dim) || !are_finite(v, dim)) return StatusCode::kNonFinite;
  uint8_t* residual = cache.residual_of(row);
  put_residual(l, residual, Component::kKey, at, k);
  put_residual(l, residual, Component::kValue, at, v);
  cache.residual_tokens[row] = fills ? 0 : at + 1;
  if (!fills) return StatusCode::kOk;
  Values x[2] = {Values(l.tokens * dim), Values(l.tokens * dim)};
  for (int32_t i = 0; i < l.tokens * dim; ++i) {
    x[0][i] = residual_value(l, residual, Component::kKey, i / dim, i % dim);
    x[1][i] = residual_value(l, residual, Component::kValue, i / dim, i % dim);
  }
  encode_channel_block(l, x[0].data(), x[1].data(), cache.block(id));
  ++cache.block_count[row];
  return StatusCode::kOk;
}

StatusCode fill_row(const ChannelCache& cache, const ChannelPrompt& p, int32_t row) {
  const ChannelLayout& l = cache.layout;
  const int32_t sequence = row / p.num_kv_heads, head = row % p.num_kv_heads, dim = l.head_dim();
  const int32_t first = p.indptr[sequence], end = p.indptr[sequence + 1];
  cache.block_count[row] = cache.residual_tokens[row] = 0;
  if (first < 0 || end < first) return StatusCode::kCorrupt;  // before their difference overflows
  const int32_t tokens = end - first, blocks = tokens / l.tokens;
  if (blocks > cache.max_blocks) return StatusCode::kCorrupt;
  const auto token = [&](const uint16_t* x, int32_t t) {
    return x + ((static_cast<int64_t>(first) + t) * p.num_kv_heads + head) * dim;
  };
  for (int32_t b = 0; b < blocks; ++b) {
    if (cache.block_id(row, b) < 0) return StatusCode::kOutOfPages;
  }
  for (int32_t t = 0; t < tokens; ++t) {
    if (!are_finite(token(p.k, t), dim) || !are_finite(token(p.v, t), dim)) {
      return StatusCode::kNonFinite;
    }
  }
  Values x[2] = {Values(l.tokens * dim), Values(l.tokens * dim)};
  for (int32_t b = 0; b < blocks; ++b) {
    for (int32_t i = 0; i < l.tokens * dim; ++i) {
      const int32_t t = b * l.tokens + i / dim;
      x[0][i] = half_to_float(token(p.k, t)[i % dim]);
      x[1][i] = half_to_float(token(p.v, t)[i % dim]);
    }
    encode_channel_block(l, x[0].data(), x[1].data(), cache.block(cache.block_id(row, b)));
  }
  for (int32_t t = blocks * l.tokens; t < tokens; ++t) {
    put_residual(l, cache.residual_of(row), Component::kKey, t % l.tokens, token(p.k, t));
    put_residual(l, cache.residual_of(row), Component::kValue, t % l.tokens, token(p.v, t));
  }
  cache.block_count[row] = blocks;
  cache.residual_tokens[row] = tokens % l.tokens;
  return StatusCode::kOk;
}

}  // namespace

Result<ChannelLayout> make_channel_layout(const TierFormat& format, int32_t head_dim) {
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256) {
    return unsupported("channel blocks of head_dim " + std::to_string(head_dim) +
                       ": 64, 96, 128 or 256");
  }
  if (head_dim == 256 && format.k.group != 64) {
    return unsupported("channel blocks of head_dim 256: a group of 64 tokens");
  }
  if (Status s = check_keys(format.k); !s) return s.with_context("keys");
  if (Status s = check_component(format.k); !s) return s.with_context("keys");
  if (format.v.unit != Unit::kToken) return unsupported("values: unit is not token");
  if (format.v.group != 0 && format.v.group != head_dim) {
    return unsupported("values: sub-groups of a head");
  }
  if (Status s = check_component(format.v); !s) return s.with_context("values");
  return channel_layout(head_dim, format.k.bits, format.v.bits, format.k.group);
}

Status ChannelCache::validate() const {
  TierFormat format = token_wise_tier(layout.k_tile.bits, layout.v_tile.bits);
  format.k.unit = Unit::kChannel;
  format.k.group = layout.tokens;
  const Result<ChannelLayout> expected = make_channel_layout(format, layout.head_dim());
  if (!expected || std::memcmp(&*expected, &layout, sizeof(layout)) != 0) {
    return invalid("layout is not one of make_channel_layout()");
  }
  if (num_rows < 0 || max_blocks < 0 || num_blocks < 0) return invalid("a count is negative");
  if (max_blocks > (1 << 24)) return invalid("max_blocks exceeds 2^24");
  if (num_rows == 0) return Status::ok();
  if (pool == nullptr || !is_aligned(pool, 128)) return invalid("pool is null or misaligned");
  if (residual == nullptr || !is_aligned(residual, 16)) {
    return invalid("residual is null or misaligned");
  }
  if (table == nullptr || block_count == nullptr || residual_tokens == nullptr) {
    return invalid("table, block_count or residual_tokens is null");
  }
  return Status::ok();
}

Status append_channel_host(const ChannelCache& cache, const ChannelAppend& append) {
  if (Status s = cache.validate(); !s) return s;
  if (append.k == nullptr || append.v == nullptr || append.status == nullptr) {
    return invalid("k, v or status is null");
  }
  for (int32_t row = 0; row < cache.num_rows; ++row) {
    const int64_t at = static_cast<int64_t>(row) * cache.layout.head_dim();
    append.status[row] = append_row(cache, row, append.k + at, append.v + at);
  }
  return Status::ok();
}

Status fill_channel_host(const ChannelCache& cache, const ChannelPrompt& prompt) {
  if (Status s = cache.validate(); !s) return s;
  if (prompt.k == nullptr || prompt.v == nullptr || prompt.status == nullptr ||
      prompt.indptr == nullptr) {
    return invalid("k, v, indptr or status is null");
  }
  if (prompt.num_kv_heads < 1 || cache.num_rows % prompt.num_kv_heads != 0) {
    return invalid("num_kv_heads");
  }
  for (int32_t row = 0; row < cache.num_rows; ++row) {
    prompt.status[row] = fill_row(cache, prompt, row);
  }
  return Status::ok();
}

// The values' parameters are finite because they are.
void encode_channel_block(const ChannelLayout& l, const float* k, const float* v, uint8_t* block) {
  std::memset(block, 0, l.bytes);
  encode_keys(l, k, block);
  encode_values(l, v, block);
}

float channel_value(const ChannelLayout& l, const uint8_t* block, Component component,
                    int32_t token, int32_t dim) {
  const TileLayout& tile = l.tile(component);
  const uint32_t code =
      code_at(block + l.codes(component) + token / kTileTokens * tile.bytes(),
              code_position(tile, component, token % kTileTokens, dim), tile.bits);
  const bool key = component == Component::kKey;
  const uint8_t* scale =
      block + (key ? l.k_metadata + channel_scale_byte(dim) : l.value_metadata_byte(token));
  const uint8_t* zero_point = key ? block + l.k_metadata + channel_zero_point_byte(dim) : scale + 2;
  return dequantize(static_cast<int32_t>(code), half_to_float(half_at(scale)),
                    half_to_float(half_at(zero_point)));
}

float residual_value(const ChannelLayout& l, const uint8_t* residual, Component component,
                     int32_t token, int32_t dim) {
  const TileLayout tile = {16, l.head_dim()};
  return half_to_float(
      static_cast<uint16_t>(code_at(residual + l.residual_tile(component, token / kTileTokens),
                                    code_position(tile, component, token % kTileTokens, dim), 16)));
}

}  // namespace tierkv
