// The kernels of tiers rows, run on the host over memory laid out as a device's, beside the rows in
// host memory: the same bytes in pages and slots after every call. What it cannot see is warps that
// run at one time.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include "store/rows/tiers/device_tiers_counts.cuh"
#include "store/rows/tiers/device_tiers_kernels.cuh"
#include "store/rows/tiers/device_tiers_read.cuh"
#include "store/rows/tiers/tiers_rows.h"
#include "tests/engine/support/device_twin.h"
#include "tests/engine/support/tiers_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store {

__align__(16) uint8_t shared_bytes[kTiersWarps * 256 * sizeof(uint16_t)];

namespace {

// A store, and its bodies in memory of their own, which kernels write.
class TiersTwin {
 public:
  TiersTwin(const StoreConfig& config, std::mt19937* rng)
      : config_(config), rng_(*rng), host_(config), twin_(config, host_.place), rows_(config) {
    EXPECT_TRUE(rows_.prepare());
    call_.view = twin_.view();
    call_.fault = &fault_;
    TiersCodes& codes = call_.codes;
    codes.shape = rows_.shape();
    std::copy(rows_.classes().begin(), rows_.classes().end(), codes.classes);
    codes.class_of_head = rows_.class_of_head().data();
    for (const Component c : {Component::kKey, Component::kValue}) {
      if (rows_.bases(c).empty()) continue;
      codes.rotation[static_cast<int32_t>(c)] = hadamard_rotation(config.layout.head_dim);
      for (const Basis& basis : rows_.bases(c)) {
        if (c == Component::kKey) means_.insert(means_.end(), basis.mean.begin(), basis.mean.end());
      }
    }
    if (!means_.empty()) codes.key_means = means_.data();
  }

  void add() { live_.push_back({*host_.engine->add_sequence(), {}}); }

  // A call for several sequences that are equally complete.
  void extend(const std::vector<int32_t>& places, int32_t tokens, bool significance) {
    std::vector<SequenceId> ids;
    for (const int32_t i : places) ids.push_back(live_[i].id);
    const SequenceList list = {ids.data(), static_cast<int32_t>(ids.size())};
    const bool is_step = tokens <= kMaxStepTokens;
    const CacheLayout& shape = config_.layout;
    // [layers][count] chunks, each as the host takes them.
    TiersChunk chunk = tiers_chunk(config_, tokens * list.count, significance, &rng_);
    if (is_step) {
      set_works(places, 0, shape.num_layers, tokens, true);
      run_plan();
    }
    ASSERT_TRUE(host_.engine->begin(list, tokens));
    if (is_step) run_write();
    const int64_t values = int64_t{tokens} * list.count * shape.num_kv_heads * shape.head_dim;
    for (int32_t l = 0; l < shape.num_layers; ++l) {
      LayerAppend call;
      call.sequences = list;
      call.layer = l;
      call.tokens = tokens;
      call.k = chunk.k.data() + l * values;
      call.v = chunk.v.data() + l * values;
      call.stride = tokens;
      if (significance) {
        call.significance =
            chunk.significance.data() + int64_t{l} * shape.num_kv_heads * list.count * tokens;
      }
      if (!is_step) {
        set_works(places, l, 1, tokens, false);
        DeviceChunk& of = call_.works.chunk;
        of.k = static_cast<const uint16_t*>(call.k);
        of.v = static_cast<const uint16_t*>(call.v);
        of.significance = call.significance;
        of.stride = call.stride;
        of.dtype = shape.dtype;
        of.tokens = tokens;
        run_plan();
      }
      const Status s = host_.engine->append(call);
      ASSERT_TRUE(s) << s.message();
      if (!is_step) run_write();
      if (::testing::Test::HasFatalFailure()) return;
    }
    for (const int32_t i : places) live_[i].at = after_append(twin_.laws(), live_[i].at, tokens);
    compare();
  }

  void fork(int32_t place) {
    const Result<SequenceId> id = host_.engine->fork(live_[place].id);
    ASSERT_TRUE(id);
    twin_.fork(live_[place].id.slot, id->slot);
    live_.push_back({*id, live_[place].at});
    compare();
  }

