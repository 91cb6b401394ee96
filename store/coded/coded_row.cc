#include "store/coded/coded_row.h"

#include <cstring>

#include "codec/format/element.h"

namespace tierkv {
namespace {

// Of a page, in the pool.
uint32_t first_unit(const CodedView& s, int32_t page) {
  return static_cast<uint32_t>(int64_t{page} * s.page_units());
}

}  // namespace

uint8_t* block_bytes(const CodedView& s, CodedBlockRef ref) {
  return s.pages.base + int64_t{ref.offset} * kBlockAlignment;
}

std::vector<uint16_t> half_values(const CodedTokens& tokens, int32_t head_dim) {
  std::vector<uint16_t> values;
  values.reserve(static_cast<size_t>(tokens.count) * head_dim);
  for (int64_t t = 0; t < tokens.count; ++t) {
    for (int32_t d = 0; d < head_dim; ++d) {
      const int64_t at = tokens.first + t * tokens.stride + d;
      values.push_back(float_to_half(load_element(tokens.x, tokens.dtype, at)));
    }
  }
  return values;
}

void put_raw_token(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                   int32_t position, const uint16_t* x) {
  uint8_t* page = s.raw_page(row, info, position);
  const int32_t slot = position % kBlockTokens;
  if (slot % kTileTokens == 0) {
    std::memset(page + raw_tile_byte(s.head_dim, c, slot), 0,
                static_cast<size_t>(TileLayout{kRawCodes, s.head_dim}.bytes()));
  }
  for (int32_t d = 0; d < s.head_dim; ++d) {
    std::memcpy(page + raw_value_byte(s.head_dim, c, slot, d), &x[d], sizeof(x[d]));
  }
}

void get_raw_token(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                   int32_t position, uint16_t* x) {
  const uint8_t* page = s.raw_page(row, info, position);
  for (int32_t d = 0; d < s.head_dim; ++d) {
    const int32_t at = raw_value_byte(s.head_dim, c, position % kBlockTokens, d);
    std::memcpy(&x[d], page + at, sizeof(x[d]));
  }
}

std::vector<float> prompt_means(const CodedView& s, int32_t row, const SequenceInfo& info,
                                Component c) {
  std::vector<int64_t> sums(s.head_dim);
  std::vector<uint16_t> x(s.head_dim);
  for (int32_t p = 0; p < info.num_tokens; ++p) {
    get_raw_token(s, row, info, c, p, x.data());
    for (int32_t d = 0; d < s.head_dim; ++d) sums[d] += half_to_fixed(x[d]);
  }
  std::vector<float> means(s.head_dim);
  for (int32_t d = 0; d < s.head_dim && info.num_tokens > 0; ++d) {
    means[d] = fixed_mean(sums[d], info.num_tokens);
  }
  return means;
}

ValueRange prompt_range(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                        const float* mean) {
  std::vector<uint16_t> x(s.head_dim);
  ValueRange range;
  for (int32_t p = 0; p < info.num_tokens; ++p) {
    get_raw_token(s, row, info, c, p, x.data());
    for (int32_t d = 0; d < s.head_dim; ++d) range.add(centred(x[d], mean[d]));
  }
  return range;
}

void raw_block_values(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                      int32_t block, const float* mean, uint16_t* y) {
  for (int32_t t = 0; t < kBlockTokens; ++t, y += s.head_dim) {
    get_raw_token(s, row, info, c, block * kBlockTokens + t, y);
    if (info.window_origin != kInPrompt) continue;
    for (int32_t d = 0; d < s.head_dim; ++d) y[d] = centred(y[d], mean[d]);
  }
}

Status raw_block_codes(const CodedView& s, int32_t row, const SequenceInfo& info, Component c,
                       int32_t block, const RowBasis& basis, int16_t* codes) {
  std::vector<uint16_t> y(static_cast<size_t>(kBlockTokens) * s.head_dim);
  raw_block_values(s, row, info, c, block, basis.mean, y.data());
  for (size_t i = 0; i < y.size(); ++i) {
    if (check_centred(y[i], basis.step) != StatusCode::kOk) {
      return Status(StatusCode::kOutOfRange, "a value without its mean, or its code");
    }
    codes[i] = step_code(y[i], basis.step);
  }
  return Status::ok();
}

int32_t end_of_blocks(const CodedView& s, int32_t end, const PendingBlocks& blocks) {
  for (const uint32_t units : blocks.units) {
    const auto n = static_cast<int32_t>(units);
    end = block_begin(end, n, s.page_units()) + n;
  }
  return end;
}

void write_blocks(const CodedView& s, int32_t row, int32_t first_block, int32_t end,
                  const PendingBlocks& blocks) {
  const uint8_t* from = blocks.bytes.data();
  for (size_t i = 0; i < blocks.units.size(); ++i) {
    const auto units = static_cast<int32_t>(blocks.units[i]);
    const int32_t begin = block_begin(end, units, s.page_units());
    const int32_t page = s.page_id(row, kCodedSide, begin / s.page_units());
    const CodedBlockRef ref = {first_unit(s, page) + static_cast<uint32_t>(begin % s.page_units()),
                               blocks.units[i]};
    const size_t bytes = size_t{ref.units} * kBlockAlignment;
    std::memcpy(block_bytes(s, ref), from, bytes);
    s.blocks(i % 2 == 0 ? Component::kKey : Component::kValue, row)[first_block + i / 2] = ref;
    from += bytes;
    end = begin + units;
  }
}

int32_t units_of_blocks(const CodedView& s, int32_t row, int32_t blocks) {
  if (blocks == 0) return 0;
  const CodedBlockRef last = s.blocks(Component::kValue, row)[blocks - 1];
  const auto units = static_cast<uint32_t>(s.page_units());
  const auto page = static_cast<int32_t>(last.offset / units);
  int32_t index = 0;
  while (s.page_id(row, kCodedSide, index) != page) ++index;
  return index * s.page_units() + static_cast<int32_t>(last.offset % units + last.units);
}

void move_blocks(const CodedView& s, int32_t row, int32_t blocks, int32_t from, int32_t to) {
  const uint32_t first = first_unit(s, from), units = static_cast<uint32_t>(s.page_units());
  for (const Component c : {Component::kKey, Component::kValue}) {
    for (int32_t b = 0; b < blocks; ++b) {
      CodedBlockRef& ref = s.blocks(c, row)[b];
      if (ref.offset >= first && ref.offset - first < units) {
        ref.offset = first_unit(s, to) + (ref.offset - first);
      }
    }
  }
}

Status read_block(const CodedView& s, const CodedBooks& books, int32_t row, Component c,
                  int32_t block, int16_t* codes) {
  const CodedBlockRef ref = s.blocks(c, row)[block];
  return books.decode(block_bytes(s, ref), int64_t{ref.units} * kBlockAlignment, s.head_dim,
                      s.layer_of(row), c, codes);
}

}  // namespace tierkv
