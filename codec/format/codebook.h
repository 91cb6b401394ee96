// SPDX-License-Identifier: Apache-2.0
// A codebook: one canonical, length-limited Huffman code and the alphabet of quantisation codes it
// stands for. It is built once, transmitted as its code lengths (docs/reference/format.md,
// "Codebooks") and never changed; the tables below follow from the lengths.
//
// Its scope is the caller's choice: a (layer, component) as in KVComp section 3.2, a kv_head, or a
// family whose members are told apart by table_id. Codes outside the alphabet are no error: coded
// blocks carry them as exceptions.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "codec/host/coded/histogram.h"
#include "tierkv/format.h"
#include "tierkv/status.h"

namespace tierkv {

// How the codes of a block are stored; the values are those of the file format.
enum class BlockMode : uint8_t {
  kRaw2 = 0,  // fixed width, tiles of unified pages
  kRaw4 = 1,
  kRaw8 = 2,
  kRaw16 = 3,
  kSingle = 4,  // one code a symbol, 2 to 256 levels
  kPair = 5,    // two codes a symbol, 2 to 32 levels
  kQuad = 6,    // four codes a symbol, 2 to 4 levels
  kSplit = 7,   // high nibbles as pairs, low nibbles raw, 17 to 256 levels
};
inline constexpr int32_t kNumBlockModes = 8;
inline constexpr bool is_raw_mode(BlockMode m) {
  return m <= BlockMode::kRaw16;
}
const char* block_mode_name(BlockMode m);

// The symbols of a mode that is not raw. The decode table is indexed by the next max_length bits;
// an entry has the length of the code word in bits 0-5 and the digits above, first digit lowest,
// each of digit_bits. Shifts by a register look at six bits only, so an entry is a shift.
struct SymbolShape {
  int32_t codes, digit_bits, least_levels, most_levels;
};
inline constexpr SymbolShape symbol_shape(BlockMode mode) {
  constexpr SymbolShape kShapes[] = {{1, 8, 2, 256}, {2, 5, 2, 32}, {4, 2, 2, 4}, {2, 4, 17, 256}};
  return kShapes[static_cast<int32_t>(mode) - static_cast<int32_t>(BlockMode::kSingle)];
}

inline constexpr int32_t kMaxCodeLength = 14;
inline constexpr int32_t kMaxSymbols = 1024;

struct CodebookSpec {
  std::optional<BlockMode>
      mode;  // kSingle to kSplit; unset: the smallest that decodes two codes a lookup
  int32_t max_length = 12;       // bits of the longest code word: 2^max_length table entries
  int32_t streams_per_lane = 1;  // 1 or 2
  uint8_t table_id = 0;
};

// What a codebook is but for its code words: what a GPU's copy has, too.
struct CodebookShape {
  Component component = Component::kKey;
  BlockMode mode = BlockMode::kPair;
  uint8_t table_id = 0;
  int32_t streams_per_lane = 1;
  int32_t levels = 0;  // the alphabet is the codes [base, base + levels)
  int32_t base = 0;
  int32_t max_length = 0;  // bits of the longest code word
};

// Made by build_codebook or parse_codebook only; immutable afterwards.
//
// A symbol is a number whose digits, least significant first, are its codes counted from the base
// (kSplit: their high nibbles), in the radix below.
struct Codebook : CodebookShape {
  std::vector<uint8_t> lengths;  // [symbols]; 0: absent, its codes are stored as exceptions

  // What follows from the lengths; complete_codebook() fills it in.
  std::vector<uint16_t> words;     // [symbols] code words, first bit in bit 0
  std::vector<uint16_t> table;     // [2^max_length], see SymbolShape
  std::vector<uint16_t> cheapest;  // see cheapest_symbol()

  int32_t codes_per_symbol() const { return symbol_shape(mode).codes; }
  int32_t radix() const { return mode == BlockMode::kSplit ? (levels + 15) / 16 : levels; }
  int32_t symbol_count() const;

  // The present symbol of fewest bits, ties to the lowest; with `digit` in place `position` when
  // position >= 0, and then kNoSymbol where every such symbol is absent.
  static constexpr uint16_t kNoSymbol = 0xffff;
  uint16_t cheapest_symbol(int32_t position, int32_t digit) const {
    return cheapest[position < 0 ? 0 : 1 + position * radix() + digit];
  }
};

// The decode table as a GPU holds it, [2^max_length]: length in bits 0-5, first digit in bits 6-10,
// second in 22-26, for kQuad third in 8-9 and fourth in 24-25; kSingle has its digit in bits 16-23.
// An entry of kPair times 2^-6, in fp16, is two numbers digit * 2^-24: the product rounds the
// length away. So is the upper half of one of kSingle as it stands.
std::vector<uint32_t> device_table(const Codebook& codebook);

// Checks mode, levels, base and lengths and fills in the rest: kInvalidArgument with the field.
Status complete_codebook(Codebook* codebook);

// The codebook that codes this histogram in the fewest bits. An empty histogram gives a valid
// codebook. kInvalidArgument for an impossible spec; kUnsupported where the mode cannot hold the
// codes usefully.
Result<Codebook> build_codebook(const CodeHistogram& histogram, const CodebookSpec& spec = {});

inline constexpr int64_t kCodebookHeaderBytes = 12;
inline constexpr int32_t kLongestRun = 16;  // absent symbols in one run
// Serialised size; billed once per scope.
int64_t codebook_bytes(const Codebook& codebook);
void serialize_codebook(const Codebook& codebook, std::vector<uint8_t>* out);  // appends
// kCorrupt or kVersion with what is wrong; never reads past `size` bytes, which must all be used.
Result<Codebook> parse_codebook(const uint8_t* bytes, int64_t size);

}  // namespace tierkv
