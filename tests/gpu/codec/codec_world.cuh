// Worlds of pages for the tests of the page kernels: rows of random tokens dealt to pages, on the
// host and in device memory, and the comparison of both after a call.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "codec/gpu/pages/page_batch.h"
#include "tests/gpu/codec/host_pages.h"
#include "tests/gpu/device_array.cuh"
#include "tests/support/page_fixture.h"

namespace tierkv::test {

inline constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
inline constexpr int32_t kBits[] = {16, 8, 4, 2};
inline constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};
inline constexpr uint8_t kPoison = 0xa5;

struct alignas(kPageAlignment) PoolBlock {
  uint8_t bytes[kPageAlignment];
};

// Rows of random tokens, dealt at random to pages of random formats, some of them in use.
struct CodecWorld {
  DType dtype = DType::kFloat16;
  int32_t head_dim = 0, num_rows = 0;
  int64_t token_stride = 0, page_bytes = 0;
  PageFormats formats;
  std::vector<uint8_t> k, v;  // elements of dtype
  std::vector<PoolBlock> pool;
  std::vector<float> scores;
  std::vector<int32_t> positions, order;
  std::vector<PageJob> jobs;
  std::vector<PageRecord> records;
  std::vector<StatusCode> status;

  // With the arrays where `f` says they are: on the host or on the device.
  template <class Find>
  PageBatch batch(Find&& find) {
    PageBatch b;
    b.pool = {find(pool)->bytes, find(records), page_bytes, static_cast<int32_t>(records.size())};
    b.formats = formats;
    b.jobs = find(jobs);
    b.order = find(order);
    b.status = find(status);
    b.token_stride = token_stride;
    b.num_jobs = static_cast<int32_t>(jobs.size());
    b.num_rows = num_rows;
    b.dtype = dtype;
    return b;
  }
  uint8_t* pool_bytes() { return pool[0].bytes; }
  HostPage page(const PageJob& job) {
    return {pool_bytes() + job.page * page_bytes,
            formats.layout[job.format],
            formats.raw_dtype,
            {formats.rule[job.format][0], formats.rule[job.format][1]}};
  }
  void set_element(std::vector<uint8_t>* x, int64_t i, float value) const {
    if (dtype == DType::kFloat32) {
      memcpy(x->data() + 4 * i, &value, 4);
    } else {
      const uint16_t bits =
          dtype == DType::kFloat16 ? float_to_half(value) : float_to_bfloat16(value);
      memcpy(x->data() + 2 * i, &bits, 2);
    }
  }
};

// Everything of a world in device memory.
struct DeviceWorld {
  DeviceArray<PoolBlock> pool;
  DeviceArray<uint8_t> k, v;
  DeviceArray<PageRecord> records;
  DeviceArray<PageJob> jobs;
  DeviceArray<int32_t> order, positions;
  DeviceArray<StatusCode> status;
  DeviceArray<float> scores;
  PageBatch batch;

  explicit DeviceWorld(CodecWorld& w)
      : pool(w.pool),
        k(w.k),
        v(w.v),
        records(w.records),
        jobs(w.jobs),
        order(w.order),
        positions(w.positions),
        status(w.status),
        scores(w.scores) {
    batch = w.batch([](auto& x) { return x.data(); });
    batch.pool.base = pool.get()->bytes;
    batch.pool.records = records.get();
    batch.jobs = jobs.get();
    batch.order = order.get();
    batch.status = status.get();
  }
  PageEncode encode() const { return {batch, k.get(), v.get(), scores.get(), positions.get()}; }
  PageDecode decode() const { return {batch, k.get(), v.get(), scores.get(), positions.get()}; }
};

inline PageEncode host_encode(CodecWorld& w) {
  return {w.batch([](auto& x) { return x.data(); }), w.k.data(), w.v.data(), w.scores.data(),
          w.positions.data()};
}
inline PageDecode host_decode(CodecWorld& w) {
  return {w.batch([](auto& x) { return x.data(); }), w.k.data(), w.v.data(), w.scores.data(),
          w.positions.data()};
}

struct WorldOptions {
  int32_t head_dim = 128;
  DType dtype = DType::kFloat16;
  DType raw_dtype = DType::kFloat16;
  std::vector<TierFormat> formats;
  std::vector<int32_t> row_tokens;
  int32_t page_tokens = 48;  // of the first format
  bool continues_pages = true;
};

class CodecWorldTest : public PageFixture {
 protected:
  CodecWorld make_world(const WorldOptions& o) {
    CodecWorld w;
    w.dtype = o.dtype;
    w.head_dim = o.head_dim;
    w.num_rows = static_cast<int32_t>(o.row_tokens.size());
    w.token_stride = o.head_dim + 8 * uniform(0, 2);
    make_formats(o, &w);
    int64_t elements = 0, scalars = 0;
    for (int32_t row = 0; row < w.num_rows; ++row) {
      add_row(o, row, elements, scalars, &w);
      elements += o.row_tokens[row] * w.token_stride;
      scalars += o.row_tokens[row];
    }
    fill_pages(&w);
    w.status.assign(w.num_rows, StatusCode::kOk);
    return w;
  }

  void encode_and_compare(CodecWorld* w) {
    const DeviceWorld device(*w);
    const Status on_device = encode_pages(device.encode(), nullptr);
    ASSERT_TRUE(on_device) << on_device.message();
    ASSERT_TRUE(encode_pages_host(host_encode(*w)));
    EXPECT_EQ(device.status.read(), w->status);
    const std::vector<PoolBlock> pool = device.pool.read();
    const uint8_t *got = pool[0].bytes, *want = w->pool_bytes();
    const uint8_t* end = got + pool.size() * kPageAlignment;
    const int64_t at = std::mismatch(got, end, want).first - got;
    ASSERT_EQ(got + at, end) << "byte " << at % w->page_bytes << " of page " << at / w->page_bytes;
  }

