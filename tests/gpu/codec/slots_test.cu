// SPDX-License-Identifier: Apache-2.0
// An engine's cache on the GPU, against the host: the bytes and values of
// codec/format/block_cache.h. Tests named Small* are small enough for compute-sanitizer.
#include "tests/gpu/device_array.cuh"
#include "tests/support/block_world.h"
#include "tests/support/fresh_random.h"

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess) << cudaGetErrorString(cudaGetLastError())

namespace tierkv {
namespace {

using test::BlockShape;
using test::BlockWorld;
using test::DeviceArray;

constexpr int32_t kHeadDims[] = {64, 96, 128, 256};
const char* const kFormats[] = {"k16v16", "k8v4", "k4v4", "k4v2", "k4v2n", "k2nv8"};

// The cache of a world on the device, with its bytes.
struct DeviceCache {
  explicit DeviceCache(const BlockWorld& w)
      : bytes(std::vector<uint8_t>(w.cache.base,
                                   w.cache.base + w.cache.num_blocks * w.cache.block_stride)),
        reflections(w.reflections),
        errors(kEngineErrors, 0),
        cache(w.cache) {
    cache.base = bytes.get();
    if (cache.key_reflection != nullptr) cache.key_reflection = reflections.get();
  }
  DeviceArray<uint8_t> bytes;
  DeviceArray<float> reflections;
  DeviceArray<int32_t> errors;
  BlockCache cache;
};

class Slots : public RandomTest {
 protected:
  int32_t uniform(int32_t lo, int32_t hi) {
    return std::uniform_int_distribution<int32_t>(lo, hi)(rng_);
  }
  BlockShape shape_of(int32_t head_dim, const char* format) {
    BlockShape s;
    s.format = format;
    s.head_dim = head_dim;
    s.num_kv_heads = uniform(1, 8);
    s.block_tokens = uniform(0, 3) == 0 ? 16 : 64;
    s.rotate = uniform(0, 3) > 0;
    s.has_reflections = uniform(0, 3) > 0;
    s.layers_apart = uniform(1, 2);
    s.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
    return s;
  }
  // Copies the tokens of a call to the device and encodes them there.
  static void encode(const SlotEncode& host, const BlockWorld::Tokens& t, DeviceCache* device,
                     cudaStream_t stream = nullptr) {
    const DeviceArray<uint16_t> k(t.k), v(t.v);
    const DeviceArray<int64_t> slots(t.slots);
    SlotEncode e = host;
    e.cache = device->cache;
    e.k = k.get();
    e.v = v.get();
    e.slots = slots.get();
    e.errors = device->errors.get();
    ASSERT_TRUE(encode_slots(e, stream));
    ASSERT_CUDA(cudaDeviceSynchronize());
  }
  static void expect_bytes(const BlockWorld& w, const DeviceCache& device) {
    const std::vector<uint8_t> got = device.bytes.read();
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(int{got[i]}, int{w.cache.base[i]}) << "byte " << i;
    }
    EXPECT_EQ(device.errors.read(), w.errors);
  }
  // Steps of two sequences: chunks, single tokens, refused drafts, padding.
  void trace(const BlockShape& given, int32_t calls, int32_t longest) {
    BlockShape shape = given;
    SCOPED_TRACE(shape.format + " dim " + std::to_string(shape.head_dim));
    BlockWorld w(shape, rng_);
    w.k[rng_() % w.k.size()] = shape.dtype == DType::kFloat16 ? 0x7e00 : 0x7fc0;
    w.v[rng_() % w.v.size()] = shape.dtype == DType::kFloat16 ? 0xfc00 : 0xff80;
    DeviceCache device(w);
    std::vector<int32_t> next(shape.tokens.size(), 0);
    for (int32_t call = 0; call < calls; ++call) {
      BlockWorld::Tokens tokens;
      for (size_t s = 0; s < next.size(); ++s) {
        const int32_t from = next[s] - std::min(next[s], uniform(0, 3));
        const int32_t count = std::min(shape.tokens[s] - from,
                                       uniform(0, 2) == 0 ? uniform(0, longest) : uniform(0, 2));
        for (int32_t t = from; t < from + count; ++t) w.add(&tokens, static_cast<int32_t>(s), t);
        next[s] = from + count;
      }
      w.add(&tokens, 0, 0);
      tokens.slots.back() = -uniform(1, 2);
      if (uniform(0, 2) == 0) std::shuffle(tokens.slots.begin(), tokens.slots.end(), rng_);
      const SlotEncode e = w.encode(tokens);
      ASSERT_TRUE(encode_slots_host(e));
      encode(e, tokens, &device);
      expect_bytes(w, device);
      if (HasFatalFailure()) return;
    }
  }
};

TEST_F(Slots, SmallTracesWriteTheBytesOfTheHost) {
  for (const int32_t head_dim : kHeadDims) {
    for (const char* format : kFormats) {
      BlockShape shape = shape_of(head_dim, format);
      shape.tokens = {uniform(20, 70), uniform(1, 20)};
      trace(shape, 3, 40);
      if (HasFatalFailure()) return;
    }
  }
}

TEST_F(Slots, LongPromptsWriteTheBytesOfTheHost) {
  for (const int32_t head_dim : kHeadDims) {
    BlockShape shape = shape_of(head_dim, kFormats[uniform(1, 5)]);
    shape.tokens = {2000, 700, 1, 90};
    trace(shape, 8, 2000);
    if (HasFatalFailure()) return;
  }
}

TEST_F(Slots, SmallRangesReadTheValuesOfTheHost) {
  for (const int32_t head_dim : kHeadDims) {
    for (const char* format : kFormats) {
      SCOPED_TRACE(std::string(format) + " dim " + std::to_string(head_dim));
      BlockShape shape = shape_of(head_dim, format);
      shape.tokens = {140, 61};
      BlockWorld w(shape, rng_);
      w.encode_all();
      if (uniform(0, 1) == 1) w.table[w.columns] = uniform(0, 1) == 1 ? -1 : 1 << 30;
      DeviceCache device(w);
      const std::vector<int32_t> sequences = {1, 0, 5}, first = {uniform(0, 4), uniform(0, 20), 0};
      const std::vector<int32_t> starts = {0, 50, 150, 152};
      std::vector<uint16_t> k(starts.back() * w.head_elements() + 8), v = k;
      const auto aligned = [](std::vector<uint16_t>& x) {
        return x.data() + (16 - reinterpret_cast<uintptr_t>(x.data()) % 16) % 16 / 2;
      };
      BlockDecode d;
      d.cache = w.cache;
      d.block_table = w.table.data();
      d.table_stride = w.columns;
      d.num_sequences = 2;
      d.sequences = sequences.data();
      d.first = first.data();
      d.starts = starts.data();
      d.count = 3;
      d.max_tokens = 100;
      d.num_rows = starts.back();
      d.k = aligned(k);
      d.v = aligned(v);
      d.dtype = uniform(0, 1) == 1 ? DType::kBFloat16 : DType::kFloat16;
      d.errors = w.errors.data();
      ASSERT_TRUE(decode_blocks_host(d));
      const size_t elements = starts.back() * w.head_elements();
      const DeviceArray<int32_t> table(w.table), names(sequences), from(first), ends(starts);
      const DeviceArray<uint16_t> k_out(elements, 0x5a), v_out(elements, 0x5a);
      BlockDecode on_device = d;
      on_device.cache = device.cache;
      on_device.block_table = table.get();
      on_device.sequences = names.get();
      on_device.first = from.get();
      on_device.starts = ends.get();
      on_device.k = k_out.get();
      on_device.v = v_out.get();
      on_device.errors = device.errors.get();
      ASSERT_TRUE(decode_blocks(on_device, nullptr));
      const std::vector<uint16_t> got_k = k_out.read(), got_v = v_out.read();
      for (size_t i = 0; i < elements; ++i) {
        ASSERT_EQ(got_k[i], aligned(k)[i]) << "key element " << i;
        ASSERT_EQ(got_v[i], aligned(v)[i]) << "value element " << i;
      }
      EXPECT_EQ(device.errors.read(), w.errors);
    }
  }
}

// The same call with other slots in the same array.
TEST_F(Slots, AGraphFollowsItsSlots) {
  BlockShape shape = shape_of(128, "k4v4");
  shape.tokens = {64, 64};
  BlockWorld w(shape, rng_);
  DeviceCache device(w);
  BlockWorld::Tokens tokens;
  for (int32_t t = 0; t < 20; ++t) w.add(&tokens, 0, t);
  const DeviceArray<uint16_t> k(tokens.k), v(tokens.v);
  DeviceArray<int64_t> slots(tokens.slots);
  SlotEncode e = w.encode(tokens);
  e.cache = device.cache;
  e.k = k.get();
  e.v = v.get();
  e.slots = slots.get();
  e.errors = device.errors.get();
  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  ASSERT_TRUE(encode_slots(e, stream));
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  for (const int32_t sequence : {0, 1}) {
    for (size_t i = 0; i < tokens.slots.size(); ++i) {
      tokens.slots[i] = i > 17 ? -1 : w.slot(sequence, static_cast<int32_t>(i));
    }
    slots.write(tokens.slots);
    ASSERT_TRUE(encode_slots_host(w.encode(tokens)));
    ASSERT_CUDA(cudaGraphLaunch(replay, stream));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    expect_bytes(w, device);
  }
  cudaGraphExecDestroy(replay);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace tierkv
