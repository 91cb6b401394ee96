// SPDX-License-Identifier: Apache-2.0
// Pages of any bytes in any format, and layouts that were tampered with: nothing may be read or
// written outside a page, nothing crash, and the fast codec must agree with the plain one. Formats,
// slots and operations are drawn from the input's first bytes; the rest are the page, over and
// over.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "codec/host/page_codec.h"

namespace {

using namespace tierkv;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

// Bytes of the input, endlessly.
class Source {
 public:
  Source(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return size_ == 0 ? 0 : data_[at_++ % size_]; }
  void fill(uint8_t* to, size_t n) {
    const size_t period = std::min(n, size_);
    if (size_ == 0 && n > 0) memset(to, 0, n);
    for (size_t i = 0; i < period; ++i) to[i] = byte();
    for (size_t done = period; period > 0 && done < n;) {  // what is there, doubled
      const size_t part = std::min(n - done, done);
      memcpy(to + done, to, part);
      done += part;
    }
  }
  int32_t below(int32_t n) { return byte() % n; }
  int32_t integer() {
    uint32_t v = 0;
    for (int i = 0; i < 4; ++i) v = v << 8 | byte();
    return static_cast<int32_t>(v);
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

ComponentFormat draw_component(Source* in, int32_t head_dim) {
  static constexpr int32_t kBits[] = {16, 8, 4, 2};
  ComponentFormat f = token_wise(kBits[in->below(4)]);
  const int32_t group = 16 * (1 + in->below(16));
  if (!f.is_raw() && head_dim % group == 0) f.group = group;
  return f;
}

// A page whose bytes end with its allocation, so that a sanitizer sees the first byte outside.
struct Page {
  Page(Source* in, int32_t head_dim) {
    const TierFormat format{draw_component(in, head_dim), draw_component(in, head_dim)};
    PageShape shape = *page_shape(format, head_dim);
    shape.tokens = kTileTokens * (1 + in->below(2));
    page.layout = page_layout(shape);
    page.raw_dtype = in->below(2) ? DType::kBFloat16 : DType::kFloat16;
    bytes.reset(new uint8_t[page.layout.used_bytes]);
    page.bytes = bytes.get();
    in->fill(bytes.get(), page.layout.used_bytes);
  }
  std::unique_ptr<uint8_t[]> bytes;
  HostPage page;
};

bool same_elements(const std::vector<uint8_t>& a, const std::vector<uint8_t>& b, DType dtype) {
  if (a == b) return true;
  for (size_t i = 0; i < a.size(); i += dtype_bytes(dtype)) {
    if (memcmp(a.data() + i, b.data() + i, dtype_bytes(dtype)) == 0) continue;
    float x[2] = {};
    const uint8_t* from[2] = {a.data() + i, b.data() + i};
    for (int s = 0; s < 2; ++s) {
      uint16_t half;
      memcpy(&half, from[s], 2);
      if (dtype == DType::kFloat32) memcpy(&x[s], from[s], 4);
      if (dtype == DType::kFloat16) x[s] = half_to_float(half);
      if (dtype == DType::kBFloat16) x[s] = bfloat16_to_float(half);
    }
    if (!std::isnan(x[0]) || !std::isnan(x[1])) return false;
  }
  return true;
}

void decode(Source* in, const HostPage& page) {
  static constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  TokenOutput out;
  out.dtype = kDTypes[in->below(3)];
  out.count = in->below(page.layout.tokens + 2);
  const int32_t first = in->below(page.layout.tokens + 2) - 1;
  const size_t bytes =
      static_cast<size_t>(out.count) * page.layout.head_dim() * dtype_bytes(out.dtype);
  std::vector<uint8_t> k[2], v[2];
  std::vector<float> scores(out.count);
  std::vector<int32_t> positions(out.count);
  out.scores = scores.data();
  out.positions = positions.data();
  Status status[2];
  for (int pass = 0; pass < 2; ++pass) {
    k[pass].assign(bytes, 0xee);
    v[pass].assign(bytes, 0xee);
    out.k = k[pass].data();
    out.v = v[pass].data();
    status[pass] =
        pass == 0 ? reference::decode_tokens(page, first, out) : decode_tokens(page, first, out);
  }
  const bool inside = first >= 0 && first + out.count <= page.layout.tokens;
  require(status[0].is_ok() == inside, "decode accepts exactly the slots of the page");
  require(status[0].code() == status[1].code(), "plain and fast decode differ in status");
  require(same_elements(k[0], k[1], out.dtype) && same_elements(v[0], v[1], out.dtype),
          "plain and fast decode differ");
}

// The input's bytes as tokens of any type, appended twice.
void append(Source* in, const HostPage& page) {
  static constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
  TokenBatch batch;
  batch.dtype = kDTypes[in->below(3)];
  batch.count = in->below(page.layout.tokens + 1);
  const int32_t used = in->below(page.layout.tokens + 1);
  const size_t bytes =
      static_cast<size_t>(batch.count) * page.layout.head_dim() * dtype_bytes(batch.dtype);
  std::vector<uint8_t> k(bytes), v(bytes);
  in->fill(k.data(), bytes);
  in->fill(v.data(), bytes);
  const std::vector<float> scores(batch.count, 0.5f);
  const std::vector<int32_t> positions(batch.count, 7);
  batch.k = k.data();
  batch.v = v.data();
  batch.scores = scores.data();
  batch.positions = positions.data();
  std::vector<uint8_t> twin(page.bytes, page.bytes + page.layout.used_bytes);
  HostPage other = page;
  other.bytes = twin.data();
  const Status plain = reference::append_tokens(other, used, batch),
               fast = append_tokens(page, used, batch);
  require(plain.code() == fast.code(), "plain and fast append differ in status");
  if (!plain) return;
  require(memcmp(page.bytes, twin.data(), twin.size()) == 0, "plain and fast append differ");
}

// One field of the layout set to anything: refused, or it was its value already.
void tamper(Source* in, HostPage page) {
  static_assert(sizeof(PageLayout) % 4 == 0);
  const size_t field = in->below(sizeof(PageLayout) / 4);
  int32_t was;
  memcpy(&was, reinterpret_cast<uint8_t*>(&page.layout) + 4 * field, 4);
  const int32_t value = in->integer();
  memcpy(reinterpret_cast<uint8_t*>(&page.layout) + 4 * field, &value, 4);
  require(decode_tokens(page, 0, {}).is_ok() == (value == was), "a tampered layout is refused");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
  Source in(data, size);
  const int32_t head_dim = kHeadDims[in.below(4)];
  const Page a(&in, head_dim);
  decode(&in, a.page);
  append(&in, a.page);
  tamper(&in, a.page);
  return 0;
}
