// SPDX-License-Identifier: Apache-2.0
// What a store in device memory refuses, and what its kernels report.
#include "tests/gpu/device_array.cuh"
#include "tests/gpu/store/twin_choices.cuh"
#include "tests/gpu/store/twin_faults.cuh"

namespace tierkv::testing {
namespace {

// What values kernels refuse is told late, and the store goes on.
TEST(KvStoreFaults, SmallValuesAreToldLate) {
  std::mt19937 rng(1);
  KvTwins twins(twin_config(without_bodies(64, 1)), &rng);
  twins.add();
  TwinTokens x = twins.draw(1, 3);
  x.significance.clear();
  x.k[70] = 0x7e00;  // NaN, in layer 0
  const SequenceList one = {&twins.live()[0].device, 1};
  ASSERT_TRUE(twins.device().begin(one, 3));
  for (int32_t l = 0; l < 2; ++l) {
    ASSERT_TRUE(twins.device().append(twins.call(one, l, 3, x, &twins)));
  }
  const Status s = twins.device().take_status();
  EXPECT_EQ(s.code(), StatusCode::kNonFinite);
  EXPECT_NE(s.message().find("layer 0, kv_head 1"), std::string::npos) << s.message();
  EXPECT_TRUE(twins.device().take_status());
  x.k[70] = 0;
  ASSERT_TRUE(twins.host().begin({&twins.live()[0].host, 1}, 3));
  for (int32_t l = 0; l < 2; ++l) {
    ASSERT_TRUE(twins.host().append(twins.call({&twins.live()[0].host, 1}, l, 3, x, nullptr)));
  }
  twins.expect_equal();
}

TEST(KvStoreFaults, TellsWhatTheHostRefuses) {
  std::mt19937 rng(1);
  for (const BodyFormat& format :
       {BodyFormat{TiersFormat{}}, BodyFormat{CodedFormat{}}, BodyFormat{ChannelFormat{}}}) {
    TwinChoice choice = with(format, 128, 2, 4);
    choice.dtype = DType::kBFloat16;
    choice.raw_layers = {1};
    KvTwins t(twin_config(choice), &rng);
    expect_values_are_told(&t, 500, 12);
    expect_values_are_told(&t, 70, 6);  // few leave
  }
}

TEST(KvStoreFaults, SmallWhatADeviceLacksIsNamed) {
  std::mt19937 rng(1);
  TwinChoice choice = without_bodies(64, 1);
  KvTwins twins(twin_config(choice), &rng);
  twins.add();
  twins.extend({0}, 20);
  LayerAttend a;
  a.sequences = {&twins.live()[0].device, 1};
  a.q_len = 9;
  a.q = a.out = reinterpret_cast<void*>(256);
  ASSERT_EQ(cudaStreamBeginCapture(twins.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status refused[] = {twins.device().attend(a), twins.device().usage().status(),
                            twins.device().bytes_held(*a.sequences.ids).status()};
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(twins.stream(), &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  for (const Status& s : refused) {
    EXPECT_EQ(s.code(), StatusCode::kUnsupported);
    EXPECT_NE(s.message().find("captured"), std::string::npos) << s.message();
  }
  choice.group = 17;
  const auto wide = KvStore::create_device(twin_config(choice), twins.stream());
  EXPECT_EQ(wide.status().code(), StatusCode::kUnsupported);
}

// A graph would go on reading blocks as raw ones.
TEST(KvStoreFaults, SmallAttentionToLayersThatWaitIsNotCaptured) {
  std::mt19937 rng(1);
  KvTwins twins(twin_config(with(coded(64), 64, 3, 3)), &rng);
  twins.add();
  twins.extend({0}, 200);  // too few for codebooks
  const CacheLayout& l = twins.device().config().layout;
  const test::DeviceArray<uint16_t> q(
      std::vector<uint16_t>(static_cast<size_t>(l.num_q_heads) * l.head_dim));
  LayerAttend a;
  a.sequences = {&twins.live()[0].device, 1};
  a.q_len = 1;
  a.q = a.out = q.get();
  const auto capture = [&] {
    EXPECT_EQ(cudaStreamBeginCapture(twins.stream(), cudaStreamCaptureModeThreadLocal),
              cudaSuccess);
    const Status s = twins.device().attend(a);
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamEndCapture(twins.stream(), &graph), cudaSuccess);
    cudaGraphDestroy(graph);
    return s;
  };
  EXPECT_EQ(capture().code(), StatusCode::kInvalidArgument);
  twins.extend({0}, 300);
  KvTwins::expect_ok(capture());
}

// A replay for others would go on attending to the captured ones.
TEST(KvStoreFaults, SmallAStepIsCapturedForItsSequencesAlone) {
  std::mt19937 rng(1);
  KvTwins twins(twin_config(with(coded(64), 64, 3, 3)), &rng);
  twins.add(), twins.add();
  twins.extend({0, 1}, 500);
  const CacheLayout& l = twins.device().config().layout;
  const test::DeviceArray<uint16_t> x(
      std::vector<uint16_t>(static_cast<size_t>(2 * l.num_q_heads) * l.head_dim));
  const SequenceId ids[] = {twins.live()[0].device, twins.live()[1].device};
  LayerAppend append;
  append.sequences = {ids, 2};
  append.tokens = 1;
  append.k = append.v = x.get();
  LayerAttend other;
  other.sequences = {ids + 1, 1};
  other.q_len = 1;
  other.q = other.out = x.get();
  LayerAttend own = other;
  own.sequences = {ids, 2};
  // Behind attention none is.
  ASSERT_EQ(cudaStreamBeginCapture(twins.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status first = twins.device().attend(own), late = twins.device().begin({ids, 2}, 1);
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(twins.stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  KvTwins::expect_ok(first);
  EXPECT_EQ(late.code(), StatusCode::kUnsupported) << late.message();
  ASSERT_EQ(cudaStreamBeginCapture(twins.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status begun = twins.device().begin({ids, 2}, 1), appended = twins.device().append(append),
               refused = twins.device().attend(other), attended = twins.device().attend(own);
  ASSERT_EQ(cudaStreamEndCapture(twins.stream(), &graph), cudaSuccess);
  cudaGraphDestroy(graph);
  KvTwins::expect_ok(begun);
  KvTwins::expect_ok(appended);
  EXPECT_EQ(refused.code(), StatusCode::kUnsupported) << refused.message();
  KvTwins::expect_ok(attended);
}

TEST(KvStoreFaults, SmallCallsOnAnotherDeviceAreRefused) {
  int count = 0;
  ASSERT_EQ(cudaGetDeviceCount(&count), cudaSuccess);
  if (count < 2) GTEST_SKIP() << "one device";
  for (const int device : {0, 1}) {
    ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
    std::mt19937 rng(1);
    KvTwins twins(twin_config(with(coded(64), 64, 3, 3)), &rng);
    twins.add();
    twins.extend({0}, 500);
    const TwinTokens x = twins.draw(1, 3);
    KvStore& store = twins.device();
    SequenceId id = twins.live()[0].device;
    const SequenceList one = {&id, 1};
    const LayerAppend append = twins.call(one, 0, 3, x, &twins);
    LayerAttend attend;
    attend.sequences = one;
    attend.q_len = 1;
    attend.q = attend.out = const_cast<void*>(append.k);
    LayerRange range;
    range.sequence = id;
    range.end = 3;
    range.k = range.v = attend.out;
    const std::vector<uint8_t> bytes = *store.export_sequence(id);
    ASSERT_EQ(cudaSetDevice(1 - device), cudaSuccess);
    const Status refused[] = {store.add_sequence().status(),
                              store.begin(one, 3),
                              store.attend(attend),
                              store.decode_range(range),
                              store.note_replay(one, 1),
                              store.take_status(),
                              store.fork(id).status(),
                              store.truncate(id, 3),
                              store.release(id),
                              store.usage().status(),
                              store.bytes_held(id).status(),
                              store.export_sequence(id).status(),
                              store.import_sequence(bytes.data(), bytes.size()).status()};
    const auto expect_refused = [](const Status& s) {
      EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(s.message().find("current device"), std::string::npos) << s.message();
    };
    for (const Status& s : refused) expect_refused(s);
    ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
    KvTwins::expect_ok(store.begin(one, 3));
    ASSERT_EQ(cudaSetDevice(1 - device), cudaSuccess);
    expect_refused(store.append(append));
    ASSERT_EQ(cudaSetDevice(device), cudaSuccess);
    KvTwins::expect_ok(store.truncate(id, 500));
    twins.extend({0}, 100);
    twins.expect_equal();
  }
  ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
}

}  // namespace
}  // namespace tierkv::testing
