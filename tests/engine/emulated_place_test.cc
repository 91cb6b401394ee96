// SPDX-License-Identifier: Apache-2.0
// The kernels of a place in device memory, their source run on the host: raw tokens byte for byte
// as the host place puts them, attention over them beside the plain softmax in double, counts and
// needs of pages beside the laws and the page operations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "store/place/device/count_kernels.cuh"
#include "store/place/device/raw_attend_kernel.cuh"
#include "tests/engine/support/raw_world.h"
#include "tests/support/host_state.h"
#include "tests/support/page_trace.h"
#include "tests/support/random_input.h"

namespace tierkv::store {

__align__(128) uint8_t attend_shared_bytes[1 << 17];

namespace {

using test::emulate;
using test::RawWorld;
using testing::HostState;
using testing::RandomInput;

template <int32_t kHeadDim>
struct Dim {
  static constexpr int32_t kValue = kHeadDim;
};
template <class T>
class EmulatedPlace : public ::testing::Test {};
using Dims = ::testing::Types<Dim<64>, Dim<96>, Dim<128>, Dim<256>>;
TYPED_TEST_SUITE(EmulatedPlace, Dims);

TYPED_TEST(EmulatedPlace, RawTokensLieAsTheHostPutsThem) {
  for (int32_t round = 0; round < 6; ++round) {
    RawWorld world(TypeParam::kValue, round % 2 == 0 ? DType::kFloat16 : DType::kBFloat16);
    for (int32_t i = 0; i < 8; ++i) {
      const bool in_step = world.input.chance(0.5);
      world.append(world.input.uniform(1, in_step ? 8 : 120), in_step);
      ASSERT_EQ(world.host, world.device) << "append " << i << " of round " << round;
    }
    EXPECT_EQ(world.fault.status, StatusCode::kOk);
    RawReadCall read;
    read.memory = world.memory();
    read.raw = world.rows.raw;
    read.laws = world.laws;
    read.layer = world.layer;
    read.num_kv_heads = world.kv_heads;
    read.first = ring_first(world.laws, world.at(0));
    read.end = world.at(0).tokens;
    read.origin = read.first;
    const int32_t dim = TypeParam::kValue, heads = world.kv_heads;
    std::vector<uint16_t> k(int64_t{read.end - read.first} * heads * dim), v(k.size());
    read.k = k.data();
    read.v = v.data();
    emulate(static_cast<int32_t>(k.size() / 2 / kAppendThreads + 1), 1, kAppendThreads,
            [&] { raw_read_kernel(read); });
    std::vector<uint16_t> expected(dim);
    for (int32_t p = read.first; p < read.end; ++p) {
      for (int32_t h = 0; h < heads; ++h) {
        const auto at = (int64_t{p - read.first} * heads + h) * dim;
        const uint8_t* row = world.host_raw(0) + h * world.rows.raw.row_bytes;
        read_raw(world.rows, row, Component::kKey, p, expected.data());
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), k.begin() + at));
        read_raw(world.rows, row, Component::kValue, p, expected.data());
        ASSERT_TRUE(std::equal(expected.begin(), expected.end(), v.begin() + at));
      }
    }
  }
}

TEST(EmulatedPlaceFaults, ValuesThatFp16DoesNotHold) {
  RawAppendCall call;
  StatusCode code = StatusCode::kOk;
  EXPECT_EQ(checked_half(DType::kFloat16, 0x7c00, &code), 0);
  EXPECT_EQ(code, StatusCode::kNonFinite);
  code = StatusCode::kOk;
  EXPECT_EQ(checked_half(DType::kBFloat16, 0xff7f, &code), 0xfbff);
  EXPECT_EQ(code, StatusCode::kOutOfRange);
  EXPECT_EQ(checked_half(DType::kBFloat16, 0x7fc0, &code), 0);
  EXPECT_EQ(code, StatusCode::kNonFinite);
}

// Eight elements at a time are judged as each is alone.
TEST(EmulatedPlaceFaults, TheLargestMagnitudeTellsWhatFp16DoesNotHold) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      StatusCode expected = StatusCode::kOk;
      (void)checked_half(dtype, bits, &expected);
      uint32_t words[4] = {};
      words[bits % 4] = bits % 8 < 4 ? bits : bits << 16;
      const uint4 x = {words[0], words[1], words[2], words[3]};
      ASSERT_EQ(code_of_magnitude(dtype, largest_magnitude(x)), expected) << std::hex << bits;
    }
  }
}

