// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/block_symbols.h"

#include <algorithm>
#include <array>

#include "codec/format/coded_block_format.h"
#include "codec/format/huffman.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxStreams = 2 * kWarpLanes;
// Digits that are no digits.
constexpr int16_t kOutside = -1;
constexpr int16_t kPadding = -2;

// A slice as code words of its books.
struct SymbolPlan {
  uint32_t entries[kMaxBlockCodes];  // code word, its length from bit 16 on
  int32_t entries_per_stream = 0;
  uint32_t stream_bits[kMaxStreams];
  int64_t payload_bits = 0;
  uint32_t exceptions[kMaxExceptions];  // as the block has them, ascending
  int32_t exception_count = 0;
  bool possible = true;  // false: too many exceptions or bits, or an exception too far away
};

class SymbolPlanner {
 public:
  SymbolPlanner(const Slice& slice, const SliceBooks& books, SymbolPlan* plan)
      : slice_(slice), books_(books), plan_(plan), mode_(books.first().mode) {}

  void run() {
    find_digits();
    const int32_t places = books_.first().codes_per_symbol();
    for (int32_t i = 0; i < blocks(); ++i) {
      const Codebook* book = books_.of[block_at(i)];
      views_[i] = {book, book->lengths.data(), book->words.data(), book->radix()};
    }
    for (int32_t stream = 0; stream < books_.streams(); ++stream) {
      if (stream % kWarpLanes == 0) find_offsets(stream);
      if (!plan_->possible) continue;
      places == 1   ? plan_stream<1>(stream)
      : places == 2 ? plan_stream<2>(stream)
                    : plan_stream<4>(stream);
    }
    plan_->entries_per_stream = next_ / books_.streams();
    if (plan_->payload_bits > kMaxPayloadBits) plan_->possible = false;
    std::sort(plan_->exceptions, plan_->exceptions + plan_->exception_count,
              [](uint32_t a, uint32_t b) { return (a & 0xffffu) < (b & 0xffffu); });
  }

 private:
  void find_digits() {
    const int32_t shift = mode_ == BlockMode::kSplit ? 4 : 0;
    std::fill_n(digits_, kMaxBlockCodes, kPadding);
    for (int32_t first = 0; first < slice_.dims; first += run_dims(first)) {
      const Codebook& book = *books_.of[first / kDimBlock];
      const auto levels = static_cast<uint32_t>(book.levels);
      const int32_t base = book.base, dims = run_dims(first);
      for (int32_t t = 0; t < slice_.tokens; ++t) {
        const int16_t* codes = slice_.codes + t * slice_.stride + first;
        int16_t* digits = digits_ + t * kSliceDims + first;
        for (int32_t d = 0; d < dims; ++d) {
          const auto above = static_cast<uint32_t>(codes[d] - base);
          digits[d] = above < levels ? static_cast<int16_t>(above >> shift) : kOutside;
        }
      }
    }
  }

  int32_t blocks() const { return dim_block_count(slice_.dims); }
  // The dim block that streams pass as number i.
  int32_t block_at(int32_t i) const { return dim_block_at(books_.first().component, blocks(), i); }

  // Channels from `first` on, the start of a dim block, that share a book.
  int32_t run_dims(int32_t first) const {
    int32_t end = first;
    while (end < slice_.dims && books_.of[end / kDimBlock] == books_.of[first / kDimBlock]) {
      end += kDimBlock;
    }
    return std::min(end, slice_.dims) - first;
  }

  // Finds where the codes of a stream lie relative to its lane's first one: the same for all lanes.
  void find_offsets(int32_t stream) {
    const Component component = books_.first().component;
    const int32_t partner = component == Component::kKey ? 1 : kSliceDims;
    int32_t* next = offsets_;
    for (int32_t tile = 0; tile < tile_count(slice_.tokens); ++tile) {
      for (int32_t i = 0; i < blocks(); ++i) {
        for (int32_t c = 0; c < books_.codes_per_fragment(); ++c) {
          const int32_t in_lane = books_.lane_code(stream, c);
          const PairPosition p = pair_position(component, tile, block_at(i), in_lane / 2, 0);
          *next++ = p.token * kSliceDims + p.dim + in_lane % 2 * partner;
        }
      }
    }
  }

