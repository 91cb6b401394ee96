// SPDX-License-Identifier: Apache-2.0
#include "codec/format/codebook.h"

#include <algorithm>
#include <string>

#include "codec/format/byte_cursor.h"
#include "codec/format/huffman.h"

namespace tierkv {
namespace {

constexpr uint8_t kCodebookVersion = 1;

Status invalid(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, "codebook: " + message);
}
Status corrupt(const std::string& message) {
  return Status(StatusCode::kCorrupt, "codebook: " + message);
}

Status validate_alphabet(const Codebook& c) {
  if (is_raw_mode(c.mode) || static_cast<int32_t>(c.mode) >= kNumBlockModes) {
    return invalid("mode " + std::to_string(static_cast<int>(c.mode)) + " has no code");
  }
  const SymbolShape shape = symbol_shape(c.mode);
  if (c.levels < shape.least_levels || c.levels > shape.most_levels) {
    return invalid(std::string(block_mode_name(c.mode)) + " cannot have " +
                   std::to_string(c.levels) + " levels");
  }
  if (c.base < INT16_MIN || c.base + c.levels - 1 > INT16_MAX) return invalid("base out of range");
  if (c.streams_per_lane != 1 && c.streams_per_lane != 2) {
    return invalid("streams_per_lane must be 1 or 2");
  }
  if (c.max_length < 1 || c.max_length > kMaxCodeLength) {
    return invalid("max_length must be 1 to " + std::to_string(kMaxCodeLength));
  }
  return Status::ok();
}

// Digits of a symbol, least significant first; unused ones are 0.
struct Digits {
  uint32_t d[4] = {0, 0, 0, 0};
};

Digits digits_of(const Codebook& c, uint32_t symbol) {
  Digits digits;
  const auto radix = static_cast<uint32_t>(c.radix());
  for (int32_t i = 0; i < c.codes_per_symbol(); ++i) {
    digits.d[i] = symbol % radix;
    symbol /= radix;
  }
  return digits;
}

// The table whose entry is entry_of(symbol, digits) wherever the bits begin with the symbol's word.
template <class T, class EntryOf>
std::vector<T> make_table(const Codebook& c, const EntryOf& entry_of) {
  std::vector<T> entries, table;
  for (uint32_t symbol = 0; symbol < c.lengths.size(); ++symbol) {
    entries.push_back(static_cast<T>(entry_of(symbol, digits_of(c, symbol).d)));
  }
  for (uint16_t symbol : build_lookup(c.lengths, c.words, c.max_length)) {
    table.push_back(entries[symbol]);
  }
  return table;
}

void find_cheapest(Codebook* c) {
  const int32_t places = c->codes_per_symbol(), radix = c->radix();
  c->cheapest.assign(static_cast<size_t>(1 + places * radix), Codebook::kNoSymbol);
  const auto improve = [c](size_t slot, uint32_t symbol) {
    const uint16_t best = c->cheapest[slot];
    if (best == Codebook::kNoSymbol || c->lengths[symbol] < c->lengths[best]) {
      c->cheapest[slot] = static_cast<uint16_t>(symbol);
    }
  };
  for (uint32_t s = 0; s < c->lengths.size(); ++s) {
    if (c->lengths[s] == 0) continue;
    improve(0, s);
    const Digits digits = digits_of(*c, s);
    for (int32_t i = 0; i < places; ++i) {
      improve(static_cast<size_t>(1 + i * radix) + digits.d[i], s);
    }
  }
}

// Lengths as nibbles: 1 to 14, or 0 and then the number of absent symbols less one.
std::vector<uint8_t> length_nibbles(const std::vector<uint8_t>& lengths) {
  std::vector<uint8_t> nibbles;
  for (size_t s = 0; s < lengths.size();) {
    if (lengths[s] > 0) {
      nibbles.push_back(lengths[s++]);
      continue;
    }
    int32_t run = 0;
    while (s < lengths.size() && lengths[s] == 0 && run < kLongestRun) ++s, ++run;
    nibbles.push_back(0);
    nibbles.push_back(static_cast<uint8_t>(run - 1));
  }
  return nibbles;
}

Status parse_lengths(const uint8_t* bytes, int64_t size, Codebook* c) {
  const auto symbols = static_cast<size_t>(c->symbol_count());
  int64_t at = 0;
  const auto next = [&] {
    const uint8_t nibble = bytes[at / 2] >> (4 * (at % 2)) & 15;
    ++at;
    return nibble;
  };
  while (c->lengths.size() < symbols) {
    if (at == 2 * size) return corrupt("code lengths are cut short");
    const uint8_t length = next();
    if (length > 0) {
      c->lengths.push_back(length);
      continue;
    }
    if (at == 2 * size) return corrupt("code lengths are cut short");
    const size_t run = next() + size_t{1};
    if (run > symbols - c->lengths.size()) return corrupt("too many absent symbols");
    c->lengths.insert(c->lengths.end(), run, 0);
  }
  if (at % 2 == 1 && next() != 0) return corrupt("bits after the code lengths");
  if (at != 2 * size) return corrupt("bytes after the code lengths");
  return Status::ok();
}

}  // namespace