// Eight values at a time find what single ones do.
TEST(EmulatedPlaceFaults, TokensThatLeaveAtOnce) {
  constexpr int32_t kTokens = 3, kDims = 64;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const uint32_t magnitude :
         {0x0u, 0x3c00u, 0x477fu, 0x4780u, 0x7bffu, 0x7c00u, 0x7f7fu, 0x7f80u, 0x7fffu}) {
      for (const uint32_t bits : {magnitude, magnitude | 0x8000u}) {
        for (const int32_t at : {0, 7, kDims + 13, kTokens * kDims - 1}) {
          std::vector<uint16_t> k(kTokens * kDims, 0x3c00), v(k);
          (at % 2 == 0 ? k : v)[at] = static_cast<uint16_t>(bits);
          RawAppendCall call;
          call.num_kv_heads = 1;
          call.raw.head_dim = kDims;
          call.chunk.k = k.data(), call.chunk.v = v.data();
          call.chunk.dtype = dtype;
          call.chunk.tokens = kTokens;
          StatusCode found = StatusCode::kOk, expected = StatusCode::kOk;
          emulator::cta().run(0, kAppendThreads, [&] {
            const StatusCode code = check_tokens(call, 0, 0, kTokens);
            if (code != StatusCode::kOk) found = code;
          });
          checked_half(dtype, bits, &expected);
          EXPECT_EQ(found, expected) << bits << " of type " << static_cast<int32_t>(dtype);
        }
      }
    }
  }
}

// Faults of one row in any order, found by the threads of one CTA, are told by the rule by which
// the host tells them.
TEST(EmulatedPlaceFaults, TheWorstOfARowIsTold) {
  for (int32_t round = 0; round < 60; ++round) {
    RawWorld w(64, round % 2 == 0 ? DType::kBFloat16 : DType::kFloat16);
    w.most_ctas = 1;
    const int32_t n = w.input.uniform(1, 150), head = w.input.uniform(0, w.kv_heads - 1);
    StatusCode expected = StatusCode::kOk;
    w.change = [&](RawWorld::Tensors* x) {
      x->significance.resize(static_cast<size_t>(w.sequences * w.kv_heads) * x->stride, 0.5f);
      const auto anywhere = [&](std::vector<uint16_t>& of) -> uint16_t& {
        return of[(w.input.uniform(0, n - 1) * w.kv_heads + head) * 64 + w.input.uniform(0, 63)];
      };
      const bool kinds[] = {w.input.chance(0.4), w.input.chance(0.5), w.input.chance(0.5)};
      for (int32_t i = 0; i < 3; ++i) {
        const int32_t t = w.input.uniform(0, n - 1);
        if (kinds[0]) anywhere(w.input.chance(0.5) ? x->k : x->v) = 0x7fff;  // NaN
        if (kinds[1] && w.dtype == DType::kBFloat16) anywhere(x->v) = 0x7f00;
        if (kinds[2]) x->significance[head * x->stride + t] = w.input.chance(0.5) ? -1.0f : NAN;
      }
      const Chunk chunk = {x->k.data(), x->v.data(), x->significance.data(), x->stride, w.dtype, n};
      const RowOfCall rows = {0, 0, w.kv_heads};
      expected = check_values(chunk, 64, rows, 0).code();
      if (expected == StatusCode::kOk) expected = check_significances(chunk, rows, 0).code();
    };
    w.append(n, false);
    ASSERT_EQ(w.fault.status, expected) << "round " << round;
    EXPECT_TRUE(expected == StatusCode::kOk || w.fault.kv_head == head);
  }
}

// One row of the attention: queries of a sequence and kv_head. body_lse: of other tokens, which
// the count must know of.
struct Attended {
  std::vector<uint16_t> q, out;
  std::vector<float> lse, body_lse, whole_lse, sinks, kept;
  RawAttendCall call;

  Attended(RawWorld* w, int32_t group, int32_t q_len, DType dtype) {
    const int32_t dim = w->rows.raw.head_dim;
    const int64_t lines = int64_t{w->sequences} * q_len * w->kv_heads * group;
    for (int64_t i = 0; i < lines * dim; ++i) {
      q.push_back(float_to_raw(dtype, w->input.real(-1, 1)));
    }
    for (int64_t i = 0; i < lines; ++i) {
      body_lse.push_back(w->input.chance(0.2) ? -INFINITY : w->input.real(-1, 6));
    }
    for (int32_t i = 0; i < w->kv_heads * group; ++i) {
      sinks.push_back(w->input.chance(0.5) ? -INFINITY : w->input.real(-2, 4));
    }
    out.assign(q.size(), 0xffff);
    lse.assign(lines, NAN);
    whole_lse = lse;
    const int64_t scores = kKeptTiles * kTileTokens * kRawColumns;
    kept.assign(w->sequences * w->kv_heads * scores, NAN);
    call.memory = w->memory();
    call.raw = w->rows.raw;
    call.laws = w->laws;
    call.layer = w->layer;
    call.num_kv_heads = w->kv_heads;
    call.group = group;
    call.q_len = q_len;
    call.sm_scale = static_cast<float>(1 / std::sqrt(dim));
    call.dtype = dtype;
    call.fault = &w->fault;
  }
};

