// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/baselines/fse.h"

#include <algorithm>
#include <bit>

namespace tierkv::analysis {
namespace {

int32_t high_bit(uint32_t x) {
  return std::bit_width(x) - 1;
}

// Bits in the order written; read from the end back.
class BitWriter {
 public:
  explicit BitWriter(std::vector<uint8_t>* out) : out_(*out) {}
  void put(uint32_t value, int32_t bits) {
    held_ |= static_cast<uint64_t>(value & ((1u << bits) - 1)) << count_;
    count_ += bits;
    for (; count_ >= 8; count_ -= 8, held_ >>= 8) out_.push_back(static_cast<uint8_t>(held_));
  }
  // A one behind the last bit, so that the end can be found.
  void finish() {
    put(1, 1);
    if (count_ > 0) out_.push_back(static_cast<uint8_t>(held_));
  }

 private:
  std::vector<uint8_t>& out_;
  uint64_t held_ = 0;
  int32_t count_ = 0;
};

class BackwardReader {
 public:
  BackwardReader(const uint8_t* bytes, int64_t size) : bytes_(bytes) {
    if (size > 0 && bytes[size - 1] != 0) left_ = 8 * (size - 1) + high_bit(bytes[size - 1]);
  }
  bool get(int32_t bits, uint32_t* value) {
    if (left_ < bits) return false;
    left_ -= bits;
    *value = 0;
    for (int64_t i = bits; i-- > 0;) {
      const int64_t at = left_ + i;
      *value = *value << 1 | (bytes_[at / 8] >> (at % 8) & 1u);
    }
    return true;
  }
  bool at_start() const { return left_ == 0; }