  // Where the next code word of a stream goes, and the bits of those before.
  struct Cursor {
    uint32_t* next;
    uint32_t bits = 0;
    void put(uint32_t word, uint32_t length) {
      *next++ = word | length << 16;
      bits += length;
    }
  };

  // What the inner loop needs of a book, apart from what it writes.
  struct BookView {
    const Codebook* book;
    const uint8_t* lengths;
    const uint16_t* words;
    int32_t radix;
  };

  template <size_t kPlaces>
  void plan_stream(int32_t stream) {
    const int32_t lane = stream % kWarpLanes, dim_blocks = blocks();
    const int32_t fragment_codes = books_.codes_per_fragment();
    const PairPosition origin = pair_position(books_.first().component, 0, 0, 0, lane);
    const int32_t from = origin.token * kSliceDims + origin.dim;
    const int32_t* offset = offsets_;
    Cursor to{plan_->entries + next_};
    for (int32_t left = tile_count(slice_.tokens) * dim_blocks, i = 0; left > 0; --left) {
      const BookView view = views_[i];
      if (++i == dim_blocks) i = 0;
      for (const int32_t* end = offset + fragment_codes; offset < end; offset += kPlaces) {
        std::array<int32_t, kPlaces> at;
        for (size_t k = 0; k < kPlaces; ++k) at[k] = from + offset[k];
        plan_symbol(view, at, &to);
      }
    }
    plan_->stream_bits[stream] = to.bits;
    plan_->payload_bits += to.bits;
    next_ = static_cast<int32_t>(to.next - plan_->entries);
  }

  // One symbol of the codes at these indices (token * kSliceDims + dim).
  template <size_t kPlaces>
  void plan_symbol(const BookView& view, const std::array<int32_t, kPlaces>& at, Cursor* to) {
    int32_t digits[kPlaces], symbol = 0, weight = 1, signs = 0;
    for (size_t i = 0; i < kPlaces; ++i) {
      digits[i] = digits_[at[i]];
      signs |= digits[i];
      symbol += weight * digits[i];
      weight *= view.radix;
    }
    if (signs < 0 || view.lengths[symbol] == 0) {
      symbol = substitute(*view.book, digits, kPlaces);
      add_exceptions(*view.book, at.data(), digits, kPlaces, symbol);
    }
    to->put(view.words[symbol], view.lengths[symbol]);
  }

  // Bits of a symbol in place of the digits: its code word and one exception per code it gets
  // wrong.
  int32_t cost(const Codebook& book, int32_t symbol, const int32_t* digits, int32_t places) const {
    int32_t bits = book.lengths[symbol];
    for (int32_t i = 0; i < places; ++i, symbol /= book.radix()) {
      if (digits[i] != kPadding && digits[i] != symbol % book.radix()) bits += kExceptionBits;
    }
    return bits;
  }

  // The present symbol of least cost, ties to the lowest.
  int32_t substitute(const Codebook& book, const int32_t* digits, int32_t places) const {
    int32_t best = book.cheapest_symbol(-1, 0), best_cost = cost(book, best, digits, places);
    const auto consider = [&](int32_t symbol) {
      if (book.lengths[symbol] == 0) return;
      const int32_t c = cost(book, symbol, digits, places);
      if (c < best_cost || (c == best_cost && symbol < best)) best = symbol, best_cost = c;
    };
    if (places == 4) {
      const int32_t symbols = book.symbol_count();
      for (int32_t s = 0; s < symbols; ++s) consider(s);
      return best;
    }
    // With at most two places the least cost is the cheapest symbol that keeps one digit, or none.
    for (int32_t i = 0; i < places; ++i) {
      if (digits[i] < 0) continue;
      const uint16_t kept = book.cheapest_symbol(i, digits[i]);
      if (kept != Codebook::kNoSymbol) consider(kept);
    }
    return best;
  }

