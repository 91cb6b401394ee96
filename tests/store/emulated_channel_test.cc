// The kernels of attention over channel blocks, their source run on the host over the pages of a
// host store, beside that store's attention in double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "attention/channel/channel_kernel.cuh"
#include "attention/channel/channel_plan_kernel.cuh"
#include "codec/format/element.h"
#include "store/channel/channel_device_state.h"
#include "store/channel/channel_host.h"
#include "tests/store/support/channel_plan_host.h"
#include "tests/store/support/channel_store_world.h"
#include "tests/support/random_input.h"

namespace tierkv {

__align__(128) uint8_t shared_bytes[1 << 17];

namespace testing {
namespace {

// What a plan is of, and room for it that is poisoned.
struct PlanWorld {
  std::vector<ChannelSequence> sequences;
  std::vector<ChannelItem> items;
  std::vector<ChannelParts> parts;
  StatusCode status = StatusCode::kOk;

  ChannelPlanCall call(ChannelPlanCall c) {
    c.sequences = sequences.data();
    c.num_sequences = static_cast<int32_t>(sequences.size());
    c.plan = {static_cast<int32_t>(items.size()), items.data(), parts.data()};
    c.status = &status;
    return c;
  }
  void make_room(int32_t num_items, int32_t num_rows) {
    items.assign(num_items, {-9, -9, -9, -9, -9, -9, {-9, -9}});
    parts.assign(num_rows, {-9, -9});
  }
};

void emulate_plan(const ChannelPlanCall& call) {
  std::fill_n(shared_bytes, sizeof(ChannelPlanShared), 0xff);
  emulator::cta().run(0, kChannelPlanThreads, [&] { channel_plan_kernel(call); });
}

bool is_same(const ChannelItem& a, const ChannelItem& b) {
  return a.row == b.row && a.table_row == b.table_row && a.first == b.first && a.end == b.end &&
         a.raw_tokens == b.raw_tokens && a.part == b.part;
}

// Every unit of every row is in one item, the items of a row differ by a unit at most, none is
// larger than the largest has to be, and parts are dealt out without gaps.
void expect_covers(PlanWorld& w, const ChannelPlanCall& call) {
  const int32_t heads = call.num_kv_heads;
  std::vector<int32_t> next(w.parts.size(), 0), seen(w.parts.size(), 0);
  int32_t parts = 0;
  for (const ChannelItem& item : w.items) {
    if (item.row < 0) continue;
    const ChannelSequence& s = w.sequences[item.row / heads];
    const bool sound = is_sound(call, s);
    const int32_t units = sound ? s.units() : 0, count = w.parts[item.row].count;
    EXPECT_EQ(item.table_row, sound && s.table_row >= 0 ? s.table_row + item.row % heads : -1);
    EXPECT_EQ(item.first, next[item.row]);
    EXPECT_LE(std::abs(item.end - item.first - units / count), 1);
    EXPECT_EQ(item.part, count == 1 ? -1 : w.parts[item.row].first + seen[item.row]);
    next[item.row] = item.end;
    ++seen[item.row];
    parts += item.part >= 0 ? 1 : 0;
  }
  for (size_t row = 0; row < w.parts.size(); ++row) {
    const ChannelSequence& s = w.sequences[row / heads];
    EXPECT_EQ(next[row], is_sound(call, s) ? s.units() : 0) << "row " << row;
    EXPECT_EQ(seen[row], w.parts[row].count);
  }
  EXPECT_LE(parts, 2 * static_cast<int32_t>(w.items.size() - w.parts.size()));
}

TEST(EmulatedChannelPlan, IsTheHostsAndCoversEveryRow) {
  RandomInput input;
  for (int32_t i = 0; i < 60; ++i) {
    const int32_t count = i < 5 ? 600 + i : input.uniform(1, 40);
    ChannelPlanCall shape;
    shape.num_kv_heads = input.uniform(1, 4);
    shape.team = 1 << input.uniform(0, 2);
    shape.most_blocks = i % 3 == 0 ? 40 : 2000;
    shape.most_raw_tokens = 200;
    shape.num_table_rows = 3000;
    PlanWorld host;
    for (int32_t s = 0; s < count; ++s) {
      ChannelSequence x = {input.uniform(0, 2900), input.uniform(0, shape.most_blocks),
                           input.uniform(0, 200)};
      if (i % 4 == 0 && input.chance(0.7)) x.blocks /= 50;
      if (input.chance(0.05)) x = {};
      if (input.chance(0.05)) x.blocks = x.raw_tokens = 0;
      if (i % 5 == 0 && input.chance(0.1)) x.blocks = input.chance(0.5) ? -1 : 2001;
      if (i % 5 == 0 && input.chance(0.1)) x.table_row = input.chance(0.5) ? -2 : 2999;
      if (i % 5 == 0 && input.chance(0.1)) x.raw_tokens = input.chance(0.5) ? -1 : 201;
      host.sequences.push_back(x);
    }
    const int32_t rows = count * shape.num_kv_heads;
    host.make_room(rows + input.uniform(0, i % 2 == 0 ? 2000 : 40), rows);
    PlanWorld device = host;
    ASSERT_TRUE(plan_channel_host(host.call(shape)));
    emulate_plan(device.call(shape));
    EXPECT_EQ(host.status, device.status);
    const bool sound = std::all_of(host.sequences.begin(), host.sequences.end(),
                                   [&](const auto& s) { return is_sound(host.call(shape), s); });
    EXPECT_EQ(host.status, sound ? StatusCode::kOk : StatusCode::kCorrupt);
    for (size_t j = 0; j < host.items.size(); ++j) {
      ASSERT_TRUE(is_same(host.items[j], device.items[j])) << "item " << j << " of plan " << i;
    }
    for (size_t j = 0; j < host.parts.size(); ++j) {
      ASSERT_EQ(host.parts[j].first, device.parts[j].first);
      ASSERT_EQ(host.parts[j].count, device.parts[j].count);
    }
    expect_covers(host, host.call(shape));
    if (::testing::Test::HasFailure()) return;
  }
}

// As many items as lengths ask for: one for each slot of a device where few equal rows are long.
TEST(ChannelItems, FollowTheLengths) {
  const ChannelCtas ctas = channel_ctas(4, 1, 8, 128);
  EXPECT_EQ(choose_channel_items(ctas, {64 * 68, 68}, 512, 396), 1536);
  EXPECT_EQ(choose_channel_items(ctas, {8 * 516, 516}, 64, 396), 384);
  EXPECT_LE(choose_channel_items(ctas, {516, 516}, 8, 396), 396);
  EXPECT_GE(choose_channel_items(ctas, {516, 516}, 8, 396), 300);
  EXPECT_EQ(choose_channel_items(ctas, {0, 0}, 24, 396), 24);
  EXPECT_LE(choose_channel_items(ctas, {3 + 1 + 1, 3}, 24, 396), 24 + 10);
  const int32_t ragged = choose_channel_items(ctas, {64 * 250, 512}, 512, 396);
  EXPECT_GT(ragged, 3 * 396);
  EXPECT_LE(ragged, ctas.most_items(512));
}

KvStoreConfig emulated_config(int32_t head_dim, int32_t group) {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_kv_heads = 2;
  c.layout.num_q_heads = 2 * group;
  c.layout.head_dim = head_dim;
  c.layout.sm_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  c.policy.window_tokens = 24;
  c.num_pages = 300;
  c.max_sequences = 4;
  c.max_tokens = 700;
  c.channel.enabled = true;
  return c;
}

// A host store of sequences of these lengths, the last few tokens of each in steps.
class EmulatedStore {
 public:
  EmulatedStore(const KvStoreConfig& config, const std::vector<int32_t>& lengths,
                RandomInput* input)
      : config_(config), input_(input) {
    auto store = ChannelHostStore::make(config);
    EXPECT_TRUE(store.is_ok()) << store.status().message();
    store_ = std::move(*store);
    for (const int32_t tokens : lengths) {
      ids_.push_back(*store_->add_sequence());
      const SequenceList one = {&ids_.back(), 1};
      const int32_t in_steps = std::min(tokens, 9);
      if (tokens > in_steps) {
        EXPECT_TRUE(store_->begin_prompt(one, tokens - in_steps));
        append(one, tokens - in_steps);
      }
      EXPECT_TRUE(store_->end_prompt(one));
      for (int32_t done = 0; done < in_steps; done += 3) {
        const int32_t step = std::min(3, in_steps - done);
        EXPECT_TRUE(store_->begin_step(one, step));
        append(one, step);
      }
    }
  }