template <int32_t kHeadDim>
void expect_attends(int32_t round) {
  RawWorld w(kHeadDim, DType::kFloat16);
  w.append(w.input.uniform(8, 150), false);
  for (int32_t i = 0; i < 3; ++i) w.append(w.input.uniform(1, 8), true);
  const int32_t group = round < 2 ? 16 : w.input.uniform(1, 9), q_len = w.input.uniform(1, 8);
  const DType dtype = round % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
  Attended a(&w, group, q_len, dtype);
  std::vector<int32_t> slots;
  std::vector<LayerTokens> at;
  for (int32_t slot = 0; slot < w.sequences; ++slot) {
    slots.push_back(slot);
    at.push_back(w.at(slot));
  }
  a.call.slots = slots.data();
  a.call.at = at.data();
  a.call.q = a.q.data();
  a.call.out = a.out.data();
  a.call.lse = a.lse.data();
  const bool has_body = w.input.chance(0.7), has_sinks = w.input.chance(0.5);
  if (has_sinks) a.call.sinks = a.sinks.data();
  if (group * q_len <= kRawColumns && w.input.chance(0.8)) a.call.kept = a.kept.data();
  std::fill_n(attend_shared_bytes, sizeof(RawAttendShared<kHeadDim>), 0xff);
  emulate(w.sequences * w.kv_heads, 1, kAttendThreads,
          [&] { raw_attend_kernel<kHeadDim>(a.call); });
  EXPECT_EQ(w.fault.status, StatusCode::kOk);

  // Scores: products of fp16 inputs summed in fp32 by steps that cut off at 2^-23, |q| <= 1 and
  // |k| < 64: 1e-3. Outputs: probabilities of fp16 (2^-11), the result in the type of out; a
  // score's error e moves an output by 2 e max|v|.
  const int32_t heads = w.kv_heads * group;
  for (int32_t i = 0; i < w.sequences; ++i) {
    for (int32_t h = 0; h < w.kv_heads; ++h) {
      const uint8_t* const held = w.host_raw(i) + int64_t{h} * w.rows.raw.row_bytes;
      const auto read = [&](Component c, int32_t p, std::vector<float>* to) {
        uint16_t token[kHeadDim];
        read_raw(w.rows, held, c, p, token);
        std::transform(token, token + kHeadDim, to->begin(), half_to_float);
      };
      for (int32_t j = 0; j < q_len; ++j) {
        const int32_t position = at[i].tokens - q_len + j;
        std::vector<float> k(kHeadDim), v(kHeadDim);
        std::vector<double> largest(at[i].tokens, 0);
        for (int32_t g = 0; g < group; ++g) {
          const int64_t line = (int64_t{i} * q_len + j) * heads + h * group + g;
          double sum = 0, most_value = 1;
          std::vector<double> expected(kHeadDim, 0), weight(at[i].tokens, 0);
          for (int32_t p = 0; p <= position; ++p) {
            const bool raw = p < sink_count(w.laws, at[i]) || p >= ring_first(w.laws, at[i]);
            if (!raw) continue;
            read(Component::kKey, p, &k);
            read(Component::kValue, p, &v);
            double dot = 0;
            for (int32_t d = 0; d < kHeadDim; ++d) {
              dot += double{raw_to_float(dtype, a.q[line * kHeadDim + d])} * double{k[d]};
              most_value = std::max(most_value, std::abs(double{v[d]}));
            }
            weight[p] = std::exp(dot * double{a.call.sm_scale});
            sum += weight[p];
            for (int32_t d = 0; d < kHeadDim; ++d) expected[d] += weight[p] * double{v[d]};
          }
          if (has_sinks) sum += std::exp(double{a.sinks[h * group + g]});
          const double whole = sum + (has_body ? std::exp(double{a.body_lse[line]}) : 0.0);
          a.whole_lse[line] = static_cast<float>(std::log(whole));
          if (sum == 0) {
            EXPECT_EQ(a.lse[line], -INFINITY);
            continue;
          }
          ASSERT_NEAR(a.lse[line], std::log(sum), 2e-3 + 1e-6 * std::abs(std::log(sum)));
          const double rounding = dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
          const double bound = most_value * (rounding + 0x1p-10 + 4e-3);
          for (int32_t d = 0; d < kHeadDim; ++d) {
            ASSERT_NEAR(raw_to_float(dtype, a.out[line * kHeadDim + d]), expected[d] / sum, bound)
                << "dim " << d;
          }
          for (int32_t p = 0; p <= position; ++p) {
            largest[p] = std::max(largest[p], weight[p] / whole);
          }
        }
        for (int32_t p = ring_first(w.laws, at[i]); p < position; ++p) {
          uint8_t* row = w.host_raw(i) + int64_t{h} * w.rows.raw.row_bytes;
          RawScore score = read_score(w.rows, row, p);
          if (score.count < 0) continue;
          score.sum += static_cast<float>(largest[p]);
          ++score.count;
          write_score(w.rows, row, p, score);
        }
      }
    }
  }
  a.call.lse = a.whole_lse.data();
  emulate(w.sequences * w.kv_heads, 1, kAttendThreads, [&] { raw_count_kernel<kHeadDim>(a.call); });
  for (int32_t i = 0; i < w.sequences; ++i) {
    for (int32_t h = 0; h < w.kv_heads; ++h) {
      for (int32_t p = ring_first(w.laws, at[i]); p < at[i].tokens; ++p) {
        const int64_t row = int64_t{h} * w.rows.raw.row_bytes;
        const RawScore expected = read_score(w.rows, w.host_raw(i) + row, p);
        const RawScore found = read_score(w.rows, w.memory().raw(i, w.layer) + row, p);
        ASSERT_EQ(found.count, expected.count) << "position " << p;
        ASSERT_NEAR(found.sum, expected.sum, 5e-3 * q_len + 1e-6 * std::abs(expected.sum));
      }
    }
  }
}

