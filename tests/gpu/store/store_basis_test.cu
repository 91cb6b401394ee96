// The device back end in a basis beside the host's: given the same coordinates the same bytes, and
// attention within rounding.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "codec/format/element.h"
#include "store/tiers/device_basis.h"
#include "store/tiers/host_basis.h"
#include "tests/gpu/codec/basis_world.cuh"
#include "tests/gpu/store/store_twins.cuh"
#include "tests/support/basis_source.h"

namespace tierkv::testing {
namespace {

struct BasisCase {
  const char* name;
  BasisKind keys, values;
  int32_t head_dim;
  DType dtype;
  bool raw_window;

  friend void PrintTo(const BasisCase& c, std::ostream* os) { *os << c.name; }
};

constexpr int32_t kMaxTokens = 150;

class StoreBasisTwins : public ::testing::TestWithParam<BasisCase> {
 protected:
  StoreBasisTwins() : rng_(std::random_device{}()) {
    const BasisCase& c = GetParam();
    config_ = small_config();
    config_.layout.head_dim = c.head_dim;
    config_.layout.dtype = c.dtype;
    config_.page_bytes = 0;
    if (c.raw_window) config_.window_format = raw_tier();
    config_.basis = std::make_shared<const CacheBasis>(
        random_cache_basis(&rng_, config_.layout, c.keys, c.values));
    EXPECT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
    auto host = HostBasisStore::make(config_);
    auto device = DeviceBasisStore::make(config_, stream_);
    EXPECT_TRUE(host.is_ok()) << host.status().message();
    EXPECT_TRUE(device.is_ok()) << device.status().message();
    host_ = std::move(*host);
    device_ = std::move(*device);
    for (const Component part : {Component::kKey, Component::kValue}) {
      operands_.push_back(std::make_unique<UploadedBasis>(
          pack_basis(config_.basis->of(part), BasisUse::kApply, c.dtype)));
    }
  }
  ~StoreBasisTwins() override {
    device_.reset();
    cudaStreamDestroy(stream_);
  }

  // What the device makes of keys or values, for the host's store of coordinates.
  std::vector<float> coordinates(int32_t component, const AppendCall& call,
                                 const std::vector<uint8_t>& x) {
    const CacheLayout& layout = config_.layout;
    BasisVectors v;
    v.operand = operands_[component]->operand;
    v.first_row = call.layer * layout.num_kv_heads;
    v.kv_heads = v.heads = layout.num_kv_heads;
    v.tokens = int64_t{call.sequences.count} * call.tokens;
    v.dtype = layout.dtype;
    const test::DeviceArray<uint8_t> from(x);
    const test::DeviceArray<float> to(
        std::vector<float>(v.tokens * v.heads * layout.head_dim, NAN));
    v.x = from.get();
    v.y = to.get();
    EXPECT_TRUE(map_basis({{v, {}}, 1}, nullptr));
    return to.read();
  }
  void append(SequenceList l, int32_t tokens) {
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      const CallValues values(&input_, config_.layout, l.count, tokens);
      AppendCall call = {l, layer, tokens, k_[layer].put(values.k_bytes()),
                         v_[layer].put(values.v_bytes())};
      ASSERT_TRUE(device_->append(call));
      ASSERT_TRUE(device_->take_status());
      append_host(call, values);
    }
  }
  void append_host(AppendCall call, const CallValues& values) {
    const std::vector<float> k = coordinates(0, call, values.k_bytes());
    const std::vector<float> v = coordinates(1, call, values.v_bytes());
    call.k = k.data();
    call.v = v.data();
    ASSERT_TRUE(host_->inner().append(call));
  }
  void prompt(SequenceList l, int32_t tokens) {
    ASSERT_TRUE(host_->begin_prompt(l, tokens));
    ASSERT_TRUE(device_->begin_prompt(l, tokens));
    append(l, tokens);
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      const std::vector<float> x =
          input_.scores(int64_t{l.count} * config_.layout.num_kv_heads * kMaxTokens, tokens);
      ASSERT_TRUE(host_->score_prompt({l, layer, x.data(), kMaxTokens}));
      ASSERT_TRUE(device_->score_prompt({l, layer, scores_.put(x), kMaxTokens}));
    }
    ASSERT_TRUE(host_->end_prompt(l));
    ASSERT_TRUE(device_->end_prompt(l));
    ASSERT_TRUE(device_->take_status());
  }
  void step(SequenceList l, int32_t tokens) {
    ASSERT_TRUE(host_->begin_step(l, tokens));
    ASSERT_TRUE(device_->begin_step(l, tokens));
    append(l, tokens);
  }
  DType query_dtype() const {
    const bool is_bfloat16 = config_.layout.dtype == DType::kBFloat16;
    return is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  }
  // Such that logits stay within tens: rounding is relative to their size.
  std::vector<uint8_t> queries(int64_t count) {
    const int64_t values = count * config_.layout.head_dim;
    const std::vector<float> x = random_values(&rng_, values, 0, 0.3f);
    std::vector<uint8_t> bytes(2 * values);
    for (int64_t i = 0; i < values; ++i) store_element(bytes.data(), query_dtype(), i, x[i]);
    return bytes;
  }
  std::string difference() {
    const Result<StoreView> view = device_->inner().download();
    return view ? state_difference(host_->inner().view(), *view) : view.status().message();
  }
  void expect_same_attention(SequenceList l);

