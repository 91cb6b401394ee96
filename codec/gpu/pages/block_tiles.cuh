// encode_slots() of codec/format/block_cache.h for many tokens. Where 16 tokens that follow each
// other fill a tile, a warp makes the tile's words of one component as a whole; other tokens go one
// by one (block_cache.cuh).
//
// A CTA takes kWindowTokens tokens of one kv_head. It also takes the rest of a tile that begins
// among them and ends behind them.
//
// Bound: instructions, about 25 a value: 9 for the rotation, 7 for the code, 2 for the extrema.
#pragma once

#include "codec/gpu/pages/block_cache.cuh"
#include "codec/gpu/pages/half_rows.cuh"
#include "gpu/copies.cuh"

namespace tierkv {

inline constexpr int32_t kWindowTokens = 32;
inline constexpr int32_t kWindowTiles = kWindowTokens / kTileTokens;
static_assert(kWindowTiles == 2 && 2 * kWindowTiles == kBlockWarps);
// Slots that a CTA looks at: place i is the token begin - 15 + i. A tile that covers a token of the
// window begins and ends among them.
inline constexpr int32_t kPlacesBefore = kTileTokens - 1;
inline constexpr int32_t kPlaces = kWindowTokens + 2 * kPlacesBefore;
static_assert(kPlaces <= 64);

// Shared memory of a CTA: the slots of its places, a flag for each tile, and for each warp a
// channel table and a tile of rows.
struct WindowSlots {
  int64_t slots[64];
  int32_t failed[kWindowTiles];  // a token of the tile has no codes
  int32_t padding[2];
};
template <int32_t kDim>
inline constexpr int32_t kTileWarpBytes = kTableBytes<kDim> + kTileTokens* kRowPitch<kDim>;
template <int32_t kDim>
inline constexpr int32_t kTilesSharedBytes =
    static_cast<int32_t>(sizeof(WindowSlots)) + kBlockWarps* kTileWarpBytes<kDim>;

// Rows are copied in pieces of 16 bytes.
inline bool has_aligned_rows(const SlotEncode& e) {
  for (const void* p : {e.k, e.v}) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  }
  for (const TokenStrides& s : {e.k_strides, e.v_strides}) {
    if (s.token % 8 != 0 || s.head % 8 != 0) return false;
  }
  return true;
}

// ---- which tokens fill tiles ----

// Bit i is place i.
struct WindowTiles {
  uint64_t first;    // the first token of a tile that is filled
  uint64_t covered;  // a token of such a tile
};
__device__ __forceinline__ uint64_t ballot_places(bool low, bool high) {
  const uint64_t upper = __ballot_sync(kFullWarp, high);
  return upper << 32 | __ballot_sync(kFullWarp, low);
}
__device__ __forceinline__ WindowTiles window_tiles(const int64_t* slots, int64_t end_slot) {
  const int32_t lane = lane_index();
  bool follows[2], begins[2];
#pragma unroll
  for (int32_t i = 0; i < 2; ++i) {
    const int32_t place = 32 * i + lane;
    const int64_t slot = slots[place];
    follows[i] = place + 1 < 64 && slots[(place + 1) % 64] == slot + 1;
    begins[i] = slot >= 0 && slot < end_slot && slot % kTileTokens == 0;
  }
  uint64_t run = ballot_places(follows[0], follows[1]);  // of 2, 3, 5, 9 and 16 places
  run &= run >> 1;
  run &= run >> 2;
  run &= run >> 4;
  run &= run >> 7;
  WindowTiles w;
  w.first = run & ballot_places(begins[0], begins[1]);
  w.covered = w.first | w.first << 1;
  w.covered |= w.covered << 2;
  w.covered |= w.covered << 4;
  w.covered |= w.covered << 8;
  return w;
}

// ---- coordinates ----

template <int32_t kDim>
__device__ __forceinline__ void start_rows(const void* first, int64_t stride, uint8_t* rows) {
  constexpr int32_t kPieces = kDim / 8;  // of a row
#pragma unroll
  for (int32_t i = 0; i < kTileTokens * kPieces / 32; ++i) {
    const int32_t piece = 32 * i + lane_index();
    const int32_t row = piece / kPieces, column = piece % kPieces;
    copy_async_16(rows + row * kRowPitch<kDim> + 16 * column,
                  static_cast<const uint16_t*>(first) + row * stride + 8 * column, true);
  }
}

