#include "codec/format/coded_block.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "codec/format/coded_block_format.h"
#include "codec/format/huffman.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxBlockCodes = kBlockTokens * kSliceDims;
constexpr int32_t kExceptionBits = 8 * kExceptionBytes;
// Digits that are no digits.
constexpr int16_t kOutside = -1;
constexpr int16_t kPadding = -2;

// The codes of one slice.
struct Slice {
  const int16_t* codes;  // [tokens][stride]
  int32_t tokens;
  int32_t dims;
  int32_t stride;
  int32_t at(int32_t token, int32_t dim) const { return codes[token * stride + dim]; }
};

// A slice as symbols of a codebook, stream after stream.
struct SymbolPlan {
  uint16_t symbols[kMaxBlockCodes];
  int32_t symbols_per_stream = 0;
  int64_t payload_bits = 0;
  uint32_t exceptions[kMaxExceptions];
  int32_t exception_count = 0;
  bool possible = true;  // false: too many exceptions, or one too far away
};

class SymbolPlanner {
 public:
  SymbolPlanner(const Slice& slice, const Codebook& codebook, SymbolPlan* plan)
      : slice_(slice), codebook_(codebook), plan_(plan), radix_(codebook.radix()) {}

  void run() {
    find_digits();
    find_offsets();
    const int32_t streams = codebook_.streams_per_lane;
    for (int32_t s = 0; s < streams; ++s) {
      for (int32_t lane = 0; lane < kWarpLanes && plan_->possible; ++lane) plan_stream(s, lane);
    }
    plan_->symbols_per_stream = next_ / (streams * kWarpLanes);
    if (plan_->payload_bits > kMaxPayloadBits) plan_->possible = false;
    std::sort(plan_->exceptions, plan_->exceptions + plan_->exception_count,
              [](uint32_t a, uint32_t b) { return (a & 0xffffu) < (b & 0xffffu); });
  }

 private:
  void find_digits() {
    const int32_t shift = codebook_.mode == BlockMode::kSplit ? 4 : 0;
    std::fill_n(digits_, kMaxBlockCodes, kPadding);
    const auto levels = static_cast<uint32_t>(codebook_.levels);
    for (int32_t t = 0; t < slice_.tokens; ++t) {
      const int16_t* codes = slice_.codes + t * slice_.stride;
      int16_t* digits = digits_ + t * kSliceDims;
      for (int32_t d = 0; d < slice_.dims; ++d) {
        const auto above = static_cast<uint32_t>(codes[d] - codebook_.base);
        digits[d] = above < levels ? static_cast<int16_t>(above >> shift) : kOutside;
      }
    }
  }

  void find_offsets() {
    partner_ = codebook_.component == Component::kKey ? 1 : kSliceDims;
    for (int32_t tile = 0; tile < tile_count(slice_.tokens); ++tile) {
      for (int32_t block = 0; block < dim_block_count(slice_.dims); ++block) {
        for (int32_t r = 0; r < kPairsPerFragment; ++r) {
          const PairPosition p = pair_position(codebook_.component, tile, block, r, 0);
          pair_offset_[pair_count_++] = p.token * kSliceDims + p.dim;
        }
      }
    }
  }

  // The symbols of one stream: every pair of the lane, or with two streams every other symbol.
  void plan_stream(int32_t stream, int32_t lane) {
    const bool quad = codebook_.mode == BlockMode::kQuad;
    const int32_t pairs_a_symbol = quad ? 2 : 1, streams = codebook_.streams_per_lane;
    // A lane's pairs lie relative to its first one as lane 0's do.
    const PairPosition origin = pair_position(codebook_.component, 0, 0, 0, lane);
    const int32_t from = origin.token * kSliceDims + origin.dim;
    for (int32_t p = pairs_a_symbol * stream; p < pair_count_; p += pairs_a_symbol * streams) {
      const int32_t a = from + pair_offset_[p];
      if (quad) {
        const int32_t b = from + pair_offset_[p + 1];
        plan_symbol(std::array{a, a + partner_, b, b + partner_});
      } else if (codebook_.mode == BlockMode::kSingle) {
        plan_symbol(std::array{a});
        plan_symbol(std::array{a + partner_});
      } else {
        plan_symbol(std::array{a, a + partner_});
      }
    }
  }