// What the host refuses, or sends elsewhere, a captured call may find in a replay.
TEST(EmulatedPlaceFaults, QueriesInsideTheBody) {
  RawWorld w(64, DType::kFloat16);
  w.append(300, false);
  Attended a(&w, 2, 2, DType::kFloat16);
  const std::vector<int32_t> slots(w.sequences, 0);
  const int32_t body_end = w.at(0).body_end;
  ASSERT_GT(body_end, 0);
  a.call.slots = slots.data();
  a.call.q = a.q.data(), a.call.out = a.out.data(), a.call.lse = a.lse.data();
  for (const int32_t behind : {1, 0}) {  // tokens behind the first query's, and one more
    const std::vector<LayerTokens> at(w.sequences, {body_end + behind, body_end});
    a.call.at = at.data();
    emulate(w.sequences * w.kv_heads, 1, kAttendThreads, [&] { raw_attend_kernel<64>(a.call); });
    EXPECT_EQ(w.fault.status, behind == 1 ? StatusCode::kOk : StatusCode::kInvalidArgument);
  }
}

TYPED_TEST(EmulatedPlace, AttentionIsThePlainSoftmax) {
  for (int32_t round = 0; round < 8; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    expect_attends<TypeParam::kValue>(round);
    if (this->HasFatalFailure()) return;
  }
}