const char* block_mode_name(BlockMode m) {
  static constexpr const char* kNames[] = {"raw2",   "raw4", "raw8", "raw16",
                                           "single", "pair", "quad", "split"};
  const auto i = static_cast<int32_t>(m);
  return i < kNumBlockModes ? kNames[i] : "unknown";
}

int32_t Codebook::symbol_count() const {
  int32_t n = 1;
  for (int32_t i = 0; i < codes_per_symbol(); ++i) n *= radix();
  return n;
}

std::vector<uint32_t> device_table(const Codebook& c) {
  return make_table<uint32_t>(c, [&](uint32_t symbol, const uint32_t(&d)[4]) {
    const uint32_t fields =
        c.mode == BlockMode::kSingle ? d[0] << 16 : d[0] << 6 | d[1] << 22 | d[2] << 8 | d[3] << 24;
    return c.lengths[symbol] | fields;
  });
}

Status complete_codebook(Codebook* c) {
  if (Status s = validate_alphabet(*c); !s) return s;
  if (c->lengths.size() != static_cast<size_t>(c->symbol_count())) {
    return invalid("wrong number of code lengths");
  }
  if (*std::max_element(c->lengths.begin(), c->lengths.end()) != c->max_length) {
    return invalid("max_length is not the longest code length");
  }
  if (!is_complete_code(c->lengths, c->max_length)) return invalid("code lengths are not complete");

  c->words = assign_code_words(c->lengths);
  find_cheapest(c);
  c->table = make_table<uint16_t>(*c, [c](uint32_t symbol, const uint32_t(&d)[4]) {
    uint32_t entry = c->lengths[symbol];
    for (int32_t i = 0; i < c->codes_per_symbol(); ++i) {
      entry |= d[i] << (6 + symbol_shape(c->mode).digit_bits * i);
    }
    return entry;
  });
  return Status::ok();
}

int64_t codebook_bytes(const Codebook& c) {
  return kCodebookHeaderBytes + static_cast<int64_t>(length_nibbles(c.lengths).size() + 1) / 2;
}

void serialize_codebook(const Codebook& c, std::vector<uint8_t>* out) {
  const std::vector<uint8_t> nibbles = length_nibbles(c.lengths);
  ByteWriter w(out);
  w.u8(kCodebookVersion);
  w.u8(static_cast<uint32_t>(c.mode));
  w.u8(static_cast<uint32_t>(c.component));
  w.u8(c.table_id);
  w.u16(static_cast<uint32_t>(c.levels));
  w.u16(static_cast<uint32_t>(c.base));
  w.u8(static_cast<uint32_t>(c.max_length));
  w.u8(static_cast<uint32_t>(c.streams_per_lane));
  w.u16(static_cast<uint32_t>(kCodebookHeaderBytes + (nibbles.size() + 1) / 2));
  for (size_t i = 0; i < nibbles.size(); i += 2) {
    const uint32_t high = i + 1 < nibbles.size() ? nibbles[i + 1] : 0;
    w.u8(nibbles[i] | high << 4);
  }
}

Result<Codebook> parse_codebook(const uint8_t* bytes, int64_t size) {
  if (size < kCodebookHeaderBytes) return corrupt("shorter than its header");
  if (bytes[0] != kCodebookVersion) {
    return Status(StatusCode::kVersion,
                  "codebook: version " + std::to_string(bytes[0]) + " is not known");
  }
  if (bytes[1] >= kNumBlockModes || bytes[2] > 1) return corrupt("unknown mode or component");
  if (size != (bytes[10] | bytes[11] << 8)) return corrupt("size disagrees with its header");
  Codebook c;
  c.mode = static_cast<BlockMode>(bytes[1]);
  c.component = static_cast<Component>(bytes[2]);
  c.table_id = bytes[3];
  c.levels = bytes[4] | bytes[5] << 8;
  c.base = static_cast<int16_t>(bytes[6] | bytes[7] << 8);
  c.max_length = bytes[8];
  c.streams_per_lane = bytes[9];
  if (Status s = validate_alphabet(c); !s) return Status(StatusCode::kCorrupt, s.message());
  const Status lengths =
      parse_lengths(bytes + kCodebookHeaderBytes, size - kCodebookHeaderBytes, &c);
  if (!lengths) return lengths;
  if (Status s = complete_codebook(&c); !s) return Status(StatusCode::kCorrupt, s.message());
  return c;
}

}  // namespace tierkv
