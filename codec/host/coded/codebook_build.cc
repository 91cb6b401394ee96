// SPDX-License-Identifier: Apache-2.0
// Which alphabet and which symbols: build_codebook. The bytes and tables are in codebook.cc.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>

#include "codec/format/codebook.h"
#include "codec/format/huffman.h"

namespace tierkv {
namespace {

// A mode of one code a lookup decodes at half the speed: it must save this share of the bits.
constexpr double kSingleMustSave = 0.05;
// An exception also costs the decoder some work, so a symbol stays in the alphabet although its
// code words, which shorten everybody else's, cost up to twice the bits
// (docs/notes/2026-11-21-entropy-choices.md).
constexpr double kExceptionPrice = 64;
// Symbols that are rarer than one in such a share of the decode table become exceptions.
constexpr uint64_t kRarityShares[] = {8, 24, 72, uint64_t{1} << 30};

// Counts of an alphabet's symbols, and how many codes fall outside it.
struct SymbolCounts {
  Codebook codebook;  // mode, levels, base and the spec's fields
  std::vector<uint64_t> counts;
  uint64_t outside = 0;
};

struct Candidate {
  Codebook codebook;
  double price = 0;  // in bits, rounded alike everywhere
};

// The cheapest of several candidates, or why the last one failed.
class Cheapest {
 public:
  void consider(Result<Candidate> candidate) {
    if (!candidate) {
      failure_ = candidate.status();
    } else if (!best_ || candidate->price < best_->price) {
      best_ = std::move(*candidate);
    }
  }
  Result<Candidate> take() {
    if (!best_) return failure_;
    return std::move(*best_);
  }