  // "" or how the kernels' results differ from the store's.
  std::string difference(AttendRequest request, std::mt19937* order) {
    const CacheLayout& l = config_.layout;
    request.sequences = {ids_.data(), static_cast<int32_t>(ids_.size())};
    const size_t heads = ids_.size() * request.q_len * l.num_q_heads;
    std::vector<uint16_t> q(heads * l.head_dim), out(q.size(), 0x7e00), expected(out);
    for (uint16_t& x : q) x = float_to_raw(request.dtype, input_->real(-1, 1));
    std::vector<float> lse(heads, NAN), expected_lse(lse), sinks(l.num_q_heads, -INFINITY);
    for (float& x : sinks) {
      if (input_->chance(0.7)) x = input_->real(-2, 2);
    }
    if (input_->chance(0.5)) request.sinks = sinks.data();
    request.q = q.data();
    request.out = expected.data();
    request.lse = expected_lse.data();
    if (const Status s = store_->attend(request); !s) return s.message();
    request.out = out.data();
    request.lse = lse.data();
    emulate(request, order);
    // As ChannelTwins::output_difference() has it; bfloat16 outputs are rounded to 2^-9.
    const double score = 1.01 * 6 * 0x1p-11 * 2 / std::sqrt(3) * std::sqrt(l.head_dim) * l.sm_scale;
    const double rounding = request.dtype == DType::kBFloat16 ? 0x1p-8 : 0;
    const double value = 2 * (3 * 0x1p-11 + rounding + 2 * std::expm1(2 * score));
    for (size_t i = 0; i < heads; ++i) {
      if (std::isinf(lse[i]) && lse[i] == expected_lse[i]) continue;
      if (!(std::fabs(lse[i] - expected_lse[i]) <= score + 1e-5 * std::fabs(lse[i]))) {
        return "lse " + std::to_string(lse[i]) + " for " + std::to_string(expected_lse[i]) +
               " at " + std::to_string(i);
      }
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const double x = raw_to_float(request.dtype, expected[i]),
                   y = raw_to_float(request.dtype, out[i]);
      if (!(std::fabs(x - y) <= value)) {
        return "out " + std::to_string(y) + " for " + std::to_string(x) + " at " +
               std::to_string(i);
      }
    }
    return "";
  }
  int32_t most_splits() const { return most_splits_; }

