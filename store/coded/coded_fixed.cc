#include "store/coded/coded_fixed.h"

#include <algorithm>
#include <cstring>

#include "store/coded/coded_values.h"

namespace tierkv {

void set_raw_score(const CodedView& s, int32_t row, const SequenceInfo& info, int32_t position,
                   float significance) {
  uint8_t* page = s.raw_page(row, info, position);
  std::memcpy(page + raw_score_byte(s.head_dim, position % kBlockTokens), &significance,
              sizeof(significance));
}

bool becomes_fixed(const CodedView& s, int32_t row, const SequenceInfo& info, int32_t block) {
  const int32_t first = block * kBlockTokens;
  if (!s.fixed.format.any()) return false;
  if (info.window_origin != kInPrompt) return s.fixed.takes(first, 0.0f);
  const uint8_t* page = s.raw_page(row, info, first);
  for (int32_t slot = 0; slot < kBlockTokens; ++slot) {
    float significance;
    std::memcpy(&significance, page + raw_score_byte(s.head_dim, slot), sizeof(significance));
    if (s.fixed.takes(first + slot, significance)) return true;
  }
  return false;
}

void encode_fixed(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                  int32_t block, const float* mean, std::vector<uint8_t>* out) {
  std::vector<uint16_t> y(static_cast<size_t>(kBlockTokens) * s.head_dim);
  raw_block_values(s, row, info, c, block, mean, y.data());
  encode_fixed_block(y.data(), s.head_dim, c, s.fixed.format.bits(c), out);
}

bool is_fixed_block(const CodedView& s, int32_t row, int32_t block) {
  if (!s.fixed.format.any()) return false;
  return is_fixed_block(block_bytes(s, s.blocks(Component::kKey, row)[block]));
}

int32_t fixed_blocks(const CodedView& s, int32_t row, int32_t blocks) {
  int32_t count = 0;
  for (int32_t b = 0; b < blocks; ++b) count += is_fixed_block(s, row, b);
  return count;
}

Status read_block_values(const CodedView& s, const CodedBooks& books, int32_t row, Component c,
                         int32_t block, uint16_t* y) {
  if (is_fixed_block(s, row, block)) {
    const CodedBlockRef ref = s.blocks(c, row)[block];
    return decode_fixed_block(block_bytes(s, ref), int64_t{ref.units} * kBlockAlignment, s.head_dim,
                              c, s.fixed.format.bits(c), y);
  }
  std::vector<int16_t> codes(static_cast<size_t>(kBlockTokens) * s.head_dim);
  Status read = read_block(s, books, row, c, block, codes.data());
  std::transform(codes.begin(), codes.end(), y,
                 [step = s.step(c, row)](int16_t code) { return coded_value(code, step); });
  return read;
}

}  // namespace tierkv