 private:
  std::optional<Candidate> best_;
  Status failure_;
};

// The codes outside of [base, base + levels).
uint64_t count_outside(const CodeHistogram& h, int32_t base, int32_t levels) {
  auto outside = static_cast<uint64_t>(h.total());
  for (int32_t c = base; c < base + levels; ++c) outside -= h.count(c);
  return outside;
}
uint64_t sum_of(const std::vector<uint64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

// The window of `levels` codes that holds the most of them; where several do, the one most central
// in the range, then the lowest.
int32_t best_base(const CodeHistogram& h, int32_t levels) {
  const int32_t lo = h.min_code(), hi = h.max_code();
  const auto off_centre = [&](int32_t base) { return std::abs(2 * base + levels - 1 - lo - hi); };
  // Leave room for `levels` 16-bit codes.
  const int32_t lowest = std::max(lo - levels, int32_t{INT16_MIN});
  const int32_t highest = std::min(hi, INT16_MAX + 1 - levels);
  uint64_t outside = count_outside(h, lowest, levels), least = outside;
  int32_t best = lowest;
  for (int32_t base = lowest + 1; base <= highest; ++base) {
    outside += h.count(base - 1) - h.count(base + levels - 1);
    if (outside < least || (outside == least && off_centre(base) < off_centre(best))) {
      least = outside;
      best = base;
    }
  }
  return best;
}

int32_t most_frequent(const CodeHistogram& h, int32_t base, int32_t levels) {
  int32_t best = base;
  for (int32_t c = base; c < base + levels; ++c) {
    if (h.count(c) > h.count(best)) best = c;
  }
  return best;
}

// Counts of the pairs of digits `unit` codes wide. A code outside becomes the most frequent one and
// an exception, and so does padding without being one.
SymbolCounts count_pairs(const CodeHistogram& h, Codebook codebook) {
  const int32_t levels = codebook.levels, base = codebook.base, radix = codebook.radix();
  const int32_t unit = codebook.mode == BlockMode::kSplit ? 16 : 1;
  const int32_t fill = (most_frequent(h, base, levels) - base) / unit;
  SymbolCounts out{std::move(codebook), std::vector<uint64_t>(size_t(radix) * radix, 0),
                   count_outside(h, base, levels)};
  const auto at = [&](int32_t a, int32_t b) -> uint64_t& {
    return out.counts[static_cast<size_t>(a + radix * b)];
  };
  if (h.pairs_are_exact()) {
    const int32_t lo = h.min_code(), hi = h.max_code();
    const auto digit = [&](int32_t code) {
      const bool in = code >= base && code < base + levels;
      return in ? (code - base) / unit : fill;
    };
    for (int32_t a = lo; a <= hi; ++a) {
      for (int32_t b = lo; b <= hi; ++b) at(digit(a), digit(b)) += h.pair_count(a, b);
      at(digit(a), fill) += h.lone_count(a);
    }
  } else {
    const uint64_t inside = static_cast<uint64_t>(h.total()) - out.outside;
    std::vector<uint64_t> digits(static_cast<size_t>(radix), 0);
    for (int32_t c = 0; c < levels; ++c) digits[c / unit] += h.count(base + c);
    for (int32_t a = 0; a < radix; ++a) {
      for (int32_t b = 0; b < radix; ++b) {
        at(a, b) = expected_count(digits[a], digits[b], std::max<uint64_t>(inside, 1)) / 2;
      }
    }
    at(fill, fill) += out.outside / 2;
  }
  at(fill, fill) += h.padding_pairs();
  return out;
}

SymbolCounts count_singles(const CodeHistogram& h, Codebook codebook) {
  const int32_t levels = codebook.levels, base = codebook.base;
  SymbolCounts out{std::move(codebook), {}, count_outside(h, base, levels)};
  uint64_t lone = 0;
  for (int32_t c = 0; c < levels; ++c) out.counts.push_back(h.count(base + c));
  for (int32_t c = 0; c < 256; ++c) lone += h.lone_count(c);
  out.counts[most_frequent(h, base, levels) - base] += out.outside + lone + 2 * h.padding_pairs();
  return out;
}

// Where the codes span more than a quad's 4 values: pairs of pairs, taken as independent.
SymbolCounts expect_quads(const CodeHistogram& h, Codebook codebook) {
  Codebook pair = codebook;
  pair.mode = BlockMode::kPair;
  const SymbolCounts pairs = count_pairs(h, pair);
  SymbolCounts out{std::move(codebook), {}, pairs.outside};
  const uint64_t total = sum_of(pairs.counts);
  for (uint64_t second : pairs.counts) {
    for (uint64_t first : pairs.counts) {
      out.counts.push_back(expected_count(first, second, std::max<uint64_t>(total, 1)) / 2);
    }
  }
  return out;
}

// Pairs of pairs. A pair beside padding counts as padding, which the symbol of the most frequent
// codes stands for.
SymbolCounts count_quads(const CodeHistogram& h, Codebook codebook) {
  if (!h.quads_are_exact()) return expect_quads(h, std::move(codebook));
  const int32_t levels = codebook.levels, base = codebook.base;
  const int32_t fill = most_frequent(h, base, levels) - base;
  SymbolCounts out{std::move(codebook), {}, count_outside(h, base, levels)};
  uint64_t quads = 0;
  out.counts.resize(static_cast<size_t>(levels) * levels * levels * levels);
  for (size_t symbol = 0; symbol < out.counts.size(); ++symbol) {
    int32_t codes[4];
    size_t rest = symbol;
    for (int32_t& code : codes) {
      code = base + static_cast<int32_t>(rest % levels);
      rest /= levels;
    }
    quads += out.counts[symbol] = h.quad_count(codes);
  }
  const size_t all_fill = ((size_t(fill) * levels + fill) * levels + fill) * levels + fill;
  const uint64_t lookups = (static_cast<uint64_t>(h.total()) / 2 + h.padding_pairs()) / 2;
  out.counts[all_fill] += lookups - std::min(quads, lookups);
  return out;
}

// The code of the symbols that occur at least `rarest` times; the others become exceptions.
Result<Candidate> code_symbols(const SymbolCounts& symbols, int32_t max_length, uint64_t rarest) {
  const uint64_t total = sum_of(symbols.counts);
  uint64_t dropped = 0;
  std::vector<uint64_t> counts = symbols.counts;
  for (uint64_t& n : counts) {
    if (n < rarest) {
      dropped += n;
      n = 0;
    }
  }
  Candidate out{symbols.codebook};
  if (Status s = find_code_lengths(counts, max_length, &out.codebook.lengths); !s) return s;
  const auto& lengths = out.codebook.lengths;
  out.codebook.max_length = *std::max_element(lengths.begin(), lengths.end());
  uint64_t payload = 0;
  for (size_t s = 0; s < counts.size(); ++s) payload += counts[s] * lengths[s];
  auto bits = static_cast<double>(payload);
  // A symbol that replaces a dropped one is taken to have the mean length.
  if (total > dropped) bits *= static_cast<double>(total) / static_cast<double>(total - dropped);
  // The low nibbles, padding included.
  const uint64_t low_bits = out.codebook.mode == BlockMode::kSplit ? 8 * total : 0;
  const double fixed =
      static_cast<double>(low_bits) + 8.0 * static_cast<double>(codebook_bytes(out.codebook));
  out.price = bits + fixed + kExceptionPrice * static_cast<double>(symbols.outside + dropped);
  return out;
}

// The codes for one window of codes: with all symbols, or without those that are rarer than one in
// a share of the table.
void consider_codes(const SymbolCounts& symbols, int32_t max_length, Cheapest* best) {
  const uint64_t total = sum_of(symbols.counts);
  int64_t tried = -1;  // symbols of the last code
  for (const uint64_t share : kRarityShares) {
    const uint64_t rarest = std::max<uint64_t>(total / (share << max_length), 1);
    const int64_t kept = std::count_if(symbols.counts.begin(), symbols.counts.end(),
                                       [rarest](uint64_t n) { return n >= rarest; });
    if (kept == tried) continue;  // the same symbols as before
    tried = kept;
    best->consider(code_symbols(symbols, max_length, rarest));
  }
}

SymbolCounts count_symbols(const CodeHistogram& h, BlockMode mode, int32_t levels,
                           const CodebookSpec& spec) {
  Codebook c;
  c.component = h.component();
  c.mode = mode;
  c.table_id = spec.table_id;
  c.streams_per_lane = spec.streams_per_lane;
  c.levels = levels;
  c.base = best_base(h, levels);
  return mode == BlockMode::kSingle ? count_singles(h, std::move(c))
         : mode == BlockMode::kQuad ? count_quads(h, std::move(c))
                                    : count_pairs(h, std::move(c));
}

// The best number of levels for a mode: as many as there are codes where they fit, else the widest
// alphabet or a narrower one with more exceptions and fewer symbols.
Result<Candidate> best_of_mode(const CodeHistogram& h, BlockMode mode, const CodebookSpec& spec) {
  const int32_t range = std::clamp(h.max_code() - h.min_code() + 1, 2, 65536);
  const int32_t narrowest = symbol_shape(mode).least_levels;
  const int32_t widest = symbol_shape(mode).most_levels;
  Cheapest best;
  const int32_t enough = std::max(range, narrowest);
  for (const int32_t levels : {widest, 128, 96, 64, 48, 40, 28, 24, 20, 16, enough}) {
    if (levels < narrowest || levels > widest || levels > enough) continue;
    consider_codes(count_symbols(h, mode, levels, spec), spec.max_length, &best);
  }
  return best.take();
}

}  // namespace

Result<Codebook> build_codebook(const CodeHistogram& h, const CodebookSpec& spec) {
  const auto invalid = [](const std::string& message) {
    return Status(StatusCode::kInvalidArgument, "codebook spec: " + message);
  };
  if (spec.mode && is_raw_mode(*spec.mode)) return invalid("a raw mode has no codebook");
  if (spec.max_length < 8 || spec.max_length > kMaxCodeLength) {
    return invalid("max_length must be 8 to " + std::to_string(kMaxCodeLength));
  }
  if (spec.streams_per_lane != 1 && spec.streams_per_lane != 2) {
    return invalid("streams_per_lane must be 1 or 2");
  }
  std::optional<Candidate> best;
  // kSingle last: it must beat the others clearly.
  for (BlockMode mode :
       {BlockMode::kPair, BlockMode::kQuad, BlockMode::kSplit, BlockMode::kSingle}) {
    if (spec.mode && mode != *spec.mode) continue;
    Result<Candidate> candidate = best_of_mode(h, mode, spec);
    if (!candidate) return candidate.status();
    const double handicap = mode == BlockMode::kSingle && best ? 1 + kSingleMustSave : 1;
    if (!best || candidate->price * handicap < best->price) best = std::move(*candidate);
  }
  if (Status s = complete_codebook(&best->codebook); !s) return s;
  return std::move(best->codebook);
}

}  // namespace tierkv