  void add_exceptions(const Codebook& book, const int32_t* at, const int32_t* digits,
                      int32_t places, int32_t symbol) {
    for (int32_t i = 0; i < places && plan_->possible; ++i, symbol /= book.radix()) {
      const int32_t digit = symbol % book.radix();
      if (digits[i] == kPadding || digits[i] == digit) continue;
      const int32_t above = slice_.at(at[i] / kSliceDims, at[i] % kSliceDims) - book.base;
      int32_t delta = above - digit;
      // The low plane keeps the low nibble of codes inside and zero for those outside.
      if (book.mode == BlockMode::kSplit) {
        delta = above - 16 * digit - (digits[i] == kOutside ? 0 : above & 15);
      }
      // Decoders add low nibbles modulo 2^16: what the delta is added to must not wrap.
      const int32_t decoded = book.base + above - delta;
      plan_->possible = plan_->exception_count < kMaxExceptions && decoded <= INT16_MAX &&
                        delta >= INT16_MIN && delta <= INT16_MAX;
      if (!plan_->possible) return;
      plan_->exceptions[plan_->exception_count++] =
          static_cast<uint32_t>(at[i]) | static_cast<uint32_t>(delta) << 16;
    }
  }

  const Slice& slice_;
  const SliceBooks& books_;
  SymbolPlan* plan_;
  BlockMode mode_;
  int32_t next_ = 0;
  BookView views_[kSliceDimBlocks];  // in the order of the streams
  int32_t offsets_[kMaxBlockCodes / kWarpLanes];
  int16_t digits_[kMaxBlockCodes];  // [token][kSliceDims]
};

// Values into raw tiles of `bits` a code.
template <class ValueOf>
void write_raw_tiles(const Slice& slice, Component component, int32_t bits, uint8_t* tiles,
                     ValueOf value_of) {
  const TileLayout layout = raw_tile(bits, dim_block_count(slice.dims));
  for (int32_t t = 0; t < slice.tokens; ++t) {
    for (int32_t d = 0; d < slice.dims; ++d) {
      store_code(tiles + t / kTileTokens * layout.bytes(),
                 code_position(layout, component, t % kTileTokens, d), bits,
                 static_cast<uint32_t>(value_of(t, d)));
    }
  }
}

// The header of a slice's raw form.
BlockHeader raw_header(const Slice& slice, Component component, const int8_t* exponents) {
  int32_t lowest = INT16_MAX, highest = INT16_MIN;
  for (int32_t t = 0; t < slice.tokens; ++t) {
    for (int32_t d = 0; d < slice.dims; ++d) {
      lowest = std::min(lowest, slice.at(t, d));
      highest = std::max(highest, slice.at(t, d));
    }
  }
  const RawForm raw = raw_form(lowest, highest);
  BlockHeader h;
  h.mode = raw.mode;
  h.component = component;
  h.tokens = static_cast<uint8_t>(slice.tokens);
  h.dims = static_cast<uint8_t>(slice.dims);
  h.base_or_books = static_cast<uint16_t>(raw.base);
  if (exponents == nullptr) return h;
  const auto [least, most] = std::minmax_element(exponents, exponents + slice.tokens);
  h.least_exponent = *least;
  h.exponent_bits = static_cast<uint8_t>(bits_for(static_cast<uint32_t>(*most - *least)));
  return h;
}