  void decode_and_compare(CodecWorld* w, DType dtype) {
    w->dtype = dtype;
    w->token_stride = (w->token_stride + 7) / 8 * 8;
    const size_t bytes = w->scores.size() * w->token_stride * dtype_bytes(dtype);
    for (PageJob& job : w->jobs) job.input = job.scalars * w->token_stride;
    w->k.assign(bytes, kPoison);
    w->v.assign(bytes, kPoison);
    std::fill(w->scores.begin(), w->scores.end(), -7.0f);
    std::fill(w->positions.begin(), w->positions.end(), -7);
    const DeviceWorld device(*w);
    ASSERT_TRUE(decode_pages(device.decode(), nullptr));
    ASSERT_TRUE(decode_pages_host(host_decode(*w)));
    EXPECT_EQ(device.status.read(), w->status);
    EXPECT_TRUE(device.k.read() == w->k);
    EXPECT_TRUE(device.v.read() == w->v);
    EXPECT_TRUE(device.scores.read() == w->scores);
    EXPECT_TRUE(device.positions.read() == w->positions);
  }

  // Rows of every awkward length.
  std::vector<int32_t> ragged() {
    std::vector<int32_t> lengths = {0, 1, 15, 16, 17, 48, 49, uniform(50, 400)};
    std::shuffle(lengths.begin(), lengths.end(), rng_);
    return lengths;
  }

 private:
  void make_formats(const WorldOptions& o, CodecWorld* w) {
    w->formats.raw_dtype = o.raw_dtype;
    const PageLayout first = layout_of(o.formats[0], o.head_dim, o.page_tokens);
    w->page_bytes = (first.used_bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
    for (const TierFormat& format : o.formats) {
      const PageShape shape = *page_shape(format, o.head_dim);
      const int32_t tile = page_tile_bytes(shape);
      w->page_bytes = std::max<int64_t>(
          w->page_bytes, (tile + kPageAlignment - 1) / kPageAlignment * kPageAlignment);
    }
    for (const TierFormat& format : o.formats) {
      w->formats.rule[w->formats.count][0] = format.k.step_rule;
      w->formats.rule[w->formats.count][1] = format.v.step_rule;
      w->formats.layout[w->formats.count++] = *make_page_layout(format, o.head_dim, w->page_bytes);
    }
  }

  // The row's tokens in random order, cut into jobs.
  void add_row(const WorldOptions& o, int32_t row, int64_t elements, int64_t scalars,
               CodecWorld* w) {
    const int32_t n = o.row_tokens[row];
    const RandomTokens t = random_tokens(n, o.head_dim, o.dtype);
    const int32_t bytes = dtype_bytes(o.dtype);
    w->k.resize((elements + n * w->token_stride) * bytes, kPoison);
    w->v.resize(w->k.size(), kPoison);
    const TokenBatch b = t.batch(0, n);
    for (int32_t i = 0; i < n; ++i) {
      const int64_t at = (elements + i * w->token_stride) * bytes, from = int64_t{i} * o.head_dim;
      memcpy(w->k.data() + at, static_cast<const uint8_t*>(b.k) + from * bytes, o.head_dim * bytes);
      memcpy(w->v.data() + at, static_cast<const uint8_t*>(b.v) + from * bytes, o.head_dim * bytes);
    }
    w->scores.insert(w->scores.end(), t.scores.begin(), t.scores.end());
    w->positions.insert(w->positions.end(), t.positions.begin(), t.positions.end());
    const auto first = static_cast<int64_t>(w->order.size());
    for (int32_t i = 0; i < n; ++i) w->order.push_back(i);
    std::shuffle(w->order.begin() + first, w->order.end(), rng_);
    for (int32_t done = 0; done < n || n == 0;) {
      PageJob job;
      job.input = elements;
      job.scalars = scalars;
      job.first = first + done;
      job.page = static_cast<int32_t>(w->jobs.size());
      job.format = uniform(0, w->formats.count - 1);
      job.row = row;
      const int32_t room = w->formats.layout[job.format].tokens;
      if (o.continues_pages && uniform(0, 1) == 1) job.first_slot = uniform(0, room - 1);
      job.count = std::min(n - done, room - job.first_slot);
      if (uniform(0, 3) == 0 && job.count > 1) job.count = uniform(1, job.count);
      done += job.count;
      w->jobs.push_back(job);
      if (n == 0) return;
    }
  }

  // Poison, then the tokens of pages in use.
  void fill_pages(CodecWorld* w) {
    const size_t pages = w->jobs.size() + 1;
    w->records.assign(pages, kEmptyPageRecord);
    w->pool.resize(pages * w->page_bytes / kPageAlignment);
    for (int64_t i = 0; i < static_cast<int64_t>(pages) * w->page_bytes; ++i) {
      w->pool_bytes()[i] = static_cast<uint8_t>(rng_());
    }
    for (const PageJob& job : w->jobs) {
      if (job.first_slot == 0) continue;
      const RandomTokens t = random_tokens(job.first_slot, w->head_dim);
      ASSERT_TRUE(append_tokens(w->page(job), 0, t.batch(0, job.first_slot)));
    }
  }
};

}  // namespace tierkv::test
