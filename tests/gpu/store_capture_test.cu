// attend() alone in a graph: it plans for itself, whatever calls before it planned and calls behind
// it plan. And outputs at the end of their range.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>

#include "codec/cuda_device.cuh"
#include "codec/element.h"
#include "store/channel_device.h"
#include "store/coded_device.h"
#include "store/device_store.h"
#include "tests/gpu/store_pair.cuh"
#include "tests/store/small_store.h"

namespace tierkv::testing {
namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

// Values, probabilities and outputs are rounded to fp16: 5 * 2^-11 of the largest value, which is
// a few times an output. What another sequence's plan finds is as large as the output.
constexpr double kTolerance = 2e-2;

// One query of some sequences at layer 0.
class Query {
 public:
  Query(const KvStoreConfig& config, std::vector<SequenceId> ids, RandomInput* input)
      : layout_(config.layout), ids_(std::move(ids)) {
    const auto count = static_cast<int64_t>(ids_.size());
    q_ = input->values(DType::kFloat16, count * layout_.num_q_heads, layout_.head_dim);
    out_.assign(static_cast<size_t>(count * layout_.num_q_heads) * layout_.head_dim, 0x7e00);
    device_q_.put(q_);
    forget();
  }
  // The results that the device left so far.
  void forget() { device_out_.put(std::vector<uint16_t>(out_.size(), 0x7e00)); }
  AttendRequest device() const {
    AttendRequest r;
    r.sequences = {ids_.data(), static_cast<int32_t>(ids_.size())};
    r.q = device_q_.get<void>();
    r.out = device_out_.get<void>();
    return r;
  }
  // Waits. Against the host's, found now.
  void expect_equal(KvStore& host, KvStore& device_store) {
    AttendRequest r = device();
    r.q = q_.data();
    r.out = out_.data();
    ASSERT_TRUE(host.attend(r));
    const Status s = device_store.take_status();
    ASSERT_TRUE(s) << s.message();
    const auto got = device_out_.read<uint16_t>(out_.size());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < out_.size(); ++i) {
      const double want = half_to_float(out_[i]), x = half_to_float(got[i]);
      difference += (x - want) * (x - want);
      norm += want * want;
    }
    EXPECT_LT(std::sqrt(difference / norm), kTolerance);
  }

 private:
  CacheLayout layout_;
  std::vector<SequenceId> ids_;
  std::vector<uint8_t> q_;
  std::vector<uint16_t> out_;
  Buffer device_q_, device_out_;
};

template <class Host, class Device>
class Captures {
 public:
  Captures(const KvStoreConfig& config, RandomInput* input, cudaStream_t stream)
      : pair_(config, input, stream), input_(input), stream_(stream) {}

  void run() {
    const std::vector<SequenceId> all = {grown(150), grown(40), grown(90)};
    Query graphed(pair_.config(), {all[0], all[2]}, input_);
    Query others(pair_.config(), {all[1]}, input_);
    Query same(pair_.config(), {all[0], all[2]}, input_);
    KvStore &host = pair_.host(), &device = pair_.device();
    // The plan that a capture may not take for its own.
    ASSERT_TRUE(device.attend(same.device()));
    same.expect_equal(host, device);
    cudaGraph_t graph;
    cudaGraphExec_t replay;
    ASSERT_CUDA(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal));
    ASSERT_TRUE(device.attend(graphed.device()));
    ASSERT_CUDA(cudaStreamEndCapture(stream_, &graph));
    ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
    for (int32_t i = 0; i < 4; ++i) {
      // A plan and a batch of other sequences, a replay, and calls that go on with theirs.
      others.forget();
      graphed.forget();
      same.forget();
      ASSERT_TRUE(device.attend(others.device()));
      ASSERT_CUDA(cudaGraphLaunch(replay, stream_));
      graphed.expect_equal(host, device);
      others.expect_equal(host, device);
      others.forget();
      ASSERT_TRUE(device.attend(others.device()));
      others.expect_equal(host, device);
      ASSERT_TRUE(device.attend(same.device()));
      same.expect_equal(host, device);
      if (::testing::Test::HasFailure()) break;
      // What the next replay plans has other counts.
      step(all, 1 + i);
    }
    cudaGraphExecDestroy(replay);
    cudaGraphDestroy(graph);
  }

 private:
  void append_all(const std::vector<SequenceId>& ids, int32_t tokens) {
    const CacheLayout& l = pair_.config().layout;
    const auto count = static_cast<int32_t>(ids.size());
    for (int32_t layer = 0; layer < l.num_layers; ++layer) {
      const auto draw = [&] {
        return input_->values(l.dtype, int64_t{count} * tokens * l.num_kv_heads, l.head_dim);
      };
      const std::vector<uint8_t> k = draw(), v = draw();
      ASSERT_TRUE(pair_.append({ids.data(), count}, layer, tokens, k, v));
    }
  }
  SequenceId grown(int32_t tokens) {
    SequenceId id;
    EXPECT_TRUE(pair_.add(&id));
    EXPECT_TRUE(pair_.begin_prompt({&id, 1}, tokens));
    append_all({id}, tokens);
    EXPECT_TRUE(pair_.end_prompt({&id, 1}));
    return id;
  }
  void step(const std::vector<SequenceId>& ids, int32_t tokens) {
    ASSERT_TRUE(pair_.begin_step({ids.data(), static_cast<int32_t>(ids.size())}, tokens));
    append_all(ids, tokens);
  }

  StorePair<Host, Device> pair_;
  RandomInput* input_;
  cudaStream_t stream_;
};

class StoreCapture : public ::testing::Test {
 protected:
  StoreCapture() { EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess); }
  ~StoreCapture() override { cudaStreamDestroy(stream_); }

  RandomInput input_;
  cudaStream_t stream_ = nullptr;
};