BlockHeader coded_header(const BlockHeader& raw, const BlockHeader& named, const SliceBooks& books,
                         const SymbolPlan& plan) {
  BlockHeader h = raw;
  h.mode = books.first().mode;
  h.streams_per_lane = static_cast<uint8_t>(books.first().streams_per_lane);
  h.table_id = named.table_id;
  h.base_or_books = named.base_or_books;
  h.payload_bits = static_cast<uint16_t>(plan.payload_bits);
  h.exceptions = static_cast<uint16_t>(plan.exception_count);
  const uint32_t* bits = plan.stream_bits;
  const auto [least, most] = std::minmax_element(bits, bits + books.streams());
  h.least_length = static_cast<uint16_t>(*least);
  h.length_bits = static_cast<uint8_t>(bits_for(*most - *least));
  return h;
}

// Into zeroed bytes: the lengths of the streams, the streams of a possible plan, without gaps, its
// exceptions and, for kSplit, the low nibbles.
void write_coded(const Slice& slice, const SliceBooks& books, const SymbolPlan& plan,
                 const BlockHeader& h, uint8_t* block) {
  const BlockLayout at = block_layout(h);
  for (int32_t i = 0; i < books.streams(); ++i) {
    store_field(block + at.lengths, i, h.length_bits, plan.stream_bits[i] - h.least_length);
  }
  uint8_t payload[(kMaxPayloadBits + 31) / 32 * 4 + kBitWriterSlackBytes];
  BitWriter writer(payload);
  for (int32_t i = 0; i < books.streams() * plan.entries_per_stream; ++i) {
    writer.put(plan.entries[i] & 0xffffu, static_cast<int32_t>(plan.entries[i] >> 16));
  }
  memcpy(block + at.payload, payload, static_cast<size_t>(plan.payload_bits + 31) / 32 * 4);
  for (int32_t i = 0; i < plan.exception_count; ++i) {
    store_u32(block + at.exceptions + kExceptionBytes * i, plan.exceptions[i]);
  }
  if (h.mode != BlockMode::kSplit) return;
  write_raw_tiles(slice, h.component, 4, block + at.low_plane, [&](int32_t t, int32_t d) {
    const Codebook& book = *books.of[d / kDimBlock];
    const int32_t above = slice.at(t, d) - book.base;
    return above >= 0 && above < book.levels ? above & 15 : 0;
  });
}

}  // namespace

void encode_slice(const Slice& slice, const SliceBooks& books, const BlockHeader& named,
                  const int8_t* exponents, std::vector<uint8_t>* out) {
  SymbolPlan plan;
  plan.possible = !is_raw_mode(books.first().mode);
  if (plan.possible) SymbolPlanner(slice, books, &plan).run();
  BlockHeader h = raw_header(slice, books.first().component, exponents);
  BlockLayout at = block_layout(h);
  if (plan.possible) {
    const BlockHeader coded = coded_header(h, named, books, plan);
    const BlockLayout coded_at = block_layout(coded);
    if (coded_at.bytes < at.bytes) h = coded, at = coded_at;
  }
  h.units = static_cast<uint16_t>(at.bytes / kBlockAlignment);
  const size_t begin = out->size();
  out->resize(begin + static_cast<size_t>(at.bytes), 0);
  uint8_t* block = out->data() + begin;
  for (int32_t t = 0; exponents != nullptr && t < slice.tokens; ++t) {
    store_field(block + at.exponents, t, h.exponent_bits,
                static_cast<uint32_t>(exponents[t] - h.least_exponent));
  }
  if (is_raw_mode(h.mode)) {
    const int32_t bits = raw_bits(h.mode), base = h.base();
    write_raw_tiles(slice, h.component, bits, block + at.payload, [&](int32_t t, int32_t d) {
      return (slice.at(t, d) - base) & ((1 << bits) - 1);
    });
  } else {
    write_coded(slice, books, plan, h, block);
  }
  store_header(h, block);
  h.checksum = block_checksum(block, at.bytes);
  store_header(h, block);
}

}  // namespace tierkv