  std::mt19937 rng_;
  RandomInput input_;
  KvStoreConfig config_;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<HostBasisStore> host_;
  std::unique_ptr<DeviceBasisStore> device_;
  std::vector<std::unique_ptr<UploadedBasis>> operands_;
  Buffer k_[2], v_[2], scores_;
};

void StoreBasisTwins::expect_same_attention(SequenceList l) {
  const CacheLayout& layout = config_.layout;
  const size_t heads = static_cast<size_t>(l.count) * layout.num_q_heads;
  const std::vector<uint8_t> q = queries(static_cast<int64_t>(heads));
  std::vector<uint16_t> out(heads * layout.head_dim, 0x7e00);
  std::vector<float> lse(heads, NAN);
  std::vector<float> p(static_cast<size_t>(l.count) * layout.num_kv_heads * kMaxTokens, NAN);
  Buffer dq, dout, dlse, dp;
  AttendRequest request;
  request.sequences = l;
  request.layer = 1;
  request.dtype = query_dtype();
  request.q = dq.put(q);
  request.out = const_cast<uint16_t*>(dout.put(out));
  request.lse = const_cast<float*>(dlse.put(lse));
  request.probabilities = const_cast<float*>(dp.put(p));
  request.stride = kMaxTokens;
  const Status status = device_->attend(request);
  ASSERT_TRUE(status) << status.message();
  ASSERT_TRUE(device_->take_status());
  request.q = q.data();
  request.out = out.data();
  request.lse = lse.data();
  request.probabilities = p.data();
  ASSERT_TRUE(host_->attend(request));
  const auto device_out = dout.read<uint16_t>(out.size());
  const auto device_lse = dlse.read<float>(heads), device_p = dp.read<float>(p.size());
  // P and its products are rounded to fp16 in the kernel, and so are the coordinates of q and of
  // the output: 2^-11 of what is attended to, four times its size where a matrix stretches by four.
  float largest = 0, most = 0;
  for (const uint16_t x : out)
    largest = std::max(largest, std::fabs(raw_to_float(query_dtype(), x)));
  for (const float x : lse) most = std::max(most, std::fabs(x));
  for (size_t i = 0; i < out.size(); ++i) {
    ASSERT_NEAR(raw_to_float(query_dtype(), device_out[i]), raw_to_float(query_dtype(), out[i]),
                1.6e-2f * largest)
        << i;
  }
  for (size_t i = 0; i < heads; ++i) EXPECT_NEAR(device_lse[i], lse[i], 4e-3f + 1e-3f * most);
  for (size_t i = 0; i < p.size(); ++i) {
    ASSERT_EQ(std::isnan(p[i]), std::isnan(device_p[i])) << i;
    if (!std::isnan(p[i])) {
      ASSERT_NEAR(device_p[i], p[i], (1e-2f + 2e-3f * most) * p[i] + 1e-6f) << i;
    }
  }
}

TEST_P(StoreBasisTwins, HoldTheSameBytesGivenTheSameCoordinates) {
  SequenceId ids[3];
  for (SequenceId& id : ids) {
    id = *host_->add_sequence();
    ASSERT_TRUE(*device_->add_sequence() == id);
  }
  prompt({ids, 2}, 61);
  prompt({ids + 2, 1}, 9);
  if (HasFatalFailure()) return;
  ASSERT_EQ(difference(), "");
  for (int32_t i = 0; i < 12; ++i) step({ids, 3}, 1);
  step({ids + 1, 2}, 5);
  if (HasFatalFailure()) return;
  ASSERT_EQ(difference(), "");
  expect_same_attention({ids, 3});
  expect_same_attention({ids + 1, 1});
  const auto from_host = host_->export_sequence(ids[1]);
  const auto from_device = device_->export_sequence(ids[1]);
  ASSERT_TRUE(from_host.is_ok() && from_device.is_ok());
  EXPECT_EQ(*from_host, *from_device);
  const auto forked = device_->fork(ids[0]);
  ASSERT_TRUE(forked.is_ok());
  ASSERT_TRUE(*host_->fork(ids[0]) == *forked);
  step({&*forked, 1}, 1);
  ASSERT_EQ(difference(), "");
}

