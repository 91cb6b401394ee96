// The fast forms of lane_pairs.h, compiled once per instruction set and chosen at run time (AVX2
// comes with BMI2, whose shifts by a register make the lookup loop).
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "codec/lane_pairs_simd.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>

#include "codec/lane_pairs.h"

HWY_BEFORE_NAMESPACE();
namespace tierkv {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

// Streams at a time, so that the latencies of their lookups overlap, and symbols per 64-bit window:
// 4 * 14 bits fit the 57 that an unaligned load gives.
constexpr int32_t kStreamsAtOnce = 8;
constexpr int32_t kSymbolsPerWindow = 4;

// The low n bits.
HWY_INLINE uint64_t low_bits(uint64_t bits, uint32_t n) {
#if HWY_ARCH_X86_64 && HWY_TARGET <= HWY_AVX2
  return _bzhi_u64(bits, n);  // compilers keep a mask instead, and copy it before every use
#else
  return bits & ((uint64_t{1} << n) - 1);
#endif
}

struct Lookup {
  const uint16_t* table;
  uint32_t index_bits;
  const uint8_t* payload;
};

// kCount symbols of one stream from `position` on, kStreams apart; returns the new position. An
// entry's low six bits are its length: a shift looks at nothing else, and in the sum of four the
// digits stay above bit 5.
template <int32_t kCount, int32_t kStreams>
HWY_INLINE uint32_t decode_window(const Lookup& lookup, uint32_t position, uint16_t* entries) {
  uint64_t bits;
  memcpy(&bits, lookup.payload + (position >> 3), 8);
  bits >>= position & 7;
  uint64_t used = 0;
  for (int32_t j = 0; j < kCount; ++j) {
    const uint64_t entry = lookup.table[low_bits(bits, lookup.index_bits)];
    bits >>= entry & 63;
    used += entry;
    entries[j * kStreams] = static_cast<uint16_t>(entry);
  }
  return position + static_cast<uint32_t>(used & 63);
}

template <int32_t kStreams>
void decode_streams(const Codebook& codebook, StreamSet* set, uint16_t* entries) {
  const Lookup lookup = {codebook.table.data(), static_cast<uint32_t>(codebook.max_length),
                         set->payload};
  for (int32_t first = 0; first < kStreams; first += kStreamsAtOnce) {
    uint32_t at[kStreamsAtOnce];
    memcpy(at, set->position + first, sizeof(at));
    uint16_t* to = entries + first;
    int32_t i = 0;
    for (; i + kSymbolsPerWindow <= set->symbols; i += kSymbolsPerWindow) {
#pragma GCC unroll 8
      for (int32_t k = 0; k < kStreamsAtOnce; ++k) {
        at[k] = decode_window<kSymbolsPerWindow, kStreams>(lookup, at[k], to + k);
      }
      to += kSymbolsPerWindow * kStreams;
    }
    for (; i < set->symbols; ++i, to += kStreams) {
      for (int32_t k = 0; k < kStreamsAtOnce; ++k) {
        at[k] = decode_window<1, kStreams>(lookup, at[k], to + k);
      }
    }
    memcpy(set->position + first, at, sizeof(at));
  }
}

void decode(const Codebook& codebook, StreamSet* set, uint16_t* entries) {
  if (set->streams == kWarpLanes) {
    decode_streams<kWarpLanes>(codebook, set, entries);
  } else {
    decode_streams<2 * kWarpLanes>(codebook, set, entries);
  }
}

#if HWY_TARGET != HWY_SCALAR
using D16 = hn::FixedTag<uint16_t, 8>;
using V16 = hn::Vec<D16>;
constexpr int32_t kQuarter = 8;  // lanes of one vector: two rows of a fragment

// The codes of eight lanes.
struct Pairs {
  V16 first, second;
};

struct PlaneSource {
  const uint16_t* first;
  const uint16_t* second;
  HWY_INLINE Pairs load(int32_t at) const {
    return {hn::Load(D16(), first + at), hn::Load(D16(), second + at)};
  }
};

struct EntrySource {
  const uint16_t* entries;
  uint16_t base;
  HWY_INLINE Pairs load(int32_t at) const {
    const D16 d;
    const V16 entry = hn::Load(d, entries + at), offset = hn::Set(d, base);
    const V16 first = hn::And(hn::ShiftRight<6>(entry), hn::Set(d, 31));
    return {hn::Add(first, offset), hn::Add(hn::ShiftRight<11>(entry), offset)};
  }
};

// Keys: the four lanes of a row hold eight neighbouring channels of one token.
template <class Source>
HWY_INLINE void scatter_keys(const Source& source, int32_t at, uint16_t* to, int64_t stride) {
  const D16 d;
  for (int32_t q = 0; q < 4; ++q, to += 2 * stride) {
    const Pairs p = source.load(at + q * kQuarter);
    hn::StoreU(hn::InterleaveLower(d, p.first, p.second), d, to);
    hn::StoreU(hn::InterleaveUpper(d, p.first, p.second), d, to + stride);
  }
}

// Row t of v gets lanes t, 4 + t, 8 + t, ... of the 32 in v: a transpose of 8 x 4.
HWY_INLINE void transpose(V16 (&v)[4]) {
  const D16 d;
  const hn::Repartition<uint64_t, D16> d64;
  const V16 a = hn::InterleaveLower(d, v[0], v[1]), b = hn::InterleaveUpper(d, v[0], v[1]);
  const V16 c = hn::InterleaveLower(d, v[2], v[3]), e = hn::InterleaveUpper(d, v[2], v[3]);
  const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, a, b));
  const auto low23 = hn::BitCast(d64, hn::InterleaveUpper(d, a, b));
  const auto high01 = hn::BitCast(d64, hn::InterleaveLower(d, c, e));
  const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, c, e));
  v[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, high01));
  v[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, high01));
  v[2] = hn::BitCast(d, hn::InterleaveLower(d64, low23, high23));
  v[3] = hn::BitCast(d, hn::InterleaveUpper(d64, low23, high23));
}

