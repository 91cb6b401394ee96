// SPDX-License-Identifier: Apache-2.0
// Channel blocks on the device: the host's bytes, and attention against the reference in double.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>

#include "bench/baselines/channel/channel_attention.h"
#include "tests/baselines/channel_world.h"
#include "tests/gpu/device_array.cuh"

namespace tierkv::testing {
namespace {

using test::DeviceArray;

// A world in device memory.
struct DeviceChannels {
  explicit DeviceChannels(const ChannelWorld& w)
      : world(w),
        pool(w.pool),
        residual(w.residual),
        table(w.table),
        block_count(w.block_count),
        residual_tokens(w.residual_tokens),
        status(w.status) {}
  ChannelCache cache() {
    ChannelCache c = world.cache();
    c.pool = pool.get()->bytes;
    c.residual = residual.get()->bytes;
    c.table = table.get();
    c.block_count = block_count.get();
    c.residual_tokens = residual_tokens.get();
    return c;
  }
  // What of it differs from a host world.
  std::string difference(const ChannelWorld& host) const {
    if (status.read() != host.status) return "status";
    if (block_count.read() != host.block_count) return "block_count";
    if (residual_tokens.read() != host.residual_tokens) return "residual_tokens";
    const auto differs = [](const std::vector<ChannelLine>& a, const std::vector<ChannelLine>& b) {
      return std::memcmp(a.data(), b.data(), a.size() * sizeof(ChannelLine)) != 0;
    };
    if (differs(residual.read(), host.residual)) return "residual";
    return differs(pool.read(), host.pool) ? "pool" : "";
  }

  ChannelWorld world;
  DeviceArray<ChannelLine> pool, residual;
  DeviceArray<int32_t> table, block_count, residual_tokens;
  DeviceArray<StatusCode> status;
};

struct Case {
  int32_t head_dim, k_bits, v_bits, tokens;
};
constexpr Case kCases[] = {{64, 4, 4, 64},   {64, 2, 2, 128}, {64, 4, 2, 64},   {64, 2, 4, 128},
                           {128, 4, 4, 128}, {128, 2, 2, 64}, {128, 4, 2, 128}, {128, 2, 4, 64},
                           {256, 4, 4, 64},  {256, 2, 4, 64}};

class ChannelOnDevice : public ::testing::Test {
 protected:
  ChannelOnDevice() : seed_(std::random_device{}()), rng_(seed_) {}
  ChannelLayout layout(const Case& c) {
    return *make_channel_layout(channel_format(c.k_bits, c.v_bits, c.tokens), c.head_dim);
  }
  // Rows of two heads with random lengths, some empty, one of one token.
  ChannelWorld ragged(const Case& c, int32_t sequences, int32_t max_blocks, float k_size,
                      float v_size);
  void check_attention(const Case& c, const ChannelWorld& world, int32_t group, float q_size);