template <int32_t kDim>
__device__ __forceinline__ void load_half(const uint8_t* rows, int32_t th, DType dtype,
                                          HalfRows<kDim>& x) {
  const uint8_t* row =
      rows + (lane_index() % 8 + kHalfTokens * th) * kRowPitch<kDim> + lane_index() / 8 * 16;
#pragma unroll
  for (int32_t i = 0; i < kDim / 32; ++i) {
    uint32_t words[4];
    load_matrices(words, row + 64 * i);
#pragma unroll
    for (int32_t j = 0; j < 4; ++j) {
      const float2 y =
          dtype == DType::kFloat16 ? unpack_halves(words[j]) : unpack_bfloats(words[j]);
      x[8 * i + 2 * j] = y.x, x[8 * i + 2 * j + 1] = y.y;
    }
  }
}

template <int32_t kDim>
__device__ __forceinline__ void rotate_half(const Rotation& r, const ChannelPair* table,
                                            HalfRows<kDim>& x) {
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    const ChannelPair pair = table[4 * i + lane_index() % 4];
#pragma unroll
    for (int32_t par = 0; par < 2; ++par) {
      float& y = x[2 * i + par];
      y = mul_rn(add_rn(y, pair.addend[par]), pair.factor[par]);
    }
  }
  if (!r.is_on) return;
  hadamard_sums<kDim>(x);
  const float scale = hadamard_scale(hadamard_size(kDim, 0));
  const float last_scale = hadamard_scale(hadamard_size(kDim, kDim - 1));
#pragma unroll
  for (int32_t i = 0; i < kDim / 4; ++i) {
    const bool is_first = hadamard_size(kDim, 4 * (i & ~3)) == hadamard_size(kDim, 0);
    x[i] = mul_rn(x[i], is_first ? scale : last_scale);
  }
}

// ---- codes ----

// Both in the four lanes of a token.
template <int32_t kDim>
__device__ __forceinline__ QuantParams half_minmax(const HalfRows<kDim>& x, int32_t levels,
                                                   bool* is_sound) {
  float lo = x[0], hi = x[0];
#pragma unroll
  for (int32_t i = 1; i < kDim / 4; ++i) {
    lo = nan_min(lo, x[i]);
    hi = nan_max(hi, x[i]);
  }
#pragma unroll
  for (int32_t lanes = 1; lanes < 4; lanes *= 2) {
    lo = nan_min(lo, __shfl_xor_sync(kFullWarp, lo, lanes));
    hi = nan_max(hi, __shfl_xor_sync(kFullWarp, hi, lanes));
  }
  const QuantParams p = minmax_params(lo, hi, levels);
  *is_sound = is_finite(lo) && is_finite(hi) && params_in_range(p);
  return p;
}
// The sum of squares in the order of sum_of_squares(): partial 16 a + 8 dh + 2 (l % 4) + par is of
// the blocks with b % 2 = a. A square of what is not finite makes the scale so.
template <int32_t kDim>
__device__ __forceinline__ QuantParams half_norm(const HalfRows<kDim>& x, bool* is_sound) {
  float partial[8] = {};  // 4 a + 2 dh + par
#pragma unroll
  for (int32_t i = 0; i < kDim / 4; ++i) {
    partial[i % 8] = add_rn(partial[i % 8], mul_rn(x[i], x[i]));
  }
  float sum[2];
#pragma unroll
  for (int32_t par = 0; par < 2; ++par) {
    sum[par] =
        add_rn(add_rn(partial[par], partial[4 + par]), add_rn(partial[2 + par], partial[6 + par]));
#pragma unroll
    for (int32_t lanes = 2; lanes > 0; lanes /= 2) {
      sum[par] = add_rn(sum[par], __shfl_xor_sync(kFullWarp, sum[par], lanes));
    }
  }
  const QuantParams p = norm_params(add_rn(sum[0], sum[1]), kDim);
  *is_sound = params_in_range(p);
  return p;
}

template <CodeType kType, int32_t kDim>
__device__ __forceinline__ QuantParams half_params(const HalfRows<kDim>& x, StepRule rule,
                                                   bool* is_sound) {
  if constexpr (kType == kCodes2) {
    if (rule == StepRule::kNorm) return half_norm<kDim>(x, is_sound);
  }
  return half_minmax<kDim>(x, kType.levels(), is_sound);
}

