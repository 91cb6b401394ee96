// SPDX-License-Identifier: Apache-2.0
// Fixed-rate blocks: any bytes are refused or give fp16 numbers that are finite, and any finite
// numbers come back within their scales. The input draws the shape, the numbers and the damage.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "codec/format/fixed_block.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

using namespace tierkv;

void require(bool condition) {
  if (!condition) std::abort();
}

struct Shape {
  int32_t head_dim, bits;
  Component component;
};

// One tile of channels most of the time, now and then several slices.
Shape draw_shape(fuzz::Input* in) {
  const uint32_t dims = in->u16();
  Shape s;
  s.head_dim = 16 * (1 + static_cast<int32_t>(dims % (dims < 0xf000 ? 2 : 20)));
  s.bits = in->one_in(2) ? 8 : 4;
  s.component = static_cast<Component>(in->byte() % 2);
  return s;
}

// Every slice's checksum where its header leads to it.
void repair_checksums(const Shape& s, std::vector<uint8_t>* bytes) {
  size_t at = 0;
  for (int32_t first = 0; first < s.head_dim; first += kSliceDims) {
    const FixedBlockLayout slice =
        fixed_block_layout(s.bits, std::min(s.head_dim - first, kSliceDims));
    if (at + static_cast<size_t>(slice.bytes) > bytes->size()) return;
    store_u16(bytes->data() + at + 14, block_checksum_fast(bytes->data() + at, slice.bytes));
    at += static_cast<size_t>(slice.bytes);
  }
}

// Into memory that ends where the bytes do; what is refused leaves zeros.
bool decode(const std::vector<uint8_t>& bytes, const Shape& s, std::vector<uint16_t>* y) {
  const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
  y->assign(static_cast<size_t>(kBlockTokens) * s.head_dim, 0x7e00);
  const Status status = decode_fixed_block(exact.data(), static_cast<int64_t>(exact.size()),
                                           s.head_dim, s.component, s.bits, y->data());
  require(status.is_ok() || status.code() == StatusCode::kCorrupt);
  for (const uint16_t x : *y) require(status ? (x & 0x7c00) != 0x7c00 : x == 0);
  return status.is_ok();
}

// A token's numbers differ from its codes' by half a step, and by what fp16 takes from the scale
// and the zero point: 2^-11 of the largest number, once for the zero point, twice for the range,
// once for the number itself; in subnormal scales by up to 2^-25 a code.
void require_close(const Shape& s, const uint16_t* y, const uint16_t* back) {
  for (int32_t first = 0; first < s.head_dim; first += kSliceDims) {
    const int32_t end = std::min(s.head_dim, first + kSliceDims);
    double lo = half_to_float(y[first]), hi = lo;
    for (int32_t d = first; d < end; ++d) {
      lo = std::min<double>(lo, half_to_float(y[d]));
      hi = std::max<double>(hi, half_to_float(y[d]));
    }
    const double levels = (1 << s.bits) - 1, largest = std::max(std::fabs(lo), std::fabs(hi));
    const double bound =
        (hi - lo) / levels / 2 + 5 * 0x1p-11 * largest + levels * 0x1p-25 + 0x1p-23;
    for (int32_t d = first; d < end; ++d) {
      require(std::fabs(half_to_float(y[d]) - half_to_float(back[d])) <= bound);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::Input in(data, size);
  const uint32_t what = in.byte();
  const Shape shape = draw_shape(&in);
  std::vector<uint16_t> back;
  if (what % 4 == 0) {  // hostile bytes, of the right size if there are enough
    std::vector<uint8_t> bytes = in.rest();
    const size_t wanted =
        static_cast<size_t>(fixed_block_units(shape.bits, shape.head_dim)) * kBlockAlignment;
    if (what & 8) bytes.resize(wanted);
    if (what & 16) repair_checksums(shape, &bytes);
    decode(bytes, shape, &back);
    return 0;
  }
  struct {
    uint32_t at, flip;
  } damage[4];
  for (auto& d : damage) d = {in.u16(), in.byte()};
  const std::vector<uint8_t> drawn = in.rest();
  std::vector<uint16_t> y(static_cast<size_t>(kBlockTokens) * shape.head_dim);
  for (size_t i = 0; i + 1 < 2 * y.size() && !drawn.empty(); i += 2) {
    const uint32_t bits = drawn[i % drawn.size()] | drawn[(i + 1) % drawn.size()] << 8u;
    y[i / 2] = static_cast<uint16_t>((bits & 0x7c00) == 0x7c00 ? bits & 0xbfff : bits);
  }
  std::vector<uint8_t> bytes;
  encode_fixed_block(y.data(), shape.head_dim, shape.component, shape.bits, &bytes);
  if (what % 4 == 1) {
    require(decode(bytes, shape, &back));
    for (int32_t t = 0; t < kBlockTokens; ++t) {
      const int64_t at = int64_t{t} * shape.head_dim;
      require_close(shape, y.data() + at, back.data() + at);
    }
    return 0;
  }
  for (const auto& d : damage) bytes[d.at % bytes.size()] ^= static_cast<uint8_t>(d.flip);
  if (what % 4 == 3) repair_checksums(shape, &bytes);
  decode(bytes, shape, &back);
  return 0;
}