  uint32_t seed_;
  std::mt19937 rng_;
};

ChannelWorld ChannelOnDevice::ragged(const Case& c, int32_t sequences, int32_t max_blocks,
                                     float k_size, float v_size) {
  std::uniform_int_distribution<int32_t> length(0, (max_blocks + 1) * c.tokens - 1);
  std::vector<int32_t> indptr = {0};
  for (int32_t s = 0; s < sequences; ++s) {
    const int32_t n = s == 1 ? 0 : s == 2 ? 1 : s == 3 ? c.tokens * max_blocks : length(rng_);
    indptr.push_back(indptr.back() + n);
  }
  ChannelWorld w(&rng_, layout(c), 2 * sequences, max_blocks);
  const std::vector<uint16_t> k = channel_values(&rng_, indptr.back() * 2 + 1, c.head_dim, k_size);
  const std::vector<uint16_t> v = channel_values(&rng_, indptr.back() * 2 + 1, c.head_dim, v_size);
  EXPECT_TRUE(
      fill_channel_host(w.cache(), {k.data(), v.data(), indptr.data(), 2, w.status.data()}));
  return w;
}

TEST_F(ChannelOnDevice, AppendsHaveTheHostsBytes) {
  for (const Case& c : kCases) {
    ChannelWorld host(&rng_, layout(c), 9, 2);
    std::uniform_int_distribution<int32_t> at(0, c.tokens - 1);
    // Rows at different places; three that cannot take a token, or not for long.
    for (int32_t row = 0; row < 9; ++row) host.residual_tokens[row] = at(rng_);
    host.residual_tokens[2] = c.tokens;
    host.block_count[3] = 2;
    host.table[2 * 4 + 1] = -1;
    DeviceChannels device(host);
    for (int32_t step = 0; step < c.tokens + 5; ++step) {
      std::vector<uint16_t> k = channel_values(&rng_, 9, c.head_dim, 1);
      const std::vector<uint16_t> v = channel_values(&rng_, 9, c.head_dim, 1);
      if (step % 7 == 3) k[5 * c.head_dim + 11] = 0xfc00;
      const DeviceArray<uint16_t> dk(k), dv(v);
      ASSERT_TRUE(append_channel_host(host.cache(), {k.data(), v.data(), host.status.data()}));
      ASSERT_TRUE(
          append_channel(device.cache(), {dk.get(), dv.get(), device.status.get()}, nullptr));
      if (step % 8 == 0 || step > c.tokens) {
        ASSERT_EQ(device.difference(host), "") << step << " seed " << seed_;
      }
    }
    EXPECT_GE(host.block_count[0], 1);
  }
}

TEST_F(ChannelOnDevice, PromptsHaveTheHostsBytes) {
  for (const Case& c : kCases) {
    ChannelWorld host(&rng_, layout(c), 10, 3);
    host.table[3 * 9] = host.num_blocks;
    const int32_t b = c.tokens;
    const std::vector<int32_t> indptr = {0, 3 * b + 5, 3 * b + 5, 4 * b, 9 * b, 11 * b + 1};
    std::vector<uint16_t> k = channel_values(&rng_, indptr.back() * 2, c.head_dim, 1);
    const std::vector<uint16_t> v = channel_values(&rng_, indptr.back() * 2, c.head_dim, 1);
    DeviceChannels device(host);
    const DeviceArray<uint16_t> dk(k), dv(v);
    const DeviceArray<int32_t> dptr(indptr);
    ASSERT_TRUE(fill_channel_host(host.cache(),
                                  {k.data(), v.data(), indptr.data(), 2, host.status.data()}));
    ASSERT_TRUE(fill_channel(device.cache(),
                             {dk.get(), dv.get(), dptr.get(), 2, device.status.get()}, nullptr));
    EXPECT_EQ(host.status[6], StatusCode::kCorrupt);  // longer than its table
    EXPECT_EQ(host.status[9], StatusCode::kOutOfPages);
    ASSERT_EQ(device.difference(host), "") << " seed " << seed_;

    // Not finite, in a block and in a residual: those rows are empty, the others as before.
    k[(int64_t{b} * 2) * c.head_dim + 3] = 0x7e00;
    k[((int64_t{3} * b + 2) * 2 + 1) * c.head_dim] = 0x7c00;
    const DeviceArray<uint16_t> bad(k);
    ASSERT_TRUE(fill_channel(device.cache(),
                             {bad.get(), dv.get(), dptr.get(), 2, device.status.get()}, nullptr));
    const std::vector<StatusCode> status = device.status.read();
    const std::vector<int32_t> blocks = device.block_count.read();
    for (const int32_t row : {0, 1}) {
      EXPECT_EQ(status[row], StatusCode::kNonFinite) << row;
      EXPECT_EQ(blocks[row], 0);
      EXPECT_EQ(device.residual_tokens.read()[row], 0);
    }
    EXPECT_EQ(status[4], StatusCode::kOk);
    EXPECT_EQ(blocks[4], host.block_count[4]);
    for (const ChannelLine& line : device.residual.read()) {
      for (int32_t i = 0; i < 64; ++i) {
        uint16_t x;
        std::memcpy(&x, line.bytes + 2 * i, 2);
        ASSERT_NE(x & 0x7c00, 0x7c00);
      }
    }
  }
}

void ChannelOnDevice::check_attention(const Case& c, const ChannelWorld& world, int32_t group,
                                      float q_size) {
  ChannelWorld host = world;
  DeviceChannels device(world);
  const int32_t dim = c.head_dim, rows = world.num_rows;
  std::normal_distribution<float> normal(0, q_size);
  std::vector<uint16_t> q(int64_t{rows} * group * dim);
  for (uint16_t& x : q) x = float_to_half(normal(rng_));
  const DeviceArray<uint16_t> dq(q), out(std::vector<uint16_t>(q.size() + 8, 0x7e01));
  const DeviceArray<float> lse(std::vector<float>(rows * group, NAN));
  const DeviceArray<uint8_t> workspace(
      std::vector<uint8_t>(channel_workspace_bytes(host.cache(), group), 0xff));
  ChannelAttention call;
  call.group = group;
  call.sm_scale = 1 / std::sqrt(static_cast<double>(dim));
  call.q = q.data();
  const Result<ChannelOutput> expected = attend_channel_reference(host.cache(), call);
  ASSERT_TRUE(expected.is_ok()) << expected.status().message();
  call.q = dq.get();
  call.out = out.get();
  call.lse = lse.get();
  call.status = device.status.get();
  const Status status = attend_channel(device.cache(), call, workspace.get(), nullptr);
  ASSERT_TRUE(status) << status.message();
  const std::vector<uint16_t> found = out.read();
  const std::vector<float> found_lse = lse.read();
  for (const StatusCode code : device.status.read()) ASSERT_EQ(code, StatusCode::kOk);
  const ChannelCache cache = host.cache();
  const ChannelLayout& l = world.layout;
  for (int32_t row = 0; row < rows; ++row) {
    const int32_t blocks = world.block_count[row];
    const int32_t tokens = blocks * l.tokens + world.residual_tokens[row];
    // Sizes that rounding is relative to: of |q (k - zero point)| and |q zero point| summed over
    // the channels, which q * scale in fp16 makes, and of the values' range.
    double range = 0;
    std::vector<double> logit_error(group, 0.0);
    for (int32_t t = 0; t < tokens; ++t) {
      const bool raw = t >= blocks * l.tokens;
      const uint8_t* from =
          raw ? cache.residual_of(row) : cache.block(cache.block_id(row, t / l.tokens));
      const auto value = [&](Component part, int32_t d) {
        return raw ? residual_value(l, from, part, t % l.tokens, d)
                   : channel_value(l, from, part, t % l.tokens, d);
      };
      for (int32_t d = 0; d < dim; ++d) {
        range = std::max(range, std::fabs(static_cast<double>(value(Component::kValue, d))));
      }
      for (int32_t h = 0; h < group; ++h) {
        double size = 0;
        for (int32_t d = 0; d < dim; ++d) {
          float zero = 0;
          if (!raw) {
            uint16_t bits;
            std::memcpy(&bits, from + l.scale_byte(Component::kKey, d) + 8, 2);
            zero = half_to_float(bits);
          }
          const double x = half_to_float(q[(int64_t{row} * group + h) * dim + d]);
          const double k = value(Component::kKey, d);
          // fp16's 2^-11, or 2^-25 below its normal range, times a code in its place; fp32 sums.
          size += std::fabs(x * (k - zero)) * 0x1p-11 + (raw ? 0 : 16 * 0x1p-25) +
                  (std::fabs(x * zero) + std::fabs(x * k)) * 0x1p-18;
        }
        logit_error[h] = std::max(logit_error[h], size * call.sm_scale);
      }
    }
    for (int32_t h = 0; h < group; ++h) {
      const int64_t at = int64_t{row} * group + h;
      if (tokens == 0) {
        ASSERT_EQ(found_lse[at], -INFINITY);
        for (int32_t d = 0; d < dim; ++d) ASSERT_EQ(found[at * dim + d], 0);
        continue;
      }
      ASSERT_NEAR(found_lse[at], expected->lse[at],
                  logit_error[h] + 1e-5 * (1 + std::fabs(expected->lse[at])))
          << "row " << row << " seed " << seed_;
      for (int32_t d = 0; d < dim; ++d) {
        // Probabilities move by twice the logits' error; weights and the output are rounded to
        // fp16, values between their least and largest. Sums of codes and zero points, each of at
        // most 3 ranges, are off by 2^-19 with every product of 16 tokens (a tensor core cuts its
        // terms off), also where their sum is 0.
        const double summed = 3 * range * (tokens / 16 + 5) * 0x1p-19;
        const double tolerance =
            2 * range * (std::expm1(2 * logit_error[h]) + 0x1p-10) + summed + 0x1p-24;
        ASSERT_NEAR(half_to_float(found[at * dim + d]), expected->out[at * dim + d], tolerance)
            << "row " << row << " head " << h << " dim " << d << " tokens " << tokens << " seed "
            << seed_;
      }
    }
  }
  for (size_t i = q.size(); i < found.size(); ++i) ASSERT_EQ(found[i], 0x7e01);
}

TEST_F(ChannelOnDevice, AttendsAsTheReferenceDoes) {
  for (const Case& c : kCases) {
    for (const int32_t group : {1, 3, 4, 8, 11, 16}) {
      SCOPED_TRACE(std::to_string(c.head_dim) + " k" + std::to_string(c.k_bits) + "v" +
                   std::to_string(c.v_bits) + " group " + std::to_string(group));
      check_attention(c, ragged(c, 5, 4, 1, 1), group, 0.5f);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(ChannelOnDevice, AttendsToKeysAndValuesOfAnySize) {
  const Case c = {128, 4, 4, 64};
  for (const float v_size : {1e-4f, 1e3f}) check_attention(c, ragged(c, 4, 3, 1, v_size), 4, 1);
  check_attention(c, ragged(c, 4, 3, 1e-4f, 1), 4, 1);
  check_attention(c, ragged(c, 4, 3, 100, 1), 4, 0.01f);
}

// Few rows are cut into splits, many are not.
TEST_F(ChannelOnDevice, AttendsInSplitsAndInOne) {
  const Case c = {64, 4, 2, 64};
  check_attention(c, ragged(c, 1, 40, 1, 1), 4, 0.5f);
  check_attention(c, ragged(c, 260, 1, 1, 1), 2, 0.5f);
}

TEST_F(ChannelOnDevice, CorruptTablesAreLeftOut) {
  const Case c = {128, 4, 4, 64};
  ChannelWorld w = ragged(c, 4, 3, 1, 1);
  w.table[3 * 6 + 1] = -5;  // of sequence 3, which is full
  w.table[3 * 7 + 2] = w.num_blocks;
  w.block_count[0] = 4;
  w.residual_tokens[1] = 64;
  w.residual_tokens[2] = -1;
  DeviceChannels device(w);
  std::vector<uint16_t> q(8 * 128, 0x3000);
  const DeviceArray<uint16_t> dq(q), out(std::vector<uint16_t>(q.size(), 0x7e01));
  const DeviceArray<uint8_t> workspace(
      std::vector<uint8_t>(channel_workspace_bytes(w.cache(), 1), 0xff));
  ChannelAttention call = {1, 0.1, dq.get(), out.get(), nullptr, device.status.get()};
  ASSERT_TRUE(attend_channel(device.cache(), call, workspace.get(), nullptr));
  const std::vector<StatusCode> status = device.status.read();
  for (const int32_t row : {0, 1, 2, 6, 7}) EXPECT_EQ(status[row], StatusCode::kCorrupt) << row;
  EXPECT_EQ(status[4], StatusCode::kOk);
  for (const uint16_t x : out.read()) ASSERT_TRUE(std::isfinite(half_to_float(x)));
  call.q = q.data();
  EXPECT_EQ(attend_channel_reference(w.cache(), call).status().code(), StatusCode::kCorrupt);
}

TEST_F(ChannelOnDevice, RefusesByName) {
  const Case c = {128, 4, 4, 64};
  ChannelWorld w = ragged(c, 1, 1, 1, 1);
  DeviceChannels device(w);
  const DeviceArray<uint16_t> memory(std::vector<uint16_t>(8192, 0x3000));
  const DeviceArray<uint8_t> workspace(std::vector<uint8_t>(65536, 0));
  const ChannelAttention good = {
      1, 0.1, memory.get(), memory.get() + 4096, nullptr, device.status.get()};
  const auto code = [&](void (*change)(ChannelAttention*)) {
    ChannelAttention call = good;
    change(&call);
    return attend_channel(device.cache(), call, workspace.get(), nullptr).code();
  };
  const StatusCode invalid = StatusCode::kInvalidArgument;
  EXPECT_EQ(code([](auto*) {}), StatusCode::kOk);
  EXPECT_EQ(code([](auto* x) { x->group = 17; }), StatusCode::kUnsupported);
  EXPECT_EQ(code([](auto* x) { x->group = 0; }), invalid);
  EXPECT_EQ(code([](auto* x) { x->sm_scale = NAN; }), invalid);
  EXPECT_EQ(code([](auto* x) { x->q = nullptr; }), invalid);
  EXPECT_EQ(code([](auto* x) { x->out += 1; }), invalid);
  EXPECT_EQ(code([](auto* x) { x->status = nullptr; }), invalid);
  EXPECT_EQ(attend_channel(device.cache(), good, nullptr, nullptr).code(), invalid);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

}  // namespace
}  // namespace tierkv::testing