// The codes of a token half to the words, in the order of keys, as the upper half; what was there
// becomes the lower one. (So both halves have the same code: two copies of the kernel, of keys and
// of values in different formats, fit into the instruction cache.)
template <CodeType kType, int32_t kDim>
__device__ __forceinline__ void add_codes(const HalfRows<kDim>& x, QuantParams p,
                                          uint32_t (&words)[kTileWords<kType, kDim>]) {
  constexpr int32_t kBits = kType.bits();
  constexpr int32_t kBlocks = kBits == 2 ? 2 : 1;  // that share a word
  constexpr float kTop = static_cast<float>((1 << kBits) - 1);
  const CodeMaker maker = make_code_maker(p);
#pragma unroll
  for (int32_t b = 0; b < kDim / kDimBlock; b += kBlocks) {
    uint32_t codes[4 * kBlocks];
#pragma unroll
    for (int32_t i = 0; i < 4 * kBlocks; ++i) codes[i] = biased_code(x[4 * b + i], maker, kTop);
    if constexpr (kBits == 8) {
      words[2 * b] = words[2 * b + 1];
      words[2 * b + 1] = join_bytes(codes[0], codes[2], codes[1], codes[3]);
    } else {
      uint32_t bytes[2];
#pragma unroll
      for (int32_t par = 0; par < 2; ++par) {
        bytes[par] = codes[par];
#pragma unroll
        for (int32_t i = 1; i < 2 * kBlocks; ++i) bytes[par] += codes[2 * i + par] << kBits * i;
      }
      const uint32_t both = __byte_perm(bytes[0], bytes[1], 0x0040);  // the low bytes
      uint32_t& word = words[fragment_code_word(kBits, b, 0)];
      word = __byte_perm(word, both, 0x5341);
    }
  }
}
template <int32_t kDim>
__device__ __forceinline__ bool add_raw(const HalfRows<kDim>& x, DType dtype,
                                        uint32_t (&words)[kDim / 4]) {
  float most = 0;
#pragma unroll
  for (const float y : x) most = nan_max(most, fabsf(y));
#pragma unroll
  for (int32_t i = 0; i < kDim / 8; ++i) {
    const int32_t at = 4 * (i / 2) + 2 * (i % 2);
    words[at] = words[at + 1];
    words[at + 1] = dtype == DType::kFloat16 ? pack_halves(x[2 * i], x[2 * i + 1])
                                             : pack_bfloats(x[2 * i], x[2 * i + 1]);
  }
  return is_finite(raw_to_float(dtype, float_to_raw(dtype, most)));
}

// ---- a tile ----

// One component of a tile: rows in shared memory (start_rows()), and where its codes go.
struct StagedRows {
  const uint8_t* rows;
  const ChannelPair* table;
  DType dtype;
  const Rotation* rotation;
  // Bit t: token t is there. The others get zeros; their rows are finite.
  uint32_t tokens = 0xffff;
};
struct TileTarget {
  uint8_t* codes;
  uint8_t* metadata;
  StepRule rule;
  bool is_value;
  DType raw_dtype;
};

// False in all lanes where a token of the tile has no codes; what is written is then not defined.
template <CodeType kType, int32_t kDim>
__device__ __forceinline__ bool encode_tile(const StagedRows& from, const TileTarget& to) {
  uint32_t words[kTileWords<kType, kDim>] = {}, params[2] = {};
  bool is_sound = true;
#pragma unroll 1
  for (int32_t th = 0; th < 2; ++th) {
    HalfRows<kDim> x;
    load_half<kDim>(from.rows, th, from.dtype, x);
    rotate_half<kDim>(*from.rotation, from.table, x);
    bool half_is_sound;
    if constexpr (kType.is_raw()) {
      half_is_sound = add_raw<kDim>(x, to.raw_dtype, words);
    } else {
      QuantParams p = half_params<kType, kDim>(x, to.rule, &half_is_sound);
      if ((from.tokens >> (lane_index() / 4 + kHalfTokens * th) & 1u) == 0) {
        p = {};
        half_is_sound = true;
      }
      add_codes<kType, kDim>(x, p, words);
      params[0] = params[1];
      params[1] = p.scale | static_cast<uint32_t>(p.zero_point) << 16;
    }
    is_sound &= half_is_sound;
  }
  if (to.is_value) exchange_words<kType>(words);
  store_tile_words(words, to.codes);
  if constexpr (!kType.is_raw()) {
    if (lane_index() % 4 == 0) {
      *reinterpret_cast<uint2*>(to.metadata + token_metadata_byte(0, lane_index() / 4)) = {
          params[0], params[1]};
    }
  }
  return __all_sync(kFullWarp, is_sound);
}

template <int32_t kDim>
__device__ __forceinline__ bool encode_tile_of(CodeType type, const StagedRows& from,
                                               const TileTarget& to) {
  if (type == kRawCodes) return encode_tile<kRawCodes, kDim>(from, to);
  if (type == kCodes8) return encode_tile<kCodes8, kDim>(from, to);
  if (type == kCodes4) return encode_tile<kCodes4, kDim>(from, to);
  return encode_tile<kCodes2, kDim>(from, to);
}