  // One symbol of the codes at these indices (token * kSliceDims + dim).
  template <size_t kPlaces>
  void plan_symbol(const std::array<int32_t, kPlaces>& at) {
    int32_t digits[kPlaces], symbol = 0, weight = 1, signs = 0;
    for (size_t i = 0; i < kPlaces; ++i) {
      digits[i] = digits_[at[i]];
      signs |= digits[i];
      symbol += weight * digits[i];
      weight *= radix_;
    }
    if (signs < 0 || codebook_.lengths[symbol] == 0) {
      symbol = substitute(digits, kPlaces);
      add_exceptions(at.data(), digits, kPlaces, symbol);
    }
    plan_->symbols[next_++] = static_cast<uint16_t>(symbol);
    plan_->payload_bits += codebook_.lengths[symbol];
  }

  // Bits of a symbol in place of the digits: its code word and one exception per code it gets
  // wrong.
  int32_t cost(int32_t symbol, const int32_t* digits, int32_t places) const {
    int32_t bits = codebook_.lengths[symbol];
    for (int32_t i = 0; i < places; ++i, symbol /= radix_) {
      if (digits[i] != kPadding && digits[i] != symbol % radix_) bits += kExceptionBits;
    }
    return bits;
  }

  // The present symbol of least cost, ties to the lowest.
  int32_t substitute(const int32_t* digits, int32_t places) const {
    int32_t best = codebook_.cheapest_symbol(-1, 0), best_cost = cost(best, digits, places);
    const auto consider = [&](int32_t symbol) {
      if (codebook_.lengths[symbol] == 0) return;
      const int32_t c = cost(symbol, digits, places);
      if (c < best_cost || (c == best_cost && symbol < best)) best = symbol, best_cost = c;
    };
    if (places == 4) {
      const int32_t symbols = codebook_.symbol_count();
      for (int32_t s = 0; s < symbols; ++s) consider(s);
      return best;
    }
    // With at most two places the least cost is the cheapest symbol that keeps one digit, or none.
    for (int32_t i = 0; i < places; ++i) {
      if (digits[i] < 0) continue;
      const uint16_t kept = codebook_.cheapest_symbol(i, digits[i]);
      if (kept != Codebook::kNoSymbol) consider(kept);
    }
    return best;
  }

  void add_exceptions(const int32_t* at, const int32_t* digits, int32_t places, int32_t symbol) {
    for (int32_t i = 0; i < places && plan_->possible; ++i, symbol /= radix_) {
      const int32_t digit = symbol % radix_;
      if (digits[i] == kPadding || digits[i] == digit) continue;
      const int32_t above = slice_.at(at[i] / kSliceDims, at[i] % kSliceDims) - codebook_.base;
      int32_t delta = above - digit;
      // The low plane keeps the low nibble of codes inside and zero for those outside.
      if (codebook_.mode == BlockMode::kSplit) {
        delta = above - 16 * digit - (digits[i] == kOutside ? 0 : above & 15);
      }
      plan_->possible =
          plan_->exception_count < kMaxExceptions && delta >= INT16_MIN && delta <= INT16_MAX;
      if (!plan_->possible) return;
      plan_->exceptions[plan_->exception_count++] =
          static_cast<uint32_t>(at[i]) | static_cast<uint32_t>(delta) << 16;
    }
  }

  const Slice& slice_;
  const Codebook& codebook_;
  SymbolPlan* plan_;
  int32_t radix_;
  int32_t next_ = 0;
  int32_t pair_count_ = 0, partner_ = 1;
  int32_t pair_offset_[kMaxBlockCodes / 2 / kWarpLanes];
  int16_t digits_[kMaxBlockCodes];  // [token][kSliceDims]
};

// Adds values to zeroed raw tiles of `bits` a code.
template <class ValueOf>
void write_raw_tiles(const Slice& slice, Component component, int32_t bits, uint8_t* tiles,
                     ValueOf value_of) {
  const TileLayout layout = raw_tile(bits, dim_block_count(slice.dims));
  for (int32_t t = 0; t < slice.tokens; ++t) {
    for (int32_t d = 0; d < slice.dims; ++d) {
      const CodePosition at = code_position(layout, component, t % kTileTokens, d);
      uint8_t* word = tiles + t / kTileTokens * layout.bytes() + at.byte;
      store_u32(word, load_u32(word) | static_cast<uint32_t>(value_of(slice.at(t, d))) << at.bit);
    }
  }
}