 private:
  void append(SequenceList list, int32_t tokens) {
    const CacheLayout& l = config_.layout;
    for (int32_t layer = 0; layer < l.num_layers; ++layer) {
      std::vector<uint16_t> k, v;
      const float offset = input_->real(-1, 1);
      for (int32_t i = 0; i < tokens * l.num_kv_heads * l.head_dim; ++i) {
        k.push_back(float_to_half(offset + input_->real(-1, 1)));
        v.push_back(float_to_half(input_->real(-2, 2)));
      }
      EXPECT_TRUE(store_->append({list, layer, tokens, k.data(), v.data()}));
    }
  }

  void emulate(const AttendRequest& request, std::mt19937* order) {
    const CacheLayout& l = config_.layout;
    const ChannelView& view = store_->view();
    const ChannelCtas ctas =
        channel_ctas(l.group_size(), request.q_len, l.num_kv_heads, l.head_dim);
    PlanWorld plan;
    ChannelLengths lengths;
    // Slots are given out in order.
    for (int32_t slot = 0; slot < static_cast<int32_t>(ids_.size()); ++slot) {
      plan.sequences.push_back(attended_sequence(view, slot, view.infos[slot]));
      lengths.units += plan.sequences.back().units();
      lengths.most = std::max(lengths.most, plan.sequences.back().units());
    }
    const auto rows = static_cast<int32_t>(ids_.size()) * l.num_kv_heads;
    plan.make_room(choose_channel_items(ctas, lengths, rows, input_->uniform(1, 60)), rows);
    const ChannelPlanCall call = plan.call(channel_plan_call(channel_pages(view, 0), ctas));
    emulate_plan(call);
    EXPECT_EQ(plan.status, StatusCode::kOk);
    for (const ChannelParts& p : plan.parts) most_splits_ = std::max(most_splits_, p.count);
    const int32_t parts = 2 * (call.plan.num_items - rows);
    std::vector<SoftmaxState> states(parts * ctas.all_columns() + 1, SoftmaxState{NAN, NAN});
    std::vector<float4> accumulators(states.size() * l.head_dim / 4, float4{NAN, NAN, NAN, NAN});
    ChannelLaunch<ChannelPages> p{};
    p.cache = channel_pages(view, request.layer);
    p.ctas = ctas;
    p.plan = call.plan;
    p.num_rows = rows;
    p.is_bfloat16 = request.dtype == DType::kBFloat16;
    p.q = static_cast<const uint16_t*>(request.q);
    p.out = static_cast<uint16_t*>(request.out);
    p.lse = request.lse;
    p.sinks = request.sinks;
    p.status = &plan.status;
    p.scale_log2 = static_cast<float>(l.sm_scale) * kLog2E;
    p.states = states.data();
    p.parts = &accumulators.data()->x;
    const int32_t tasks = rows * ctas.all_columns() * slices_of(l.head_dim, kChannelJoinDims);
    run(call.plan.num_items * ctas.groups, 32 * ctas.warps, order,
        [&] { channel_kernel<ChannelPages>(view.layout)(p); });
    run((tasks + kChannelJoinWarps - 1) / kChannelJoinWarps, 32 * kChannelJoinWarps, order,
        [&] { join_channel_kernel(channel_join(p)); });
    EXPECT_EQ(plan.status, StatusCode::kOk);
  }

