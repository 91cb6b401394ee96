// decode_block: validation, the table decoder and the tree walk. The encoder is in coded_block.cc.
#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "codec/coded_block.h"
#include "codec/huffman.h"
#include "codec/lane_pairs.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

static_assert(std::endian::native == std::endian::little, "words are loaded as they are stored");

// A table decoder reads at most this far past the payload: 256 symbols of 14 bits that start at its
// end, and the 8 bytes of a window.
constexpr int32_t kMaxStreamSymbols = kBlockTokens * kSliceDims / kWarpLanes;
constexpr int32_t kSlackBytes = kMaxStreamSymbols * kMaxCodeLength / 8 + 16;
constexpr int32_t kStreamsAtOnce = 4;
constexpr int32_t kSymbolsPerWindow = 4;  // 4 * 14 bits fit the 57 of an unaligned 64-bit load

Status corrupt(const char* what) {
  return Status(StatusCode::kCorrupt, std::string("coded block: ") + what);
}

// A block whose header, sizes and starts have been checked.
struct Block {
  CodedBlockHeader header;
  CodedBlockLayout at;
  const uint8_t* bytes = nullptr;

  int32_t streams() const { return kWarpLanes * header.streams_per_lane; }
  uint32_t begin(int32_t stream) const { return load_u16(bytes + at.starts + 2 * stream); }
  uint32_t end(int32_t stream) const {
    return stream + 1 < streams() ? begin(stream + 1) : header.payload_bits;
  }
  int32_t pairs_per_lane() const {
    return tile_count(header.tokens) * dim_block_count(header.dims) * kPairsPerFragment;
  }
};

// Fields that are wrong whatever the codebook.
Status check_fields(const CodedBlockHeader& h) {
  if (h.version != kCodedBlockVersion) return corrupt("version is not 1");
  if (static_cast<int32_t>(h.mode) >= kNumBlockModes) return corrupt("unknown mode");
  if (h.component != Component::kKey && h.component != Component::kValue) {
    return corrupt("unknown component");
  }
  if (h.tokens < 1 || h.tokens > kBlockTokens) return corrupt("tokens out of range");
  if (h.dims < 1 || h.dims > kSliceDims) return corrupt("channels out of range");
  if (h.exceptions > kMaxExceptions) return corrupt("too many exceptions");
  if (is_raw_mode(h.mode)) {
    const bool clear = h.streams_per_lane == 1 && h.table_id == 0 && h.payload_bits == 0 &&
                       h.exceptions == 0 && (h.mode != BlockMode::kRaw16 || h.base == 0);
    if (!clear) return corrupt("a raw block with fields of a coded one");
  } else if (h.streams_per_lane != 1 && h.streams_per_lane != 2) {
    return corrupt("streams per lane must be 1 or 2");
  }
  return Status::ok();
}

Status open_block(const uint8_t* bytes, int64_t size, Block* block) {
  if (size < kCodedBlockHeaderBytes) return corrupt("shorter than a header");
  block->bytes = bytes;
  block->header = load_header(bytes);
  if (Status s = check_fields(block->header); !s) return s;
  block->at = block_layout(block->header);
  if (block->at.bytes != block->header.units * kBlockAlignment) {
    return corrupt("size disagrees with the fields");
  }
  if (block->at.bytes > size) return corrupt("cut short");
  if (block_checksum(bytes, block->at.bytes) != block->header.checksum) return corrupt("checksum");
  return Status::ok();
}

Status check_streams(const Block& block) {
  for (int32_t i = block.at.end; i < block.at.bytes; ++i) {
    if (block.bytes[i] != 0) return corrupt("padding is not zero");
  }
  if (is_raw_mode(block.header.mode)) return Status::ok();
  if (block.begin(0) != 0) return corrupt("the first stream does not start at 0");
  for (int32_t i = 0; i < block.streams(); ++i) {
    if (block.begin(i) > block.end(i)) return corrupt("stream starts descend");
  }
  const int32_t used = block.header.payload_bits % 32;
  if (used != 0 && load_u32(block.bytes + block.at.exceptions - 4) >> used != 0) {
    return corrupt("bits after the last stream");
  }
  return Status::ok();
}

