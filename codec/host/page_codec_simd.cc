// SPDX-License-Identifier: Apache-2.0
// The fast page codec: whole tiles in registers, the same bytes as reference::append_tokens and
// decode_tokens.
//
// Tokens that continue a tile already in use go through the plain path, and so does a batch that
// the fast one gives back: the plain path knows which token to name and how to leave the page. A
// CPU without SIMD takes it too.
// Vectors whose size the compiler does not know cannot be kept in arrays, as the transposes do.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/host/page_codec_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "codec/format/half-inl.h"
#include "codec/host/page_codec.h"
#include "codec/host/page_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

bool encode_tiles(const HostPage&, int32_t, const TokenBatch&, int32_t) {
  return false;
}
void decode_tiles(const HostPage& page, int32_t slot, const TokenOutput& out) {
  (void)reference::decode_tokens(page, slot, out);
}

#else

// At most 16 lanes, so that a sub-group is a whole number of vectors.
using DF = hn::CappedTag<float, kDimBlock>;
using DI = hn::Rebind<int32_t, DF>;
using DU = hn::Rebind<uint32_t, DF>;
using DByte = hn::Rebind<uint8_t, DF>;

// x [n] = the row's elements, exactly.
HWY_INLINE void load_row(const void* row, DType dtype, int32_t n, float* x) {
  const DF df;
  const auto step = static_cast<int32_t>(hn::Lanes(df));
  const auto* half = static_cast<const uint16_t*>(row);
  for (int32_t i = 0; i < n; i += step) {
    const auto v = dtype == DType::kFloat32 ? hn::LoadU(df, static_cast<const float*>(row) + i)
                                            : load_halves(df, dtype == DType::kBFloat16, half + i);
    hn::StoreU(v, df, x + i);
  }
}

// Element i.. of the row = v; fp16 saturates, infinity and NaN apart.
HWY_INLINE void store_vector(hn::Vec<DF> v, DType dtype, void* row, int32_t i) {
  const DF df;
  auto* half = static_cast<uint16_t*>(row);
  if (dtype == DType::kFloat32) return hn::StoreU(v, df, static_cast<float*>(row) + i);
  if (dtype == DType::kFloat16) {
    const auto top = hn::Set(df, kMaxHalf);
    const auto finite = hn::Lt(hn::Abs(v), hn::Set(df, HUGE_VALF));
    v = hn::IfThenElse(finite, hn::Max(hn::Min(v, top), hn::Neg(top)), v);
  }
  store_halves(v, df, dtype == DType::kBFloat16, half + i);
}

// False when a value is NaN or infinite; else *lo and *hi are the extrema of x [n].
HWY_INLINE bool extrema(const float* x, int32_t n, float* lo, float* hi) {
  const DF df;
  const DU du;
  const auto step = static_cast<int32_t>(hn::Lanes(df));
  auto low = hn::LoadU(df, x), high = low;
  auto magnitude = hn::Zero(du);
  for (int32_t i = 0; i < n; i += step) {
    const auto v = hn::LoadU(df, x + i);
    low = hn::Min(low, v);
    high = hn::Max(high, v);
    magnitude = hn::Max(magnitude, hn::And(hn::BitCast(du, v), hn::Set(du, 0x7fffffffu)));
  }
  if (hn::GetLane(hn::MaxOfLanes(du, magnitude)) >= 0x7f800000u) return false;
  *lo = hn::GetLane(hn::MinOfLanes(df, low));
  *hi = hn::GetLane(hn::MaxOfLanes(df, high));
  return true;
}

// sum_of_squares(): the partial sums are the lanes.
HWY_INLINE float squares(const float* x, int32_t n) {
  const DF df;
  const auto step = static_cast<int32_t>(hn::Lanes(df));
  alignas(64) float lane[kNormPartials];
  for (int32_t first = 0; first < kNormPartials; first += step) {
    auto sum = hn::Zero(df);
    for (int32_t i = first; i < n; i += kNormPartials) {
      const auto v = hn::LoadU(df, x + i);
      sum = hn::Add(sum, hn::Mul(v, v));
    }
    hn::Store(sum, df, lane + first);
  }
  return add_partials(lane);
}

// As minmax_code(): clamping before or after rounding is the same, the bounds being integers.
HWY_INLINE void quantize_group(const float* x, int32_t n, QuantParams params, int32_t levels,
                               uint8_t* codes) {
  const DF df;
  const auto step = static_cast<int32_t>(hn::Lanes(df));
  const auto scale = hn::Set(df, half_to_float(params.scale));
  const auto zero = hn::Set(df, half_to_float(params.zero_point));
  const auto top = hn::Set(df, static_cast<float>(levels - 1));
  for (int32_t i = 0; i < n; i += step) {
    const auto c = hn::Div(hn::Sub(hn::LoadU(df, x + i), zero), scale);
    const auto clamped = hn::Min(hn::Max(c, hn::Zero(df)), top);
    hn::StoreU(hn::DemoteTo(DByte(), hn::NearestInt(clamped)), DByte(), codes + i);
  }
}

