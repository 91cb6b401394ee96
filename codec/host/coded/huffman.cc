// SPDX-License-Identifier: Apache-2.0
#include "codec/format/huffman.h"

#include <algorithm>

namespace tierkv {
namespace {

// One level of package-merge: the merged list of single symbols and packages, lightest first.
struct Level {
  std::vector<uint64_t> weights;
  std::vector<bool> is_symbol;
};

// Symbols before packages where the weights are equal.
Level merge_level(const std::vector<uint64_t>& symbols, const std::vector<uint64_t>& below) {
  const size_t packages = below.size() / 2;
  Level level;
  level.weights.reserve(symbols.size() + packages);
  level.is_symbol.reserve(symbols.size() + packages);
  size_t s = 0, p = 0;
  while (s < symbols.size() || p < packages) {
    const uint64_t package = p < packages ? below[2 * p] + below[2 * p + 1] : 0;
    const bool take_symbol = p == packages || (s < symbols.size() && symbols[s] <= package);
    level.weights.push_back(take_symbol ? symbols[s] : package);
    level.is_symbol.push_back(take_symbol);
    (take_symbol ? s : p) += 1;
  }
  return level;
}

uint32_t reverse_bits(uint32_t word, int32_t length) {
  uint32_t reversed = 0;
  for (int32_t b = 0; b < length; ++b) reversed |= (word >> b & 1u) << (length - 1 - b);
  return reversed;
}

}  // namespace

Status find_code_lengths(const std::vector<uint64_t>& counts, int32_t max_length,
                         std::vector<uint8_t>* lengths) {
  const auto n = static_cast<int32_t>(counts.size());
  if (n < 2) return Status(StatusCode::kInvalidArgument, "an alphabet needs two symbols");
  std::vector<int32_t> order;
  for (int32_t s = 0; s < n; ++s) {
    if (counts[s] > 0) order.push_back(s);
  }
  for (int32_t s = 0; order.size() < 2; ++s) {
    if (counts[s] == 0) order.push_back(s);
  }
  if (order.size() > uint64_t{1} << max_length) {
    return Status(StatusCode::kInvalidArgument, std::to_string(order.size()) + " symbols in " +
                                                    std::to_string(max_length) + " bits");
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return counts[a] != counts[b] ? counts[a] < counts[b] : a < b;
  });
  std::vector<uint64_t> sorted(order.size());
  for (size_t i = 0; i < order.size(); ++i) sorted[i] = counts[order[i]];

  std::vector<Level> levels;
  levels.reserve(max_length);
  for (int32_t l = 0; l < max_length; ++l) {
    levels.push_back(merge_level(sorted, l == 0 ? std::vector<uint64_t>{} : levels[l - 1].weights));
  }
  // The first 2 m - 2 items of the last list are the answer: a symbol is one bit longer for each
  // time it occurs in them, packages opened. The symbols chosen at a level are always its lightest
  // ones.
  lengths->assign(n, 0);
  size_t chosen = 2 * order.size() - 2;
  for (int32_t l = max_length - 1; l >= 0 && chosen > 0; --l) {
    size_t symbols = 0;
    for (size_t i = 0; i < chosen; ++i) symbols += levels[l].is_symbol[i];
    for (size_t i = 0; i < symbols; ++i) ++(*lengths)[order[i]];
    chosen = 2 * (chosen - symbols);
  }
  return Status::ok();
}

bool is_complete_code(const std::vector<uint8_t>& lengths, int32_t max_length) {
  uint64_t used = 0;
  for (uint8_t length : lengths) {
    if (length > max_length) return false;
    if (length > 0) used += uint64_t{1} << (max_length - length);
  }
  return used == uint64_t{1} << max_length;
}

std::vector<uint16_t> assign_code_words(const std::vector<uint8_t>& lengths) {
  std::vector<uint16_t> words(lengths.size(), 0);
  uint32_t next = 0;
  const int32_t longest = *std::max_element(lengths.begin(), lengths.end());
  for (int32_t length = 1; length <= longest; ++length) {
    next <<= 1;
    for (size_t s = 0; s < lengths.size(); ++s) {
      if (lengths[s] == length) words[s] = static_cast<uint16_t>(reverse_bits(next++, length));
    }
  }
  return words;
}

std::vector<uint16_t> build_lookup(const std::vector<uint8_t>& lengths,
                                   const std::vector<uint16_t>& words, int32_t max_length) {
  std::vector<uint16_t> symbol_of(size_t{1} << max_length, 0);
  for (size_t s = 0; s < lengths.size(); ++s) {
    if (lengths[s] == 0) continue;
    const size_t stride = size_t{1} << lengths[s];
    for (size_t i = words[s]; i < symbol_of.size(); i += stride) {
      symbol_of[i] = static_cast<uint16_t>(s);
    }
  }
  return symbol_of;
}

}  // namespace tierkv