void write_coded(const Slice& slice, const Codebook& codebook, const SymbolPlan& plan,
                 const CodedBlockLayout& at, uint8_t* block) {
  uint8_t payload[(kMaxPayloadBits + 31) / 32 * 4 + 8];
  BitWriter writer(payload);
  int32_t next = 0;
  for (int32_t stream = 0; stream < kWarpLanes * codebook.streams_per_lane; ++stream) {
    store_u16(block + at.starts + 2 * stream, static_cast<uint32_t>(writer.position()));
    for (int32_t i = 0; i < plan.symbols_per_stream; ++i) {
      const uint16_t symbol = plan.symbols[next++];
      writer.put(codebook.words[symbol], codebook.lengths[symbol]);
    }
  }
  memcpy(block + at.payload, payload, static_cast<size_t>(at.exceptions - at.payload));
  if (codebook.mode == BlockMode::kSplit) {
    write_raw_tiles(slice, codebook.component, 4, block + at.low_plane, [&](int32_t code) {
      const int32_t above = code - codebook.base;
      return above >= 0 && above < codebook.levels ? above & 15 : 0;
    });
  }
  for (int32_t i = 0; i < plan.exception_count; ++i) {
    store_u32(block + at.exceptions + kExceptionBytes * i, plan.exceptions[i]);
  }
}

// The narrowest raw form that holds every code: codes above the smallest one, or 16 bits as they
// are.
CodedBlockHeader raw_header(const Slice& slice, Component component) {
  int32_t lo = INT16_MAX, hi = INT16_MIN;
  for (int32_t t = 0; t < slice.tokens; ++t) {
    for (int32_t d = 0; d < slice.dims; ++d) {
      lo = std::min(lo, slice.at(t, d));
      hi = std::max(hi, slice.at(t, d));
    }
  }
  CodedBlockHeader h;
  h.mode = hi - lo < 4     ? BlockMode::kRaw2
           : hi - lo < 16  ? BlockMode::kRaw4
           : hi - lo < 256 ? BlockMode::kRaw8
                           : BlockMode::kRaw16;
  h.component = component;
  h.tokens = static_cast<uint8_t>(slice.tokens);
  h.dims = static_cast<uint8_t>(slice.dims);
  h.base = h.mode == BlockMode::kRaw16 ? int16_t{0} : static_cast<int16_t>(lo);
  return h;
}

CodedBlockHeader coded_header(const CodedBlockHeader& raw, const Codebook& codebook,
                              const SymbolPlan& plan) {
  CodedBlockHeader h = raw;
  h.mode = codebook.mode;
  h.streams_per_lane = static_cast<uint8_t>(codebook.streams_per_lane);
  h.table_id = codebook.table_id;
  h.base = static_cast<int16_t>(codebook.base);
  h.payload_bits = static_cast<uint16_t>(plan.payload_bits);
  h.exceptions = static_cast<uint16_t>(plan.exception_count);
  return h;
}

void encode_slice(const Slice& slice, const Codebook& codebook, int32_t most_coded_bytes,
                  std::vector<uint8_t>* out) {
  SymbolPlan plan;
  plan.possible = !is_raw_mode(codebook.mode);
  if (plan.possible) SymbolPlanner(slice, codebook, &plan).run();
  CodedBlockHeader header = raw_header(slice, codebook.component);
  CodedBlockLayout at = block_layout(header);
  bool coded = false;
  if (plan.possible) {
    const CodedBlockHeader candidate = coded_header(header, codebook, plan);
    const CodedBlockLayout candidate_at = block_layout(candidate);
    coded = candidate_at.bytes < at.bytes && candidate_at.bytes <= most_coded_bytes;
    if (coded) header = candidate, at = candidate_at;
  }
  header.units = static_cast<uint16_t>(at.bytes / kBlockAlignment);
  const size_t begin = out->size();
  out->resize(begin + static_cast<size_t>(at.bytes), 0);
  uint8_t* block = out->data() + begin;
  if (coded) {
    write_coded(slice, codebook, plan, at, block);
  } else {
    const int32_t bits = raw_bits(header.mode), base = header.base;
    write_raw_tiles(slice, header.component, bits, block + at.payload,
                    [&](int32_t code) { return (code - base) & ((1 << bits) - 1); });
  }
  store_header(header, block);
  header.checksum = block_checksum_fast(block, at.bytes);
  store_header(header, block);
}

}  // namespace

Status encode_block(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, std::vector<uint8_t>* out, int32_t most_coded_bytes) {
  if (tokens < 1 || tokens > kBlockTokens) {
    return Status(StatusCode::kInvalidArgument, "a block has 1 to 64 tokens");
  }
  if (head_dim < 1 || head_dim > kMaxHeadDim) {
    return Status(StatusCode::kInvalidArgument, "head_dim must be 1 to 4096");
  }
  for (int32_t first = 0; first < head_dim; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, head_dim - first);
    encode_slice({codes + first, tokens, dims, head_dim}, codebook, most_coded_bytes, out);
  }
  return Status::ok();
}

}  // namespace tierkv