KvStoreConfig tiered_config() {
  KvStoreConfig c = small_config();
  c.layout.head_dim = 128;
  c.layout.sm_scale = 1.0 / (16 * std::sqrt(128));
  c.page_bytes = 0;
  c.num_pages = 400;
  c.max_tokens = 400;
  return c;
}

// For pages without tiers.
KvStoreConfig tierless_config() {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = 4;
  c.layout.num_kv_heads = 2;
  c.layout.head_dim = 128;
  c.layout.sm_scale = 1.0 / (16 * std::sqrt(128));
  c.policy.window_tokens = 24;
  c.num_pages = 200;
  c.max_sequences = 5;
  c.max_tokens = 500;
  return c;
}

TEST_F(StoreCapture, SmallAttentionOfTiersPlansForItself) {
  Captures<HostStore, DeviceStore>(tiered_config(), &input_, stream_).run();
}

TEST_F(StoreCapture, SmallAttentionOfCodedPagesPlansForItself) {
  KvStoreConfig c = tierless_config();
  c.coded.enabled = true;
  c.coded.key_steps = c.coded.value_steps = {0.5f, 1.0f, 0.7f, 1.3f};
  Captures<CodedHostStore, CodedDeviceStore>(c, &input_, stream_).run();
}

TEST_F(StoreCapture, SmallAttentionOfChannelBlocksPlansForItself) {
  KvStoreConfig c = tierless_config();
  c.channel.enabled = true;
  Captures<ChannelHostStore, ChannelDeviceStore>(c, &input_, stream_).run();
}

// 2 * 65504 / (2^bits - 1) is rounded up to fp16: the largest code is 65536 or more.
TEST_F(StoreCapture, SmallOutputsSaturate) {
  for (const int32_t bits : {2, 4, 8}) {
    KvStoreConfig tiered = tiered_config(), channel = tierless_config();
    channel.channel.enabled = true;
    tiered.window_format = tiered.high_format = tiered.low_format = token_wise_tier(8, bits);
    if (bits < 8) channel.channel.v_bits = bits;
    for (const KvStoreConfig& c : {tiered, channel}) {
      auto made = create_device_store(c, stream_);
      ASSERT_TRUE(made) << made.status().message();
      DeviceKvStore& store = **made;
      constexpr int32_t kTokens = 200;
      const CacheLayout& l = c.layout;
      std::vector<uint16_t> k(size_t{kTokens} * l.num_kv_heads * l.head_dim, 0x3000), v(k);
      for (size_t i = 0; i < v.size(); ++i) v[i] = i % 2 == 0 ? 0x7bff : 0xfbff;
      const std::vector<uint16_t> q(size_t{1} * l.num_q_heads * l.head_dim, 0);
      Buffer keys, values, queries, out;
      const Result<SequenceId> id = store.add_sequence();
      ASSERT_TRUE(id);
      ASSERT_TRUE(store.begin_prompt({&*id, 1}, kTokens));
      for (int32_t layer = 0; layer < l.num_layers; ++layer) {
        ASSERT_TRUE(store.append({{&*id, 1}, layer, kTokens, keys.put(k), values.put(v)}));
      }
      ASSERT_TRUE(store.end_prompt({&*id, 1}));
      AttendRequest request;
      request.sequences = {&*id, 1};
      request.q = queries.put(q);
      request.out = out.put(std::vector<uint16_t>(q.size(), 0x7e00));
      ASSERT_TRUE(store.attend(request));
      const Status s = store.take_status();
      ASSERT_TRUE(s) << s.message();
      const auto got = out.read<uint16_t>(q.size());
      for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_EQ(got[i], i % 2 == 0 ? 0x7bff : 0xfbff) << bits << " bits, element " << i;
      }
    }
  }
}

// Neutral significances are the host's, byte for byte: nothing leaves the high tier.
TEST_F(StoreCapture, SmallUnscoredPromptsAreTheHosts) {
  KvStoreConfig c = tiered_config();
  StorePair<HostStore, DeviceStore> pair(c, &input_, stream_);
  SequenceId id;
  ASSERT_TRUE(pair.add(&id));
  for (const int32_t tokens : {37, 170}) {
    ASSERT_TRUE(pair.begin_prompt({&id, 1}, tokens));
    for (int32_t layer = 0; layer < c.layout.num_layers; ++layer) {
      const int64_t vectors = int64_t{tokens} * c.layout.num_kv_heads;
      const auto k = input_.values(DType::kFloat16, vectors, 128);
      const auto v = input_.values(DType::kFloat16, vectors, 128);
      ASSERT_TRUE(pair.append({&id, 1}, layer, tokens, k, v));
    }
  }
  ASSERT_TRUE(pair.end_prompt({&id, 1}));
  const auto host = pair.host().export_sequence(id), device = pair.device().export_sequence(id);
  ASSERT_TRUE(host);
  ASSERT_TRUE(device);
  EXPECT_TRUE(*host == *device);
  const Result<StoreStats> stats = pair.device().stats();
  ASSERT_TRUE(stats);
  EXPECT_EQ(stats->tokens[static_cast<int32_t>(Tier::kLow)], 0);
}

// 2^45 bytes are more than any device has.
TEST_F(StoreCapture, SmallPoolsWithoutMemoryAreOutOfMemory) {
  KvStoreConfig c = tiered_config();
  void* memory = nullptr;
  const Status s = device_allocate(size_t{1} << 45, "create", &memory);
  EXPECT_EQ(s.code(), StatusCode::kOutOfMemory) << s.message();
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  const auto store = create_device_store(c, stream_);
  EXPECT_TRUE(store) << store.status().message();
}

}  // namespace
}  // namespace tierkv::testing