// One row of a component into its unit row and parameters. False when it cannot be held.
HWY_INLINE bool encode_row(const HostPage& page, Component component, const void* row, DType dtype,
                           uint8_t* units, QuantParams* params) {
  const TileLayout tile = page.layout.tile(component);
  float x[kMaxPageHeadDim];
  load_row(row, dtype, tile.head_dim, x);
  float lo, hi;
  if (tile.type.is_raw()) {
    if (!extrema(x, tile.head_dim, &lo, &hi)) return false;
    if (dtype == page.raw_dtype) {
      memcpy(units, row, 2 * tile.head_dim);
      return true;
    }
    const bool bfloat = page.raw_dtype == DType::kBFloat16;
    const float limit = bfloat ? bits_float(0x7f7f8000u) : 65520.0f;  // rounds to infinity
    const bool fits = lo > -limit && hi < limit;
    auto* half = reinterpret_cast<uint16_t*>(units);
    const auto step = static_cast<int32_t>(hn::Lanes(DF()));
    for (int32_t i = 0; i < tile.head_dim && fits; i += step) {
      store_halves(hn::LoadU(DF(), x + i), DF(), bfloat, half + i);
    }
    return fits;
  }
  uint8_t codes[kMaxPageHeadDim];
  const int32_t groups = page.layout.groups(component), width = tile.head_dim / groups;
  const int32_t levels = tile.type.levels();
  for (int32_t g = 0; g < groups; ++g) {
    if (!extrema(x + g * width, width, &lo, &hi)) return false;
    params[g] = page.rule_of(component) == StepRule::kNorm
                    ? norm_params(squares(x + g * width, width), width)
                    : minmax_params(lo, hi, levels);
    if (!params_in_range(params[g])) return false;
    if (half_to_float(params[g].scale) == 0.0f) {
      memset(codes + g * width, 0, width);
    } else {
      quantize_group(x + g * width, width, params[g], levels, codes + g * width);
    }
  }
  fold_codes(codes, tile, units);
  return true;
}

// Tokens first..first + n - 1 of the batch into a tile that holds nothing else. False when one
// cannot be held.
bool encode_tile(const HostPage& page, int32_t tile_index, const TokenBatch& batch, int32_t first,
                 int32_t n) {
  const PageLayout& layout = page.layout;
  const int64_t row_bytes =
      row_stride_of(batch.row_stride, layout.head_dim()) * dtype_bytes(batch.dtype);
  for (const Component c : {Component::kKey, Component::kValue}) {
    const TileLayout tile = layout.tile(c);
    const auto* base = static_cast<const uint8_t*>(c == Component::kKey ? batch.k : batch.v);
    UnitRows units;
    uint8_t* metadata = page.bytes + layout.tile_metadata_byte(c, tile_index);
    for (int32_t i = 0; i < kTileTokens; ++i) {
      QuantParams params[kMaxPageGroups] = {};
      if (i >= n) {
        memset(units.row[i], 0, tile.type.bytes_of(tile.head_dim));
      } else if (!encode_row(page, c, base + batch_row(batch.rows, first + i) * row_bytes,
                             batch.dtype, units.row[i], params)) {
        return false;
      }
      for (int32_t g = 0; g < layout.groups(c); ++g) {
        memcpy(metadata + token_metadata_byte(g, i), &params[g], sizeof(QuantParams));
      }
    }
    pack_tile(&units, tile, c, page.bytes + layout.tile_codes_byte(c, tile_index));
  }
  if (!layout.has_records()) return true;
  for (int32_t i = 0; i < kTileTokens; ++i) {
    const int64_t row = i < n ? batch_row(batch.rows, first + i) : 0;
    set_page_record(page, tile_index * kTileTokens + i, i < n ? batch.scores[row] : kNoScore,
                    i < n ? batch.positions[row] : kNoPosition);
  }
  return true;
}

// A token of a tile as it is stored.
struct StoredRow {
  const uint8_t* units;
  const uint8_t* metadata;  // of the tile
  int32_t token;            // of the tile
};