// One component of the tokens token .. token + 15, which fill the tile of `slot`.
template <int32_t kDim>
__device__ __forceinline__ bool encode_filled_tile(const SlotEncode& e, int64_t token, int64_t slot,
                                                   int32_t kv_head, Component part,
                                                   uint8_t* shared) {
  const BlockCache& c = e.cache;
  const bool is_key = part == Component::kKey;
  const TokenStrides& strides = is_key ? e.k_strides : e.v_strides;
  const auto* from = static_cast<const uint16_t*>(is_key ? e.k : e.v);
  uint8_t* rows = shared + kTableBytes<kDim>;
  start_rows<kDim>(from + token * strides.token + kv_head * strides.head, strides.token, rows);
  auto* table = reinterpret_cast<ChannelPair*>(shared);
  fill_channel_table<kDim>(c.rotation, false, is_key ? c.mean_of(kv_head) : nullptr, -1.0f, table);
  const int64_t block = slot / c.layout.tokens;
  const int32_t tile = static_cast<int32_t>(slot - block * c.layout.tokens) / kTileTokens;
  uint8_t* page = c.page(block, kv_head);
  const TileTarget to = {page + c.layout.tile_codes_byte(part, tile),
                         page + c.layout.tile_metadata_byte(part, tile), c.rule[is_key ? 0 : 1],
                         !is_key, c.raw_dtype};
  wait_copies();
  __syncwarp();
  return encode_tile_of<kDim>(c.layout.tile(part).type, {rows, table, e.dtype, &c.rotation}, to);
}

// The tokens of `places` one by one, in turn by the warps of the CTA.
__device__ __forceinline__ void encode_places(const SlotEncode& e, uint64_t places, int64_t first,
                                              int32_t kv_head) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  int32_t turn = 0;
#pragma unroll 1
  for (int32_t place = 0; place < kPlaces; ++place) {
    if ((places >> place & 1u) == 0) continue;
    if (turn++ % kBlockWarps == warp) encode_slot(e, {first + place, kv_head});
  }
}

// Grid: windows times kv_heads. Shared memory: kTilesSharedBytes.
template <int32_t kDim>
__global__ void __launch_bounds__(kBlockThreads)
    encode_tiles_kernel(const __grid_constant__ SlotEncode e) {
  extern __shared__ __align__(16) uint8_t shared_bytes[];
  auto* window = reinterpret_cast<WindowSlots*>(shared_bytes);
  const auto thread = static_cast<int32_t>(threadIdx.x), warp = thread / 32;
  const int32_t cta = static_cast<int32_t>(blockIdx.x), heads = e.cache.num_kv_heads;
  const int32_t kv_head = cta % heads;
  const int64_t begin = int64_t{cta / heads} * kWindowTokens, first = begin - kPlacesBefore;
  if (thread < 64) {
    const int64_t token = first + thread;
    const bool is_there = thread < kPlaces && token >= 0 && token < e.count;
    window->slots[thread] = is_there ? e.slots[token] : -2;
  }
  if (thread < kWindowTiles) window->failed[thread] = 0;
  __syncthreads();
  const WindowTiles tiles = window_tiles(window->slots, e.cache.num_blocks * e.cache.layout.tokens);
  const uint64_t all = (uint64_t{1} << kWindowTokens) - 1;
  uint64_t alone = all << kPlacesBefore & ~tiles.covered;
  // At most one tile begins among 16 tokens.
  int32_t place_of[kWindowTiles];
#pragma unroll
  for (int32_t i = 0; i < kWindowTiles; ++i) {
    const int32_t from = kPlacesBefore + i * kTileTokens;
    place_of[i] = from + lowest_bit(static_cast<uint32_t>(tiles.first >> from) & 0xffffu);
    if (place_of[i] < from) place_of[i] = -1;
  }
  const int32_t mine = warp < 2 ? place_of[0] : place_of[1];
  if (mine >= 0) {
    uint8_t* shared = shared_bytes + sizeof(WindowSlots) + warp * kTileWarpBytes<kDim>;
    const bool is_sound =
        encode_filled_tile<kDim>(e, first + mine, window->slots[mine], kv_head,
                                 warp % 2 == 0 ? Component::kKey : Component::kValue, shared);
    if (!is_sound && lane_index() == 0) window->failed[warp / 2] = 1;
  }
  __syncthreads();
#pragma unroll
  for (int32_t i = 0; i < kWindowTiles; ++i) {
    if (window->failed[i] != 0) alone |= uint64_t{0xffff} << place_of[i];
  }
  alone &= e.count - first >= 64 ? ~uint64_t{0} : (uint64_t{1} << (e.count - first)) - 1;
  if (alone != 0) encode_places(e, alone, first, kv_head);
}

}  // namespace tierkv