Status check_match(const CodedBlockHeader& h, int32_t tokens, int32_t dims, const Codebook& c) {
  if (h.component != c.component) return corrupt("not of the codebook's component");
  if (h.tokens != tokens || h.dims != dims) return corrupt("not the expected tokens or channels");
  const bool same = h.mode == c.mode && h.base == c.base && h.table_id == c.table_id &&
                    h.streams_per_lane == c.streams_per_lane;
  if (!is_raw_mode(h.mode) && !same) return corrupt("made with another codebook");
  return Status::ok();
}

// The payload in memory of its own with zeros behind it, so that no window reads past an end.
struct Payload {
  uint32_t words[(kMaxPayloadBits + 31) / 32 + kSlackBytes / 4];

  explicit Payload(const Block& block) {
    const auto used = static_cast<size_t>(block.at.exceptions - block.at.payload);
    memcpy(words, block.bytes + block.at.payload, used);
    memset(words + used / 4, 0, kSlackBytes);
  }
  // At least 57 bits from `position` on.
  uint64_t window(uint32_t position) const {
    uint64_t bits;
    memcpy(&bits, reinterpret_cast<const uint8_t*>(words) + position / 8, 8);
    return bits >> (position % 8);
  }
};

// Puts the codes of symbol `i` of a stream (Codebook::symbol_codes) into the pairs of its lane.
template <BlockMode kMode>
inline void store_symbol(const Codebook& codebook, int32_t stream, int32_t i, uint32_t codes,
                         LanePairs* out) {
  const int32_t lane = stream % kWarpLanes, s = stream / kWarpLanes,
                per_lane = codebook.streams_per_lane;
  if constexpr (kMode == BlockMode::kSingle) {
    uint32_t* pair = out->pairs + (per_lane * (i / 2) + s) * kWarpLanes + lane;
    const auto code = static_cast<uint16_t>(codes);
    memcpy(reinterpret_cast<uint8_t*>(pair) + 2 * (i % 2), &code, 2);
  } else if constexpr (kMode == BlockMode::kQuad) {
    uint32_t* pair = out->pairs + 2 * (per_lane * i + s) * kWarpLanes + lane;
    const auto code = [&](int32_t d) {
      return (static_cast<uint32_t>(codebook.base) + (codes >> 8 * d & 3u)) & 0xffffu;
    };
    pair[0] = code(0) | code(1) << 16;
    pair[kWarpLanes] = code(2) | code(3) << 16;
  } else {
    out->pairs[(per_lane * i + s) * kWarpLanes + lane] = codes;
  }
}

template <BlockMode kMode>
constexpr int32_t symbols_per_pair_x2() {
  return kMode == BlockMode::kSingle ? 4 : kMode == BlockMode::kQuad ? 1 : 2;
}

// Four streams at a time, so that the latencies of their lookups overlap. A symbol moves a position
// by its length, 14 bits at most, whatever the bits are: positions are compared at the ends only.
template <BlockMode kMode>
bool decode_with_table(const Block& block, const Codebook& codebook, int32_t symbols,
                       LanePairs* out) {
  const Payload payload(block);
  const uint64_t* table = codebook.fast_table.data();
  const uint64_t mask = codebook.fast_table.size() - 1;
  uint32_t wrong = 0;
  for (int32_t first = 0; first < block.streams(); first += kStreamsAtOnce) {
    uint32_t position[kStreamsAtOnce];
    for (int32_t k = 0; k < kStreamsAtOnce; ++k) position[k] = block.begin(first + k);
    const auto decode = [&](int32_t i, auto count) {
      for (int32_t k = 0; k < kStreamsAtOnce; ++k) {
        uint64_t bits = payload.window(position[k]);
        for (int32_t j = 0; j < count; ++j) {
          const uint64_t entry = table[bits & mask];
          bits >>= entry & 63;
          position[k] += static_cast<uint32_t>(entry);
          store_symbol<kMode>(codebook, first + k, i + j, static_cast<uint32_t>(entry >> 32), out);
        }
      }
    };
    int32_t i = 0;
    for (; i + kSymbolsPerWindow <= symbols; i += kSymbolsPerWindow) {
      decode(i, std::integral_constant<int32_t, kSymbolsPerWindow>{});
    }
    for (; i < symbols; ++i) decode(i, std::integral_constant<int32_t, 1>{});
    for (int32_t k = 0; k < kStreamsAtOnce; ++k) wrong |= position[k] ^ block.end(first + k);
  }
  return wrong == 0;
}

