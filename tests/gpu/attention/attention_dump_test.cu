// SPDX-License-Identifier: Apache-2.0
// Attention over real caches: keys, values and queries of dumps, quantised as the store does,
// against double precision over what the pages decode to. tests/gpu/attention/attention_extract.py
// writes the files that TIERKV_ATTENTION_EXTRACTS names, separated by colons; without it there is
// nothing to do.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "tests/gpu/attention/attention_world.cuh"

namespace tierkv {
namespace {

using test::DeviceWorld;
using test::expect_output;
using test::make_world;
using test::tier;
using test::World;
using test::WorldShape;

struct Extract {
  int32_t kv_heads = 0, q_heads = 0, tokens = 0, head_dim = 0, queries = 0;
  std::vector<float> k, v, q;
};

std::vector<float> read_halves(std::ifstream& file, int64_t count) {
  std::vector<uint16_t> bits(count);
  file.read(reinterpret_cast<char*>(bits.data()), count * 2);
  std::vector<float> x;
  for (const uint16_t b : bits) x.push_back(half_to_float(b));
  return x;
}

bool read_extract(const std::string& path, Extract* e) {
  std::ifstream file(path, std::ios::binary);
  int32_t header[5] = {};
  file.read(reinterpret_cast<char*>(header), sizeof(header));
  if (!file || header[0] < 1 || header[2] < 128 || header[3] < 64) return false;
  *e = {header[0], header[1], header[2], header[3], header[4], {}, {}, {}};
  const int64_t values = int64_t{e->kv_heads} * e->tokens * e->head_dim;
  e->k = read_halves(file, values);
  e->v = read_halves(file, values);
  e->q = read_halves(file, int64_t{e->queries} * e->q_heads * e->head_dim);
  return static_cast<bool>(file);
}

// The newest `q_len` queries.
double error_of(const Extract& e, const std::vector<AttentionTier>& tiers,
                const std::vector<int32_t>& tokens, int32_t q_len) {
  std::mt19937_64 rng(std::random_device{}());
  WorldShape shape;
  shape.num_kv_heads = e.kv_heads;
  shape.group = e.q_heads / e.kv_heads;
  shape.head_dim = e.head_dim;
  shape.q_len = q_len;
  shape.tiers = tiers;
  shape.tokens = {tokens};
  shape.keys = e.k;
  shape.values = e.v;
  shape.queries.assign(e.q.end() - int64_t{q_len} * e.q_heads * e.head_dim, e.q.end());
  World world = make_world(shape, rng);
  const Result<ReferenceOutput> expected = attend_reference(world.config, world.call());
  EXPECT_TRUE(expected.is_ok());
  DeviceWorld device(world);
  EXPECT_TRUE(device.plan().is_ok());
  EXPECT_TRUE(device.attend_now().is_ok());
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  return expect_output(device, *expected);
}

TEST(AttentionDump, OutputsOfRealCaches) {
  const char* names = std::getenv("TIERKV_ATTENTION_EXTRACTS");
  if (names == nullptr) GTEST_SKIP() << "TIERKV_ATTENTION_EXTRACTS is not set";
  std::istringstream list(names);
  for (std::string path; std::getline(list, path, ':');) {
    SCOPED_TRACE(path);
    Extract e;
    ASSERT_TRUE(read_extract(path, &e));
    const int32_t high = e.tokens * 3 / 10, window = 64, low = e.tokens - high - window;
    for (const int32_t q_len : {1, 4}) {
      const double errors[3] = {
          error_of(e, {tier(0, 8, 4)}, {e.tokens}, q_len),
          error_of(e, {tier(1, 4, 2)}, {e.tokens}, q_len),
          error_of(e, {tier(0, 8, 4), tier(1, 4, 2), tier(2, 16, 16)}, {high, low, window}, q_len),
      };
      std::printf("%s, %d tokens, q_len %d: K8V4 %.1e, K4V2 %.1e, mixed %.1e\n",
                  path.substr(path.rfind('/') + 1).c_str(), e.tokens, q_len, errors[0], errors[1],
                  errors[2]);
    }
  }
}

}  // namespace
}  // namespace tierkv