  void truncate(int32_t place, int32_t tokens) {
    Live& live = live_[place];
    const LayerTokens to = after_truncate(twin_.laws(), live.at, tokens);
    set_works({place}, 0, config_.layout.num_layers, 0, false);
    to_.assign(config_.layout.num_layers, to);
    target_ = twin_.counts_of(slots_);
    call_.counts.target = target_.data();
    run(call_.num_rows, [&] { count_cut_tiers_kernel(call_); });
    ASSERT_TRUE(host_.engine->truncate(live.id, tokens));
    twin_.take_tables();
    ASSERT_EQ(target_, twin_.counts_of(slots_));
    run(call_.num_rows, [&] { cut_tiers_kernel(call_); });
    live.at = to;
    compare();
  }

  // Some of a layer's body.
  void read(int32_t place) {
    const CacheLayout& shape = config_.layout;
    const LayerTokens at = live_[place].at;
    if (body_count(twin_.laws(), at) == 0) return;
    LayerRange range;
    range.layer = pick(0, shape.num_layers - 1);
    range.first = pick(config_.sink_tokens, at.body_end - 1);
    range.end = pick(range.first + 1, least(at.body_end, range.first + 40));
    range.dtype = pick(0, 1) == 0 ? DType::kFloat16 : DType::kBFloat16;
    const size_t values =
        size_t{1} * (range.end - range.first) * shape.num_kv_heads * shape.head_dim;
    std::vector<uint16_t> host_k(values), host_v(values);
    std::vector<uint4> k(values / 8), v(values / 8);
    range.k = host_k.data();
    range.v = host_v.data();
    ASSERT_TRUE(host_.place->decode(range, {live_[place].id.slot, range.layer, at, at}));
    TiersRead r;
    r.view = call_.view;
    r.codes = call_.codes;
    r.slot = live_[place].id.slot;
    r.layer = range.layer;
    r.range = {range.first, range.end};
    r.dtype = range.dtype;
    r.k = reinterpret_cast<uint16_t*>(k.data());
    r.v = reinterpret_cast<uint16_t*>(v.data());
    r.groups_of_row = (range.end + kGroupPositions - 1) / kGroupPositions;
    groups_.assign(size_t{1} * shape.num_kv_heads * r.groups_of_row, {{-999, -999}});
    r.groups = groups_.data();
    run(shape.num_kv_heads, [&] { count_groups_kernel(r); });
    run(r.range.count() * shape.num_kv_heads, [&] { read_tiers_kernel(r); });
    EXPECT_EQ(std::memcmp(r.k, host_k.data(), 2 * values), 0);
    EXPECT_EQ(std::memcmp(r.v, host_v.data(), 2 * values), 0);
  }

  // Queries that count.
  void attend(int32_t place) {
    const CacheLayout& shape = config_.layout;
    std::normal_distribution<float> normal;
    for (int32_t l = 0; l < shape.num_layers; ++l) {
      std::vector<uint16_t> q, out(size_t{1} * shape.num_q_heads * shape.head_dim);
      for (size_t i = 0; i < out.size(); ++i) q.push_back(float_to_half(normal(rng_)));
      LayerAttend call;
      call.sequences = {&live_[place].id, 1};
      call.layer = l;
      call.q = q.data();
      call.out = out.data();
      call.count_query = true;
      const Status s = host_.engine->attend(call);
      ASSERT_TRUE(s) << s.message();
    }
  }

  int32_t tokens(int32_t place) const { return live_[place].at.tokens; }
  int32_t count() const { return static_cast<int32_t>(live_.size()); }

 private:
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
  struct Live {
    SequenceId id;
    LayerTokens at;
  };

  void set_works(const std::vector<int32_t>& places, int32_t first_layer, int32_t layers,
                 int32_t tokens, bool is_step) {
    slots_.clear(), from_.clear(), to_.clear();
    DeviceWorks& w = call_.works = {};
    for (const int32_t i : places) {
      const LayerTokens from = live_[i].at;
      LayerTokens to = after_append(twin_.laws(), from, tokens);
      if (is_step) to.tokens = from.tokens;
      slots_.push_back(live_[i].id.slot);
      from_.insert(from_.end(), layers, from);
      to_.insert(to_.end(), layers, to);
      w.most_leaving = std::max(w.most_leaving, to.body_end - from.body_end);
      w.most_tokens = std::max(w.most_tokens, to.tokens);
    }
    w.slots = slots_.data();
    w.from = from_.data();
    w.to = to_.data();
    w.count = static_cast<int32_t>(places.size());
    w.first_layer = first_layer;
    w.num_layers = layers;
    call_.num_rows = w.entries() * config_.layout.num_kv_heads;
  }