TEST(EmulatedCounts, FollowTheLaws) {
  RandomInput input;
  for (int32_t round = 0; round < 200; ++round) {
    const int32_t layers = input.uniform(1, 5), sequences = input.uniform(1, 90);
    CountCall c;
    c.laws = {input.uniform(0, 16), input.uniform(8, 70), 16, 64, 96};
    std::vector<LayerTokens> counts;
    for (int32_t i = 0; i < sequences * layers; ++i) {
      counts.push_back(after_append(c.laws, {}, input.uniform(100, 400)));
    }
    IdChunk ids;
    std::vector<int32_t> slots(sequences, -1);
    std::vector<LayerTokens> from(counts.size()), to(counts.size()), at(counts.size());
    c.batch = {slots.data(), from.data(), to.data(), at.data()};
    c.counts = counts.data();
    c.law = static_cast<CountLaw>(input.uniform(0, 3));
    c.tokens = input.uniform(1, 90);
    c.first_layer = input.uniform(0, layers - 1);
    c.layers = input.uniform(1, layers - c.first_layer);
    c.num_layers = layers;
    c.max_sequences = sequences;
    c.rows = input.uniform(0, 3 * layers);
    std::vector<SideCounts> held(sequences * c.rows), kept(held.size()), target(held.size());
    for (SideCounts& of_row : held) of_row.of[0] = input.uniform(0, 900);
    c.held = held.data();
    c.row_counts = {kept.data(), target.data()};
    // In two chunks of ids, in reverse order.
    const int32_t half = sequences / 2;
    for (const auto& [first, end] : {std::pair{0, half}, std::pair{half, sequences}}) {
      for (int32_t i = first; i < end; ++i) ids.slots[i - first] = sequences - 1 - i;
      c.first = first;
      c.count = end - first;
      emulate(c.count * c.threads_of_sequence() / kCountThreads + 1, 1, kCountThreads,
              [&] { count_kernel(c, ids); });
    }
    for (int32_t i = 0; i < sequences; ++i) {
      const int32_t slot = sequences - 1 - i;
      ASSERT_EQ(slots[i], slot);
      for (int32_t r = 0; r < c.rows; ++r) {
        ASSERT_EQ(kept[i * c.rows + r], held[slot * c.rows + r]);
        ASSERT_EQ(target[i * c.rows + r], held[slot * c.rows + r]);
      }
      for (int32_t l = 0; l < c.layers; ++l) {
        const LayerTokens now = counts[slot * layers + c.first_layer + l];
        LayerTokens expected = now;
        if (c.law == CountLaw::kBegin) {
          expected.body_end = body_end_at(c.laws, now.body_end, now.tokens + c.tokens);
        } else if (c.law == CountLaw::kAppend) {
          expected = after_append(c.laws, now, c.tokens);
        } else if (c.law == CountLaw::kTruncate) {
          expected = after_truncate(c.laws, now, c.tokens);
        }
        ASSERT_EQ(from[i * c.layers + l], now);
        ASSERT_EQ(to[i * c.layers + l], expected);
        if (c.law == CountLaw::kBegin) expected.tokens += c.tokens;
        ASSERT_EQ(at[(c.first_layer + l) * sequences + i], expected);
      }
    }
  }
}

// What rows need beside what a truncation and a growth take from the ring.
TEST(EmulatedCounts, NeedsAreWhatThePageOperationsTake) {
  RandomInput input;
  const AllocatorShape shape = testing::with_sides(2, 5, 3, 400);
  HostState state(shape), next(shape);
  testing::TraceMaker maker(static_cast<uint32_t>(input.uniform(0, 1 << 30)), {0, 3, 6});
  int32_t compared = 0, exchanged = 0;
  for (int32_t step = 0; step < 4000; ++step) {
    testing::OwnedOp op = maker.next(*state);
    ASSERT_TRUE(run_page_op_host(*state, op.view()));
    const int32_t sequence = input.uniform(0, shape.table.num_sequences - 1);
    if (state->sequences[sequence].state != SequenceState::kLive) continue;
    const int32_t rows = shape.table.rows_per_sequence;
    const SideCounts* const held = state->tokens + sequence * rows;
    std::vector<SideCounts> kept(held, held + rows), target(rows);
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t s = 0; s < shape.table.num_sides; ++s) {
        if (input.chance(0.5)) kept[r].of[s] = input.uniform(0, kept[r].of[s]);
        target[r].of[s] = kept[r].of[s] + input.uniform(0, 5);
      }
    }
    PageNeeds needs = {};
    emulate(1, 1, kCountThreads, [&] {
      needs_kernel(*state, {&sequence, 1}, {kept.data(), target.data()}, &needs);
    });
    next.copy(state);
    std::vector<PageCopy> copies(rows * kMaxSides);
    OpReport cut, grown;
    const int64_t before = free_pages(*next->ring.cursors);
    ASSERT_TRUE(run_page_op_host(
        *next, PageOp::truncate({&sequence, 1}, kept.data(), copies.data(), &cut)));
    if (cut.status != StatusCode::kOk) continue;
    ASSERT_TRUE(run_page_op_host(*next, PageOp::grow({&sequence, 1}, target.data(), &grown)));
    EXPECT_EQ(needs.beyond > 0, grown.status == StatusCode::kOutOfRange);
    if (grown.status != StatusCode::kOk) continue;
    ASSERT_EQ(static_cast<int64_t>(needs.fresh), before - free_pages(*next->ring.cursors));
    ASSERT_EQ(static_cast<int64_t>(needs.exchanged), cut.pages_needed);
    ++compared;
    exchanged += needs.exchanged > 0 ? 1 : 0;
  }
  EXPECT_GT(compared, 100);
  EXPECT_GT(exchanged, 0);
}

}  // namespace
}  // namespace tierkv::store