 private:
  const uint8_t* bytes_;
  int64_t left_ = -1;  // bits not yet read; -1: no end was found
};

}  // namespace

FseCoder::FseCoder(const CodeHistogram& histogram) {
  choose_alphabet(histogram);
  std::vector<uint64_t> occurrences(counts_.size());
  uint64_t inside = 0;
  for (int32_t s = 0; s < escape(); ++s) {
    occurrences[s] = histogram.count(base_ + s);
    inside += occurrences[s];
  }
  occurrences[escape()] = static_cast<uint64_t>(histogram.total()) - inside;
  normalize(occurrences);
  build_states();
}

void FseCoder::choose_alphabet(const CodeHistogram& histogram) {
  const int32_t first = histogram.min_code(), last = histogram.max_code();
  const int32_t levels = std::min(last - first + 1, kMaxLevels);
  uint64_t inside = 0;
  for (int32_t code = first; code < first + levels; ++code) inside += histogram.count(code);
  uint64_t best = inside;
  base_ = first;
  for (int32_t code = first + levels; code <= last; ++code) {
    inside += histogram.count(code) - histogram.count(code - levels);
    if (inside <= best) continue;
    best = inside;
    base_ = code - levels + 1;
  }
  counts_.assign(levels + 1, 0);
}

// In proportion, one at least for every symbol that occurs and for the escape; what rounding leaves
// over or takes too much of is settled with the most frequent ones.
void FseCoder::normalize(const std::vector<uint64_t>& occurrences) {
  uint64_t total = 0;
  for (const uint64_t n : occurrences) total += n;
  const auto size = int64_t{1} << kLog;
  int64_t used = 0;
  for (size_t s = 0; s < counts_.size(); ++s) {
    if (occurrences[s] == 0 && static_cast<int32_t>(s) != escape()) continue;
    const double share = static_cast<double>(occurrences[s]) / static_cast<double>(total);
    counts_[s] = std::max(1u, static_cast<uint32_t>(share * static_cast<double>(size)));
    used += counts_[s];
  }
  while (used != size) {
    const auto most = std::max_element(counts_.begin(), counts_.end());
    const int64_t change =
        used < size ? size - used : -std::min<int64_t>(used - size, (*most + 1) / 2);
    *most += static_cast<uint32_t>(change);
    used += change;
  }
}

void FseCoder::build_states() {
  const uint32_t size = 1u << kLog, mask = size - 1;
  std::vector<uint16_t> spread(size);
  uint32_t place = 0;
  for (size_t s = 0; s < counts_.size(); ++s) {
    for (uint32_t i = 0; i < counts_[s]; ++i) {
      spread[place] = static_cast<uint16_t>(s);
      place = (place + (size >> 1) + (size >> 3) + 3) & mask;
    }
  }
  std::vector<uint32_t> start(counts_.size() + 1, 0), seen = counts_;
  for (size_t s = 0; s < counts_.size(); ++s) start[s + 1] = start[s] + counts_[s];
  next_.resize(size);
  states_.resize(size);
  std::vector<uint32_t> filled(start.begin(), start.end() - 1);
  for (uint32_t state = 0; state < size; ++state) {
    const uint16_t s = spread[state];
    next_[filled[s]++] = static_cast<uint16_t>(size + state);
    const uint32_t x = seen[s]++;
    const int32_t bits = kLog - high_bit(x);
    states_[state] = {s, static_cast<uint8_t>(bits), static_cast<uint16_t>((x << bits) - size)};
  }
  steps_.resize(counts_.size());
  for (size_t s = 0; s < counts_.size(); ++s) {
    const uint32_t n = counts_[s];
    if (n == 0) continue;
    const int32_t most = n == 1 ? kLog : kLog - high_bit(n - 1);
    steps_[s] = {(static_cast<uint32_t>(most) << 16) - (n << most),
                 static_cast<int32_t>(start[s]) - static_cast<int32_t>(n)};
  }
}

StatusCode FseCoder::encode(const int16_t* codes, int32_t tokens, int32_t head_dim,
                            std::vector<uint8_t>* out) const {
  const int32_t count = tokens * head_dim;
  std::vector<int16_t> escaped;
  for (int32_t i = 0; i < count; ++i) {
    if (symbol_of(codes[i]) == escape()) escaped.push_back(codes[i]);
  }
  const auto put16 = [&](uint32_t x) {
    out->push_back(static_cast<uint8_t>(x));
    out->push_back(static_cast<uint8_t>(x >> 8));
  };
  put16(static_cast<uint32_t>(escaped.size() & 0xffff));
  put16(static_cast<uint32_t>(escaped.size() >> 16));
  for (const int16_t code : escaped) put16(static_cast<uint16_t>(code));
  BitWriter writer(out);
  const uint32_t size = 1u << kLog;
  uint32_t state = size;
  for (int32_t i = count; i-- > 0;) {  // the decoder reads backwards
    const Step& step = steps_[symbol_of(codes[i])];
    const auto bits = static_cast<int32_t>((state + step.bits_minus) >> 16);
    writer.put(state, bits);
    state = next_[static_cast<int32_t>(state >> bits) + step.next_base];
  }
  writer.put(state, kLog);
  writer.finish();
  return StatusCode::kOk;
}

StatusCode FseCoder::decode(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                            int16_t* codes) const {
  const int32_t count = tokens * head_dim;
  if (size < 4) return StatusCode::kCorrupt;
  const int64_t escapes =
      bytes[0] | bytes[1] << 8 | bytes[2] << 16 | static_cast<int64_t>(bytes[3]) << 24;
  if (escapes > count || size < 4 + 2 * escapes) return StatusCode::kCorrupt;
  const uint8_t* raw = bytes + 4;
  BackwardReader reader(raw + 2 * escapes, size - 4 - 2 * escapes);
  uint32_t state = 0, read = 0;
  int64_t used = 0;
  if (!reader.get(kLog, &state)) return StatusCode::kCorrupt;
  for (int32_t i = 0; i < count; ++i) {
    const State& s = states_[state];
    if (s.symbol == escape()) {
      if (used == escapes) return StatusCode::kCorrupt;
      codes[i] = static_cast<int16_t>(raw[2 * used] | raw[2 * used + 1] << 8);
      ++used;
    } else {
      codes[i] = static_cast<int16_t>(base_ + s.symbol);
    }
    if (!reader.get(s.bits, &read)) return StatusCode::kCorrupt;
    state = s.base + read;
  }
  return used == escapes && state == 0 && reader.at_start() ? StatusCode::kOk
                                                            : StatusCode::kCorrupt;
}

}  // namespace tierkv::analysis
