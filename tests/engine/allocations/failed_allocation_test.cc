// SPDX-License-Identifier: Apache-2.0
// An allocation that fails anywhere in a call of a store in host memory: the call changes nothing,
// and the same call afterwards does what it does in a store where nothing has failed.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "codec/host/parallel.h"
#include "store/place/place.h"
#include "tierkv/half.h"
#include "tierkv/kv_store.h"

namespace {

std::atomic<int64_t> left_before_failure{-1};  // allocations; below 0: none fails any more

void* allocate(size_t bytes, size_t alignment) {
  return std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
}
void* allocate_or_throw(size_t bytes, size_t alignment) {
  void* memory = left_before_failure.fetch_sub(1) == 0 ? nullptr : allocate(bytes, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t n) {
  return allocate_or_throw(n, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
void* operator new(size_t n, std::align_val_t a) {
  return allocate_or_throw(n, static_cast<size_t>(a));
}
// Does not fail: std::stable_sort goes on without it.
void* operator new(size_t n, const std::nothrow_t&) noexcept {
  return allocate(n, __STDCPP_DEFAULT_NEW_ALIGNMENT__);
}
// Where GCC inlines it, GCC takes free() for a mistake.
[[gnu::noinline]] void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  operator delete(p);
}
void operator delete(void* p, std::align_val_t) noexcept {
  operator delete(p);
}
void operator delete(void* p, size_t, std::align_val_t) noexcept {
  operator delete(p);
}
void operator delete(void* p, const std::nothrow_t&) noexcept {
  operator delete(p);
}

namespace tierkv {
namespace {

constexpr int32_t kLayers = 2, kHeads = 2, kDim = 64;
// Allocations of a call that fail: its last ones, and about so many of those before them.
constexpr int64_t kLast = 60, kSampled = 20;

StoreConfig make_config(const BodyFormat& format) {
  StoreConfig config;
  config.layout.num_layers = kLayers;
  config.layout.num_q_heads = config.layout.num_kv_heads = kHeads;
  config.layout.head_dim = kDim;
  config.layout.sm_scale = 0.125f;
  config.max_sequences = 5;
  config.max_tokens = 1024;
  config.format = format;
  config.memory_bytes = int64_t{4} << 20;
  return config;
}

std::vector<uint16_t> make_tokens() {
  std::mt19937 rng(1);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> x(1024 * kHeads * kDim);
  for (uint16_t& value : x) value = float_to_half(normal(rng));
  return x;
}

struct World {
  explicit World(const StoreConfig& config) : store(std::move(*KvStore::create(config))) {
    ids.reserve(config.max_sequences);
  }

  std::unique_ptr<KvStore> store;
  std::vector<SequenceId> ids;
  int32_t chunk = 0;  // tokens that begin() announced last

  // What sequences export, or their layers decode where some still lack the chunk.
  std::vector<std::vector<uint8_t>> state() const {
    std::vector<std::vector<uint8_t>> state;
    for (const SequenceId& id : ids) {
      if (Result<std::vector<uint8_t>> bytes = store->export_sequence(id)) {
        state.push_back(std::move(*bytes));
        continue;
      }
      for (LayerRange range = {id}; range.layer < kLayers; ++range.layer) {
        range.end = *store->num_tokens(id);
        std::vector<uint8_t> x(size_t{4} * range.end * kHeads * kDim);
        range.k = x.data(), range.v = x.data() + x.size() / 2;
        if (!store->decode_range(range)) {
          range.end -= chunk;
          EXPECT_TRUE(store->decode_range(range));
        }
        state.push_back(std::move(x));
      }
    }
    const StoreUsage usage = *store->usage();
    std::string text;
    for (const int64_t x : {int64_t{usage.sequences}, usage.body_tokens, usage.ring_tokens,
                            usage.pages_free, usage.pages_shared, usage.nominal_bytes}) {
      text += std::to_string(x) + " ";
    }
    state.emplace_back(text.begin(), text.end());
    return state;
  }
};

class FailedAllocation : public testing::TestWithParam<BodyFormat> {
 protected:
  // `call` of both worlds. In one its allocations fail in turn, then the call succeeds.
  template <class Call>
  void both(const char* name, const Call& call) {
    if (HasFatalFailure()) return;
    SCOPED_TRACE(name);
    left_before_failure = INT64_MAX;
    const Status clean = call(&clean_);
    const int64_t sampled = INT64_MAX - left_before_failure.exchange(-1) - kLast;
    const int64_t stride = sampled / kSampled + 1;
    ASSERT_TRUE(clean) << clean.message();
    const auto before = world_.state();
    for (int64_t n = 0;; n += n < sampled ? stride : 1, ++failures_) {
      SCOPED_TRACE(n);
      left_before_failure = n;
      const Status s = store::without_bad_alloc([&] { return call(&world_); });
      const bool has_failed = left_before_failure.exchange(-1) < 0;
      ASSERT_EQ(s.is_ok(), !has_failed) << s.message();
      if (s) break;
      ASSERT_EQ(s.code(), StatusCode::kOutOfMemory) << s.message();
      ASSERT_TRUE(world_.state() == before);
    }
    ASSERT_TRUE(world_.state() == clean_.state());
  }

  static Status add(World* w, const Result<SequenceId>& id) {
    if (id) w->ids.push_back(*id);
    return id.status();
  }
  // Of the first two sequences.
  void append(int32_t first, int32_t count) {
    const auto list = [](World* w) { return SequenceList{w->ids.data(), 2}; };
    world_.chunk = clean_.chunk = count;
    both("begin", [&](World* w) { return w->store->begin(list(w), count); });
    for (int32_t l = 0; l < kLayers; ++l) {
      both("append", [&](World* w) {
        LayerAppend call;
        call.sequences = list(w);
        call.layer = l;
        call.tokens = count;
        call.k = tokens_.data() + first * kHeads * kDim;
        call.v = tokens_.data() + (first + l) * kHeads * kDim;
        return w->store->append(call);
      });
    }
  }

  const StoreConfig config_ = make_config(GetParam());
  const std::vector<uint16_t> tokens_ = make_tokens();
  World world_{config_}, clean_{config_};
  int64_t failures_ = 0;
};

TEST_P(FailedAllocation, ChangesNothing) {
  for (int32_t i = 0; i < 2; ++i) {
    both("add", [](World* w) { return add(w, w->store->add_sequence()); });
  }
  // The second chunk fixes a coded layer. The step moves every body, and a coded unit continues a
  // block.
  const int32_t chunk = 320 + config_.window_tokens - 8;
  append(0, 160);
  append(160, chunk - 160);
  append(chunk, 8);
  both("fork", [](World* w) { return add(w, w->store->fork(w->ids[0])); });
  both("attend", [&](World* w) {
    std::vector<uint16_t> out(2 * kHeads * kDim);
    LayerAttend call;
    call.sequences = {w->ids.data(), 2};
    call.layer = 1;
    call.q = tokens_.data();
    call.out = out.data();
    call.count_query = true;
    return w->store->attend(call);
  });
  both("truncate", [](World* w) { return w->store->truncate(w->ids[2], 150); });
  const std::vector<uint8_t> bytes = *world_.store->export_sequence(world_.ids[0]);
  const auto import = [&](World* w) {
    return add(w, w->store->import_sequence(bytes.data(), bytes.size()));
  };
  both("import", import);
  world_ = World(config_), clean_ = World(config_);
  both("import into an empty store", import);
  EXPECT_GT(failures_, 300);
}

INSTANTIATE_TEST_SUITE_P(Formats, FailedAllocation,
                         testing::Values(BodyFormat(CodedFormat{}), BodyFormat(TiersFormat{}),
                                         BodyFormat(ChannelFormat{})));

TEST(ParallelFor, DoesWithoutThreadsThatFindNoMemory) {
  bool threw = false;
  for (int64_t n = 0; n < 8; ++n) {
    std::atomic<int32_t> done{0};
    const auto count = [&] {
      parallel_for(100, 4, [&](int64_t) { ++done; });
      return Status::ok();
    };
    left_before_failure = n;
    const Status s = store::without_bad_alloc(count);
    left_before_failure = -1;
    threw |= !s;
    EXPECT_EQ(done, s ? 100 : 0);
  }
  EXPECT_TRUE(threw);
}

}  // namespace
}  // namespace tierkv