template <BlockMode kMode>
bool decode_with_tree(const Block& block, const Codebook& codebook, int32_t symbols,
                      LanePairs* out) {
  const Payload payload(block);
  uint16_t found[kMaxStreamSymbols + 1];
  for (int32_t s = 0; s < block.streams(); ++s) {
    const int64_t n =
        decode_tree(payload.words, block.begin(s), block.end(s), codebook.tree, symbols, found);
    if (n != symbols) return false;
    for (int32_t i = 0; i < symbols; ++i) {
      store_symbol<kMode>(codebook, s, i, codebook.symbol_codes[found[i]], out);
    }
  }
  return true;
}

template <BlockMode kMode>
bool decode_streams(const Block& block, const Codebook& codebook, DecodePath path, LanePairs* out) {
  const int32_t symbols =
      block.pairs_per_lane() * symbols_per_pair_x2<kMode>() / 2 / codebook.streams_per_lane;
  return path == DecodePath::kTree ? decode_with_tree<kMode>(block, codebook, symbols, out)
                                   : decode_with_table<kMode>(block, codebook, symbols, out);
}

// Raw tiles of `bits` a code as pairs: out = base + value, or with base absent out + value. Sums
// are taken modulo 2^16 in both halves.
void add_raw_tiles(const Block& block, int32_t bits, const uint8_t* tiles, LanePairs* out) {
  const int32_t blocks = dim_block_count(block.header.dims);
  const TileLayout layout = raw_tile(bits, blocks);
  const Component component = block.header.component;
  const uint32_t mask = ((1u << bits) - 1u) * 0x10001u;
  const auto place = [&](int32_t f, int32_t r, int32_t lane) {
    const PairPosition p = pair_position(component, 0, f, r, lane);
    return code_position(layout, component, p.token, p.dim);
  };
  for (int32_t f = 0; f < blocks; ++f) {
    for (int32_t r = 0; r < kPairsPerFragment; ++r) {
      const CodePosition at = place(f, r, 0);
      const int32_t lane_stride = place(f, r, 1).byte - at.byte;
      for (int32_t tile = 0; tile < tile_count(block.header.tokens); ++tile) {
        const uint8_t* word = tiles + tile * layout.bytes() + at.byte;
        uint32_t* pairs = out->pairs + ((tile * blocks + f) * kPairsPerFragment + r) * kWarpLanes;
        for (int32_t lane = 0; lane < kWarpLanes; ++lane, word += lane_stride) {
          const uint32_t a = pairs[lane], b = load_u32(word) >> at.bit & mask;
          pairs[lane] = ((a & 0x7fff7fffu) + (b & 0x7fff7fffu)) ^ ((a ^ b) & 0x80008000u);
        }
      }
    }
  }
}

bool apply_exceptions(const Block& block, const SliceCodes& out) {
  int32_t previous = -1;
  for (int32_t i = 0; i < block.header.exceptions; ++i) {
    const uint32_t e = load_u32(block.bytes + block.at.exceptions + kExceptionBytes * i);
    const auto index = static_cast<int32_t>(e & 0xffffu);
    const int32_t token = index / kSliceDims, dim = index % kSliceDims;
    const int32_t delta = static_cast<int16_t>(e >> 16);
    if (index <= previous || token >= out.tokens || dim >= out.dims || delta == 0) return false;
    int16_t* code = out.codes + token * out.stride + dim;
    if (*code + delta < INT16_MIN || *code + delta > INT16_MAX) return false;
    *code = static_cast<int16_t>(*code + delta);
    previous = index;
  }
  return true;
}