// Values: the eight lanes of equal t hold eight neighbouring channels of two tokens.
template <class Source>
HWY_INLINE void scatter_values(const Source& source, int32_t at, uint16_t* to, int64_t stride) {
  const D16 d;
  V16 first[4], second[4];
  for (int32_t q = 0; q < 4; ++q) {
    const Pairs p = source.load(at + q * kQuarter);
    first[q] = p.first;
    second[q] = p.second;
  }
  transpose(first);
  transpose(second);
  for (int32_t t = 0; t < 4; ++t, to += 2 * stride) {
    hn::StoreU(first[t], d, to);
    hn::StoreU(second[t], d, to + stride);
  }
}

template <class Source>
void scatter(const Source& source, Component component, const SliceCodes& out) {
  const bool whole = out.tokens == kTileTokens && out.dims % kDimBlock == 0;
  alignas(64) int16_t padded[kTileTokens * kSliceDims];
  auto* to = reinterpret_cast<uint16_t*>(whole ? out.codes : padded);
  const int64_t stride = whole ? out.stride : kSliceDims, half = 8 * stride;
  const int32_t end = dim_block_count(out.dims) * kPairsPerFragment * kWarpLanes;
  for (int32_t at = 0; at < end; at += kPairsPerFragment * kWarpLanes, to += kDimBlock) {
    if (component == Component::kKey) {
      scatter_keys(source, at, to, stride);
      scatter_keys(source, at + kWarpLanes, to + half, stride);
      scatter_keys(source, at + 2 * kWarpLanes, to + 8, stride);
      scatter_keys(source, at + 3 * kWarpLanes, to + half + 8, stride);
    } else {
      scatter_values(source, at, to, stride);
      scatter_values(source, at + kWarpLanes, to + 8, stride);
      scatter_values(source, at + 2 * kWarpLanes, to + half, stride);
      scatter_values(source, at + 3 * kWarpLanes, to + half + 8, stride);
    }
  }
  if (whole) return;
  for (int32_t t = 0; t < out.tokens; ++t) {
    std::copy_n(padded + t * kSliceDims, out.dims, out.codes + t * out.stride);
  }
}

void scatter_planes(const TilePlanes& planes, Component component, const SliceCodes& out) {
  scatter(PlaneSource{planes.first, planes.second}, component, out);
}

void scatter_entries(const Codebook& codebook, const uint16_t* entries, const SliceCodes& out) {
  scatter(EntrySource{entries, static_cast<uint16_t>(codebook.base)}, codebook.component, out);
}
#else
void scatter_planes(const TilePlanes& planes, Component component, const SliceCodes& out) {
  scatter_tile_reference(planes, component, out);
}

void scatter_entries(const Codebook& codebook, const uint16_t* entries, const SliceCodes& out) {
  const int32_t symbols = dim_block_count(out.dims) * kPairsPerFragment / codebook.streams_per_lane;
  TilePlanes planes;
  expand_entries(codebook, symbols, entries, &planes);
  scatter_tile_reference(planes, codebook.component, out);
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace tierkv
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tierkv {

HWY_EXPORT(decode);
HWY_EXPORT(scatter_planes);
HWY_EXPORT(scatter_entries);

void decode_tile(const Codebook& codebook, StreamSet* set, uint16_t* entries) {
  HWY_DYNAMIC_DISPATCH(decode)(codebook, set, entries);
}
void scatter_tile(const TilePlanes& planes, Component component, const SliceCodes& out) {
  HWY_DYNAMIC_DISPATCH(scatter_planes)(planes, component, out);
}
void scatter_pair_entries(const Codebook& codebook, const uint16_t* entries,
                          const SliceCodes& out) {
  HWY_DYNAMIC_DISPATCH(scatter_entries)(codebook, entries, out);
}

}  // namespace tierkv
#endif