// Into a row of the output.
HWY_INLINE void decode_row(const HostPage& page, Component component, const StoredRow& from,
                           void* row, DType dtype) {
  const DF df;
  const auto step = static_cast<int32_t>(hn::Lanes(df));
  const TileLayout tile = page.layout.tile(component);
  if (tile.type.is_raw()) {
    if (dtype == page.raw_dtype) {
      memcpy(row, from.units, 2 * tile.head_dim);
      return;
    }
    const auto* half = reinterpret_cast<const uint16_t*>(from.units);
    for (int32_t i = 0; i < tile.head_dim; i += step) {
      store_vector(load_halves(df, page.raw_dtype == DType::kBFloat16, half + i), dtype, row, i);
    }
    return;
  }
  uint8_t codes[kMaxPageHeadDim];
  unfold_codes(from.units, tile, codes);
  const int32_t groups = page.layout.groups(component), width = tile.head_dim / groups;
  for (int32_t g = 0; g < groups; ++g) {
    QuantParams params;
    memcpy(&params, from.metadata + token_metadata_byte(g, from.token), sizeof(params));
    const auto scale = hn::Set(df, half_to_float(params.scale));
    const auto zero = hn::Set(df, half_to_float(params.zero_point));
    for (int32_t i = g * width; i < (g + 1) * width; i += step) {
      const auto code = hn::ConvertTo(df, hn::PromoteTo(DI(), hn::LoadU(DByte(), codes + i)));
      store_vector(hn::Add(hn::Mul(scale, code), zero), dtype, row, i);
    }
  }
}

// Slots slot..slot + n - 1, all of one tile, to tokens first.. of the output.
void decode_tile(const HostPage& page, int32_t slot, int32_t n, const TokenOutput& out,
                 int32_t first) {
  const PageLayout& layout = page.layout;
  const int32_t tile_index = slot / kTileTokens;
  const int64_t row_bytes =
      row_stride_of(out.row_stride, layout.head_dim()) * dtype_bytes(out.dtype);
  for (const Component c : {Component::kKey, Component::kValue}) {
    auto* base = static_cast<uint8_t*>(c == Component::kKey ? out.k : out.v);
    if (base == nullptr) continue;
    UnitRows units;
    unpack_tile(page.bytes + layout.tile_codes_byte(c, tile_index), layout.tile(c), c, &units);
    const uint8_t* metadata = page.bytes + layout.tile_metadata_byte(c, tile_index);
    for (int32_t i = 0; i < n; ++i) {
      const int32_t token = slot % kTileTokens + i;
      decode_row(page, c, {units.row[token], metadata, token},
                 base + batch_row(out.rows, first + i) * row_bytes, out.dtype);
    }
  }
  for (int32_t i = 0; i < n; ++i) {
    const int64_t row = batch_row(out.rows, first + i);
    if (out.scores != nullptr) out.scores[row] = page_score(page, slot + i);
    if (out.positions != nullptr) out.positions[row] = page_position(page, slot + i);
  }
}

// From token `first` on, whose slot `slot` is the first of a tile.
bool encode_tiles(const HostPage& page, int32_t slot, const TokenBatch& batch, int32_t first) {
  for (int32_t i = first; i < batch.count; i += kTileTokens) {
    const int32_t n = std::min(batch.count - i, kTileTokens);
    if (!encode_tile(page, (slot + i - first) / kTileTokens, batch, i, n)) return false;
  }
  return true;
}

void decode_tiles(const HostPage& page, int32_t slot, const TokenOutput& out) {
  for (int32_t i = 0; i < out.count;) {
    const int32_t n = std::min(out.count - i, kTileTokens - (slot + i) % kTileTokens);
    decode_tile(page, slot + i, n, out, i);
    i += n;
  }
}

#endif  // HWY_TARGET == HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierkv {

HWY_EXPORT(encode_tiles);
HWY_EXPORT(decode_tiles);

Status append_tokens(const HostPage& page, int32_t used, const TokenBatch& batch) {
  if (Status s = check_batch(page, used, batch); !s) return s;
  const int32_t in_tile = used % kTileTokens;
  const int32_t head = in_tile == 0 ? 0 : std::min(batch.count, kTileTokens - in_tile);
  TokenBatch first = batch;
  first.count = head;
  if (Status s = reference::append_tokens(page, used, first); !s) return s;
  if (head == batch.count) return Status::ok();
  if (HWY_DYNAMIC_DISPATCH(encode_tiles)(page, used + head, batch, head)) return Status::ok();
  return reference::append_tokens(page, used, batch);
}

Status decode_tokens(const HostPage& page, int32_t first_slot, const TokenOutput& out) {
  if (Status s = check_output(page, first_slot, out); !s) return s;
  HWY_DYNAMIC_DISPATCH(decode_tiles)(page, first_slot, out);
  return Status::ok();
}

}  // namespace tierkv
#endif  // HWY_ONCE