TEST_P(StoreBasisTwins, StepsAreReplayed) {
  SequenceId ids[2];
  for (SequenceId& id : ids) {
    id = *host_->add_sequence();
    ASSERT_TRUE(*device_->add_sequence() == id);
  }
  const SequenceList l = {ids, 2};
  const CacheLayout& layout = config_.layout;
  prompt(l, 50);
  step(l, 1);
  if (HasFatalFailure()) return;
  // The buffers that the graph names; what is in them changes.
  Buffer dq, dout;
  std::vector<uint8_t> q = queries(2 * layout.num_q_heads);
  std::vector<uint16_t> out(2 * layout.num_q_heads * layout.head_dim, 0x7e00);
  AttendRequest request;
  request.sequences = l;
  request.layer = 1;
  request.dtype = query_dtype();
  request.q = dq.put(q);
  request.out = const_cast<uint16_t*>(dout.put(out));
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
  ASSERT_TRUE(device_->begin_step(l, 1));
  for (int32_t layer = 0; layer < 2; ++layer) {
    ASSERT_TRUE(device_->append({l, layer, 1, k_[layer].get<void>(), v_[layer].get<void>()}));
  }
  ASSERT_TRUE(device_->attend(request));
  ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&replay, graph, 0), cudaSuccess);
  for (int32_t i = 0; i < 5; ++i) {
    if (i > 0) ASSERT_TRUE(device_->note_replay(l, 1));
    ASSERT_TRUE(host_->begin_step(l, 1));
    for (int32_t layer = 0; layer < 2; ++layer) {
      const CallValues values(&input_, layout, 2, 1);
      append_host({l, layer, 1, k_[layer].put(values.k_bytes()), v_[layer].put(values.v_bytes())},
                  values);
    }
    q = queries(2 * layout.num_q_heads);
    dq.put(q);
    ASSERT_EQ(cudaGraphLaunch(replay, stream_), cudaSuccess);
    ASSERT_TRUE(device_->take_status());
    ASSERT_EQ(difference(), "") << i;
    request.q = q.data();
    request.out = out.data();
    ASSERT_TRUE(host_->attend(request));
    float largest = 0;
    for (const uint16_t x : out)
      largest = std::max(largest, std::fabs(raw_to_float(query_dtype(), x)));
    const auto device_out = dout.read<uint16_t>(out.size());
    for (size_t j = 0; j < out.size(); ++j) {
      ASSERT_NEAR(raw_to_float(query_dtype(), device_out[j]), raw_to_float(query_dtype(), out[j]),
                  1.6e-2f * largest);
    }
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
}

TEST_P(StoreBasisTwins, RefusesBadCalls) {
  const SequenceId id = *device_->add_sequence();
  ASSERT_TRUE(*host_->add_sequence() == id);
  const SequenceList l = {&id, 1};
  prompt(l, 20);
  ASSERT_TRUE(device_->begin_step(l, 1));
  const CallValues values(&input_, config_.layout, 1, 1);
  Buffer k, v;
  const void* good = k.put(values.k_bytes());
  std::vector<uint8_t> bytes = values.v_bytes();
  const uint16_t nan = 0x7fff;
  std::memcpy(&bytes[bytes.size() - 2], &nan, 2);  // of a 32-bit element the upper half, too
  const void* bad = v.put(bytes);
  EXPECT_EQ(device_->append({l, 0, 1, nullptr, good}).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->append({l, 0, 1, good, static_cast<const uint8_t*>(good) + 4}).code(),
            StatusCode::kInvalidArgument);
  EXPECT_EQ(device_->append({l, 5, 1, good, good}).code(), StatusCode::kInvalidArgument);
  EXPECT_TRUE(device_->take_status());
  EXPECT_TRUE(device_->append({l, 0, 1, good, bad}));
  EXPECT_EQ(device_->take_status().code(), StatusCode::kNonFinite);
  for (int32_t layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(device_->append({l, layer, 1, good, good}));
  }
  EXPECT_TRUE(device_->take_status());
  AttendRequest request;
  request.sequences = l;
  request.q = good;
  EXPECT_EQ(device_->attend(request).code(), StatusCode::kInvalidArgument);
  request.out = static_cast<uint8_t*>(k.get<void>()) + 2;
  EXPECT_EQ(device_->attend(request).code(), StatusCode::kInvalidArgument);
}

INSTANTIATE_TEST_SUITE_P(
    Bases, StoreBasisTwins,
    ::testing::Values(
        BasisCase{"hadamard", BasisKind::kHadamard, BasisKind::kHadamard, 128, DType::kFloat16, 0},
        BasisCase{"mean", BasisKind::kMean, BasisKind::kMean, 64, DType::kFloat32, 1},
        BasisCase{"matrix", BasisKind::kMatrix, BasisKind::kMatrix, 128, DType::kFloat16, 0},
        BasisCase{"bfloat16", BasisKind::kMatrix, BasisKind::kHadamard, 96, DType::kBFloat16, 1},
        BasisCase{"values", BasisKind::kNone, BasisKind::kMatrix, 256, DType::kFloat32, 0}),
    [](const auto& named) { return std::string(named.param.name); });

}  // namespace
}  // namespace tierkv::testing