  template <class Kernel>
  static void run(int32_t ctas, int32_t threads, std::mt19937* order, const Kernel& kernel) {
    std::vector<int32_t> all(ctas);
    std::iota(all.begin(), all.end(), 0);
    std::shuffle(all.begin(), all.end(), *order);
    for (const int32_t cta : all) {
      std::fill_n(shared_bytes, sizeof(shared_bytes), 0xff);
      emulator::cta().run(cta, threads, [&] { kernel(); });
    }
  }

  KvStoreConfig config_;
  RandomInput* input_;
  std::unique_ptr<ChannelHostStore> store_;
  std::vector<SequenceId> ids_;
  int32_t most_splits_ = 0;
};

struct EmulatedCase {
  int32_t head_dim, k_bits, v_bits, block_tokens, group, q_len;
  DType dtype;
};

TEST(EmulatedChannelAttention, IsTheStoresInDouble) {
  constexpr DType kHalf = DType::kFloat16, kBFloat = DType::kBFloat16;
  constexpr EmulatedCase kCases[] = {
      {64, 4, 4, 64, 4, 1, kHalf},   {128, 2, 2, 128, 1, 1, kHalf},  {96, 4, 2, 64, 3, 2, kHalf},
      {64, 2, 4, 128, 5, 3, kHalf},  {128, 4, 4, 64, 8, 1, kBFloat}, {64, 4, 4, 64, 4, 5, kHalf},
      {128, 4, 4, 64, 16, 1, kHalf}, {64, 2, 2, 64, 4, 8, kBFloat},  {64, 4, 4, 64, 7, 8, kHalf},
      {256, 4, 4, 64, 4, 1, kHalf},  {256, 2, 4, 64, 3, 8, kBFloat}, {256, 4, 2, 64, 16, 1, kHalf}};
  int32_t most_splits = 0;
  for (const EmulatedCase& c : kCases) {
    RandomInput input;
    std::mt19937 order(std::random_device{}());
    KvStoreConfig config = emulated_config(c.head_dim, c.group);
    config.channel.k_bits = c.k_bits;
    config.channel.v_bits = c.v_bits;
    config.channel.block_tokens = c.block_tokens;
    SCOPED_TRACE(to_json(config) + " q_len " + std::to_string(c.q_len));
    // The last is in its residual alone, and of one query's row empty.
    EmulatedStore store(
        config, {input.uniform(300, 690), input.uniform(90, 130), 8, c.q_len == 1 ? 0 : c.q_len},
        &input);
    AttendRequest request;
    request.layer = 1;
    request.q_len = c.q_len;
    request.dtype = c.dtype;
    ASSERT_EQ(store.difference(request, &order), "");
    most_splits = std::max(most_splits, store.most_splits());
  }
  EXPECT_GT(most_splits, 1);
}

TEST(ChannelPlan, RefusesWhatCannotBe) {
  const std::vector<ChannelSequence> sequences = {{0, 1, 20}, {}};
  std::vector<ChannelItem> items(5);
  std::vector<ChannelParts> parts(4);
  StatusCode status = StatusCode::kOk;
  ChannelPlanCall good;
  good.sequences = sequences.data();
  good.num_sequences = 2;
  good.num_kv_heads = 2;
  good.most_blocks = 1;
  good.most_raw_tokens = 20;
  good.num_table_rows = 2;
  good.plan = {5, items.data(), parts.data()};
  good.status = &status;
  using Change = void (*)(ChannelPlanCall*);
  constexpr Change kChanges[] = {[](ChannelPlanCall* c) { c->num_sequences = -1; },
                                 [](ChannelPlanCall* c) { c->num_kv_heads = 0; },
                                 [](ChannelPlanCall* c) { c->team = 0; },
                                 [](ChannelPlanCall* c) { c->most_blocks = INT32_MAX; },
                                 [](ChannelPlanCall* c) { c->least_raw_tokens = -1; },
                                 [](ChannelPlanCall* c) { c->plan.num_items = 3; },
                                 [](ChannelPlanCall* c) { c->plan.items = nullptr; },
                                 [](ChannelPlanCall* c) { c->plan.parts = nullptr; },
                                 [](ChannelPlanCall* c) { c->sequences = nullptr; },
                                 [](ChannelPlanCall* c) { c->status = nullptr; }};
  for (const Change change : kChanges) {
    ChannelPlanCall call = good;
    change(&call);
    EXPECT_EQ(plan_channel_host(call).code(), StatusCode::kInvalidArgument) << &change - kChanges;
  }
  EXPECT_TRUE(plan_channel_host(good));
  EXPECT_EQ(status, StatusCode::kOk);
  EXPECT_EQ(items[4].row, -1);
  good.least_raw_tokens = 21;  // not all queries would see all blocks
  EXPECT_TRUE(plan_channel_host(good));
  EXPECT_EQ(status, StatusCode::kCorrupt);
}

}  // namespace
}  // namespace testing
}  // namespace tierkv