  // Warps in random order of CTAs.
  template <class Kernel>
  void run(int32_t warps, const Kernel& kernel) {
    std::vector<int32_t> ctas((warps + kTiersWarps - 1) / kTiersWarps);
    std::iota(ctas.begin(), ctas.end(), 0);
    std::shuffle(ctas.begin(), ctas.end(), rng_);
    for (const int32_t i : ctas) emulator::cta().run(i, kTiersThreads, kernel);
  }

  void run_plan() {
    twin_.take_raw();
    target_ = twin_.counts_of(slots_);
    call_.counts.target = target_.data();
    call_.scratch.groups_of_row = most_groups(call_.works.most_leaving);
    drafts_.assign(call_.num_rows, {});
    groups_.assign(size_t{1} * call_.num_rows * call_.scratch.groups_of_row, {{-999, -999}});
    call_.scratch.drafts = drafts_.data();
    call_.scratch.groups = groups_.data();
    if (call_.works.most_leaving == 0) return;
    run(call_.num_rows, [&] { plan_tiers_kernel(call_); });
    run(call_.num_rows * call_.works.most_leaving, [&] { check_tiers_kernel(call_); });
  }
  // The host has done its work: tables have the pages.
  void run_write() {
    twin_.take_tables();
    ASSERT_EQ(target_, twin_.counts_of(slots_));
    if (call_.works.most_leaving == 0) return;
    run(call_.num_rows * call_.works.most_leaving, [&] { write_tiers_kernel(call_); });
  }

  void compare() {
    ASSERT_EQ(fault_.status, StatusCode::kOk);
    for (const Live& live : live_) {
      for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
        twin_.compare_state(live.id.slot, l);
        if (::testing::Test::HasFatalFailure()) return;
        for (int32_t h = 0; h < config_.layout.num_kv_heads; ++h) {
          const RowClass& c =
              rows_.classes()[rows_.class_of_head()[l * config_.layout.num_kv_heads + h]];
          twin_.compare_pages(live.id.slot, l, h, {c.layout[0].scores, c.layout[1].scores});
          if (::testing::Test::HasFatalFailure()) return;
        }
      }
    }
  }

  StoreConfig config_;
  std::mt19937& rng_;
  OpenStore host_;
  test::DeviceTwin twin_;
  TiersRows rows_;
  std::vector<float> means_;
  TiersCall call_;
  DeviceFault fault_ = {StatusCode::kOk, -1, -1, -1};
  std::vector<Live> live_;
  std::vector<int32_t> slots_;
  std::vector<LayerTokens> from_, to_;
  std::vector<SideCounts> target_;
  std::vector<TiersDraft> drafts_;
  std::vector<SideTokens> groups_;
};

class EmulatedTiersRows : public RandomTest {
 protected:
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
};

TEST_F(EmulatedTiersRows, BytesAreTheHosts) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const bool raw : {false, true}) {
      const StoreConfig config = tiers_config(head_dim, 2000, raw, &rng_);
      SCOPED_TRACE(::testing::Message() << "head_dim " << head_dim << ", raw layer " << raw);
      TiersTwin twin(config, &rng_);
      twin.add();
      twin.add();
      for (int32_t i = 0; i < 12; ++i) {
        if (i == 5) twin.fork(0);
        std::vector<int32_t> places = {pick(0, twin.count() - 1)};
        if (i > 5 && pick(0, 2) == 0) {
          twin.truncate(places[0], pick(1, twin.tokens(places[0])));
          if (HasFatalFailure()) return;
        }
        if (pick(0, 2) == 0) places = {1, 0};
        int32_t room = config.max_tokens;
        for (const int32_t p : places) room = std::min(room, config.max_tokens - twin.tokens(p));
        const int32_t tokens = std::min(room, i < 3             ? pick(9, 150)
                                              : pick(0, 3) == 0 ? pick(9, 90)
                                                                : pick(1, 8));
        if (tokens == 0) continue;
        twin.extend(places, tokens, pick(0, 2) > 0);
        if (HasFatalFailure()) return;
        twin.read(places[0]);
        if (pick(0, 1) == 1) twin.attend(places[0]);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv::store
