// The kernels of codec/ against the host, byte for byte. Tests named Small* are small enough for
// compute-sanitizer.
#include <cmath>
#include <functional>

#include "tests/gpu/codec/codec_world.cuh"

namespace tierkv {
namespace {

using test::CodecWorld;
using test::DeviceArray;
using test::DeviceWorld;
using test::encode_pages_host;
using test::host_encode;
using test::kBits;
using test::kDTypes;
using test::kHeadDims;
using test::PoolBlock;
using test::WorldOptions;

class GpuCodec : public test::CodecWorldTest {};

TEST_F(GpuCodec, SmallPagesAreTheHosts) {
  for (const DType dtype : kDTypes) {
    WorldOptions o;
    o.head_dim = 96;
    o.dtype = dtype;
    o.formats = {token_wise_tier(8, 4), {token_wise(4, 16), token_wise(2, 48)}, raw_tier()};
    o.row_tokens = {0, 1, 17, 100};
    CodecWorld w = make_world(o);
    encode_and_compare(&w);
    decode_and_compare(&w, DType::kFloat16);
    if (HasFailure()) return;
  }
}

TEST_F(GpuCodec, PagesOfEveryFormatAreTheHosts) {
  for (const int32_t head_dim : kHeadDims) {
    for (const int32_t k_bits : kBits) {
      for (const int32_t v_bits : kBits) {
        WorldOptions o;
        o.head_dim = head_dim;
        o.dtype = kDTypes[uniform(0, 2)];
        o.raw_dtype = o.dtype == DType::kBFloat16 ? DType::kBFloat16 : kDTypes[uniform(0, 1)];
        o.formats = {token_wise_tier(k_bits, v_bits)};
        o.row_tokens = ragged();
        SCOPED_TRACE(testing::Message() << "d " << head_dim << " k" << k_bits << "v" << v_bits
                                        << " dtype " << static_cast<int>(o.dtype));
        CodecWorld w = make_world(o);
        encode_and_compare(&w);
        decode_and_compare(&w, kDTypes[uniform(0, 2)]);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(GpuCodec, PagesOfSubGroupsAndMixedFormatsAreTheHosts) {
  for (const int32_t head_dim : kHeadDims) {
    for (const int32_t k_group : {16, 32, head_dim / 2, 0}) {
      for (const int32_t v_group : {16, head_dim / 2}) {
        WorldOptions o;
        o.head_dim = head_dim;
        o.dtype = kDTypes[uniform(0, 2)];
        for (int32_t i = 0; i < kMaxPageFormats; ++i) {
          o.formats.push_back({token_wise(kBits[uniform(1, 3)], k_group),
                               token_wise(kBits[uniform(1, 3)], v_group)});
        }
        o.row_tokens = ragged();
        SCOPED_TRACE(testing::Message() << "d " << head_dim << " groups " << k_group << ", "
                                        << v_group << " dtype " << static_cast<int>(o.dtype));
        CodecWorld w = make_world(o);
        encode_and_compare(&w);
        decode_and_compare(&w, DType::kFloat32);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(GpuCodec, SmallCodesClippedAtTheNormAreTheHosts) {
  for (const int32_t head_dim : kHeadDims) {
    for (const DType dtype : kDTypes) {
      for (const int32_t group : {0, 16, head_dim / 2}) {
        WorldOptions o;
        o.head_dim = head_dim;
        o.dtype = dtype;
        o.formats = {{norm_clipped(group), norm_clipped(group)},
                     {token_wise(4), norm_clipped(group)},
                     {norm_clipped(group), token_wise(2, group)},
                     token_wise_tier(8, 4)};
        o.row_tokens = ragged();
        SCOPED_TRACE(testing::Message() << "d " << head_dim << " group " << group << " dtype "
                                        << static_cast<int>(o.dtype));
        CodecWorld w = make_world(o);
        encode_and_compare(&w);
        decode_and_compare(&w, DType::kFloat32);
        if (HasFailure()) return;
      }
    }
  }
}

// Values at which a quotient could round wrongly, and constant groups, at every magnitude.
TEST_F(GpuCodec, TiesAndConstantsAreTheHosts) {
  for (const DType dtype : kDTypes) {
    WorldOptions o;
    o.dtype = dtype;
    o.formats = {token_wise_tier(8, 4), token_wise_tier(4, 2)};
    o.row_tokens = {5000};
    o.continues_pages = false;
    CodecWorld w = make_world(o);
    for (int32_t token = 0; token < 5000; ++token) {
      const float unit = std::ldexp(1.0f, uniform(-20, 5)) * uniform(1, 3);
      const int32_t top = uniform(0, 3) == 0 ? 0 : 255 * 2;
      for (int32_t d = 0; d < o.head_dim; ++d) {
        const int64_t at = token * w.token_stride + d;
        w.set_element(&w.k, at, unit * static_cast<float>(uniform(0, top)) - 3 * unit);
        w.set_element(&w.v, at, unit * static_cast<float>(uniform(0, top / 17)));
      }
    }
    encode_and_compare(&w);
    if (HasFailure()) return;
  }
}

// One bad token a row: the host's status, other rows as if nothing were wrong, and the slots in use
// before as they were.
TEST_F(GpuCodec, SmallBadTokensAreReported) {
  WorldOptions o;
  o.dtype = DType::kFloat32;
  o.formats = {token_wise_tier(8, 4), {token_wise(16), token_wise(4)}};
  o.row_tokens.assign(9, 40);
  CodecWorld w = make_world(o);
  const auto element = [&](int32_t row, int32_t token) {
    return (row * 40 + token) * w.token_stride + uniform(0, 127);
  };
  w.set_element(&w.k, element(1, uniform(0, 39)), NAN);
  w.set_element(&w.v, element(2, uniform(0, 39)), -INFINITY);
  w.set_element(&w.v, element(3, uniform(0, 39)), 1e9f);
  w.scores[4 * 40 + uniform(0, 39)] = INFINITY;
  w.positions[5 * 40 + uniform(0, 39)] = -1;
  w.order[6 * 40 + uniform(0, 39)] = -3;
  w.set_element(&w.k, element(7, uniform(0, 39)), NAN);
  w.set_element(&w.v, element(7, uniform(0, 39)), 1e9f);
  w.set_element(&w.k, element(8, uniform(0, 39)), INFINITY);
  const CodecWorld before = w;
  const DeviceWorld device(w);
  ASSERT_TRUE(encode_pages(device.encode(), nullptr));
  ASSERT_TRUE(encode_pages_host(host_encode(w)));
  const auto bad = StatusCode::kInvalidArgument, infinite = StatusCode::kNonFinite;
  const std::vector<StatusCode> expected = {
      StatusCode::kOk,         infinite, infinite, StatusCode::kOutOfRange, infinite, bad, bad,
      StatusCode::kOutOfRange, infinite};
  EXPECT_EQ(device.status.read(), expected);
  EXPECT_EQ(w.status, expected);
  CodecWorld got = w;
  got.pool = device.pool.read();
  CodecWorld old = before;
  for (const PageJob& job : w.jobs) {
    const bool is_good = expected[job.row] == StatusCode::kOk;
    const int32_t slots = is_good ? job.first_slot + job.count : job.first_slot;
    CodecWorld& want = is_good ? w : old;
    if (slots == 0) continue;
    const Decoded a = decode_all(got.page(job), slots), b = decode_all(want.page(job), slots);
    EXPECT_EQ(a.k, b.k);
    EXPECT_EQ(a.v, b.v);
    EXPECT_EQ(a.scores, b.scores);
    EXPECT_EQ(a.positions, b.positions);
  }
}

// Jobs that name what is not there do nothing but report.
TEST_F(GpuCodec, SmallBadJobsAreReported) {
  WorldOptions o;
  o.formats = {token_wise_tier(8, 4)};
  o.row_tokens = {20};
  o.continues_pages = false;
  const auto expect_refused = [&](const std::function<void(PageJob*)>& spoil) {
    CodecWorld w = make_world(o);
    w.jobs.resize(1);
    spoil(&w.jobs[0]);
    encode_and_compare(&w);
    EXPECT_EQ(w.status[0], StatusCode::kInvalidArgument);
  };
  expect_refused([](PageJob* job) { job->page = -1; });
  expect_refused([](PageJob* job) { job->page = 1 << 20; });
  expect_refused([](PageJob* job) { job->format = 1; });
  expect_refused([](PageJob* job) { job->format = -1; });
  expect_refused([](PageJob* job) { job->row = 7; });
  expect_refused([](PageJob* job) { job->first_slot = -16; });
  expect_refused([](PageJob* job) { job->count = INT32_MAX; });
  expect_refused([](PageJob* job) { job->first_slot = INT32_MAX; });
  expect_refused([](PageJob* job) { job->input = 3; });
  expect_refused([](PageJob* job) { job->scalars = -1; });
}

TEST_F(GpuCodec, BadCallsAreRefused) {
  WorldOptions o;
  o.formats = {token_wise_tier(8, 4)};
  o.row_tokens = {20};
  CodecWorld w = make_world(o);
  const DeviceWorld device(w);
  const auto expect_refused = [&](const std::function<void(PageEncode*)>& spoil) {
    PageEncode e = device.encode();
    spoil(&e);
    EXPECT_EQ(encode_pages(e, nullptr).code(), StatusCode::kInvalidArgument);
  };
  expect_refused([](PageEncode* e) { e->k = nullptr; });
  expect_refused([](PageEncode* e) { e->v = static_cast<const uint8_t*>(e->v) + 2; });
  expect_refused([](PageEncode* e) { e->scores = nullptr; });
  expect_refused([](PageEncode* e) { e->batch.status = nullptr; });
  expect_refused([](PageEncode* e) { e->batch.jobs = nullptr; });
  expect_refused([](PageEncode* e) { e->batch.num_rows = 0; });
  expect_refused([](PageEncode* e) { e->batch.num_jobs = -1; });
  expect_refused([](PageEncode* e) { e->batch.token_stride = 127; });
  expect_refused([](PageEncode* e) { e->batch.formats.count = 0; });
  expect_refused([](PageEncode* e) { e->batch.formats.layout[0].tokens = 17; });
  expect_refused([](PageEncode* e) { e->batch.pool.base = nullptr; });
  EXPECT_TRUE(device.pool.read()[0].bytes[0] == w.pool_bytes()[0]);
  PageEncode none = device.encode();
  none.batch.num_jobs = 0;
  EXPECT_TRUE(encode_pages(none, nullptr));
}

// How many jobs there are may be known on the device alone.
TEST_F(GpuCodec, SmallJobsCountedOnTheDevice) {
  WorldOptions o;
  o.formats = {token_wise_tier(4, 2)};
  o.row_tokens = {60, 60, 60};
  CodecWorld w = make_world(o);
  const int32_t used = uniform(0, static_cast<int32_t>(w.jobs.size()));
  const DeviceArray<int32_t> num_used(std::vector<int32_t>{used});
  const DeviceWorld device(w);
  PageEncode e = device.encode(), h = host_encode(w);
  e.batch.num_used = num_used.get();
  h.batch.num_used = &used;
  ASSERT_TRUE(encode_pages(e, nullptr));
  ASSERT_TRUE(encode_pages_host(h));
  const std::vector<PoolBlock> pool = device.pool.read();
  EXPECT_EQ(memcmp(pool.data(), w.pool.data(), pool.size() * sizeof(PoolBlock)), 0);
}

}  // namespace
}  // namespace tierkv