Status decode_slice(const Block& block, const Codebook& codebook, DecodePath path,
                    const SliceCodes& out) {
  const CodedBlockHeader& h = block.header;
  LanePairs pairs;
  bool whole = true;
  switch (h.mode) {
    case BlockMode::kSingle:
      whole = decode_streams<BlockMode::kSingle>(block, codebook, path, &pairs);
      break;
    case BlockMode::kPair:
      whole = decode_streams<BlockMode::kPair>(block, codebook, path, &pairs);
      break;
    case BlockMode::kQuad:
      whole = decode_streams<BlockMode::kQuad>(block, codebook, path, &pairs);
      break;
    case BlockMode::kSplit:
      whole = decode_streams<BlockMode::kSplit>(block, codebook, path, &pairs);
      if (whole) add_raw_tiles(block, 4, block.bytes + block.at.low_plane, &pairs);
      break;
    default: {
      const auto base = static_cast<uint32_t>(static_cast<uint16_t>(h.base));
      std::fill_n(pairs.pairs, block.pairs_per_lane() * kWarpLanes, base * 0x10001u);
      add_raw_tiles(block, raw_bits(h.mode), block.bytes + block.at.payload, &pairs);
    }
  }
  if (!whole) return corrupt("a stream does not end where the next one starts");
  if (path == DecodePath::kTree) {
    scatter_pairs_reference(pairs, h.component, out);
  } else {
    scatter_pairs(pairs, h.component, out);
  }
  return apply_exceptions(block, out) ? Status::ok() : corrupt("bad exception");
}

Status decode_slices(const uint8_t* bytes, int64_t size, const SliceCodes& all,
                     const Codebook& codebook, DecodePath path) {
  for (int32_t first = 0; first < all.dims; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, all.dims - first);
    Block block;
    if (Status s = open_block(bytes, size, &block); !s) return s;
    if (Status s = check_match(block.header, all.tokens, dims, codebook); !s) return s;
    if (Status s = check_streams(block); !s) return s;
    const SliceCodes slice{all.codes + first, all.tokens, dims, all.stride};
    if (Status s = decode_slice(block, codebook, path, slice); !s) return s;
    bytes += block.at.bytes;
    size -= block.at.bytes;
  }
  return size == 0 ? Status::ok() : corrupt("bytes after the last slice");
}

}  // namespace

Status decode_block(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, int16_t* codes, DecodePath path) {
  if (tokens < 1 || tokens > kBlockTokens) {
    return Status(StatusCode::kInvalidArgument, "a block has 1 to 64 tokens");
  }
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return Status(StatusCode::kInvalidArgument, "head_dim must be 1 to 4096");
  }
  Status s = decode_slices(bytes, size, {codes, tokens, head_dim, head_dim}, codebook, path);
  if (!s) std::fill_n(codes, static_cast<int64_t>(tokens) * head_dim, int16_t{0});
  return s;
}

Status add_block_stats(const uint8_t* bytes, int64_t size, CodedBlockStats* stats) {
  while (size > 0) {
    Block block;
    if (Status s = open_block(bytes, size, &block); !s) return s;
    const CodedBlockLayout& at = block.at;
    const int32_t payload = is_raw_mode(block.header.mode)
                                ? 8 * (at.exceptions - at.payload)
                                : 8 * (at.payload - at.low_plane) + block.header.payload_bits;
    const int32_t header =
        is_raw_mode(block.header.mode) ? 8 * kCodedBlockHeaderBytes : 8 * at.low_plane;
    ++stats->blocks[static_cast<int32_t>(block.header.mode)];
    stats->header_bits += header;
    stats->payload_bits += payload;
    stats->exceptions += block.header.exceptions;
    stats->exception_bits += 8 * kExceptionBytes * block.header.exceptions;
    stats->padding_bits +=
        8 * at.bytes - header - payload - 8 * kExceptionBytes * block.header.exceptions;
    bytes += at.bytes;
    size -= at.bytes;
  }
  return Status::ok();
}

}  // namespace tierkv
