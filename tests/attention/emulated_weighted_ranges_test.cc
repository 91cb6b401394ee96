// SPDX-License-Identifier: Apache-2.0
// Ranges of the rows that attention reads, decoded on the host by the warps of decode_weighted(),
// against the numbers of dequantize_weighted().
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "attention/coded/weighted_ranges.h"
#include "codec/gpu/coded/weighted_decode.cuh"
#include "tests/support/fresh_random.h"
#include "tests/support/weighted_attention_world.h"
#include "tests/support/weighted_world.h"

namespace tierkv::test::weighted {
namespace {

constexpr uint16_t kPoison = 0x7e5a;

// What attention does not have: the steps and means of rows as the codec takes them.
struct CodecRows {
  std::vector<float> key_scales;
  std::vector<uint16_t> key_means;
  DeviceWeightedRows rows;

  explicit CodecRows(const World& w) {
    for (const WeightedRow& row : w.steps) {
      for (int32_t d = 0; d < row.head_dim; ++d) {
        const size_t at = static_cast<size_t>(d);
        key_scales.push_back(row.key_weight.empty() ? row.key_step
                                                    : dim_scale(row.key_step, row.key_weight[at]));
        key_means.push_back(row.key_mean.empty() ? 0 : row.key_mean[at]);
      }
    }
    rows.key_scales = key_scales.data();
    rows.key_means = key_means.data();
    rows.value_steps = w.value_steps.data();
    rows.rope = {w.rope.place.data(), w.rope.block.data(), w.rope.pairing, w.rope.pairs,
                 w.rope.blocks};
    rows.num_rows = kSteps, rows.head_dim = w.shape.head_dim;
  }
};

class EmulatedWeightedRanges : public RandomTest {
 protected:
  EmulatedWeightedRanges() : source_(seed_) {}

  struct Asked {
    int32_t first, last;  // positions
    std::vector<uint16_t> out;
  };
  // Ranges that begin and end anywhere, in sinks and window as well.
  std::vector<Asked> ask(const World& w) {
    std::vector<Asked> all;
    for (size_t r = 0; r < w.rows.size(); ++r) {
      const int32_t tokens = w.tokens(r), first = source_.below(tokens + 1);
      const int32_t last = first + source_.below(tokens - first + 1);
      const auto size = static_cast<size_t>(last - first) * static_cast<size_t>(stride_);
      all.push_back({first, last, std::vector<uint16_t>(size, kPoison)});
    }
    return all;
  }

  void decode(const World& w, Component component, std::vector<Asked>* asked) {
    const auto c = static_cast<int32_t>(component);
    const CodecRows rows(w);
    const HostFamily family(w.books[c].family);
    const CodedAttention attention = call_of(w);
    const CodedComponent& from = c == 0 ? attention.keys : attention.values;
    std::vector<WeightedRange> ranges;
    WeightedDecode call;
    for (size_t r = 0; r < w.rows.size(); ++r) {
      Asked& a = (*asked)[r];
      ranges.push_back(decoded_range(w.rows[r], a.first, a.last, {a.out.data(), stride_}));
      call.most_blocks = std::max(call.most_blocks, range_blocks(ranges.back()));
    }
    if (call.most_blocks == 0) return;
    std::vector<StatusCode> status(ranges.size() * static_cast<size_t>(call.most_blocks),
                                   StatusCode::kIo);
    call.bytes = from.bytes, call.size = from.size;
    call.places = weighted_places(from);
    call.ranges = ranges.data(), call.num_ranges = static_cast<int32_t>(ranges.size());
    call.status = status.data();
    call.rows = rows.rows;
    call.family = {family.books.data(), nullptr, 1, 12};
    call.component = component;
    call.token_stride = w.shape.head_dim;
    const Status valid = call.validate();
    ASSERT_TRUE(valid) << valid.message();
    const int32_t size = weighted_region_bytes(call) + weighted_decode_cta_bytes(call) + 16 +
                         weighted_decode_warp_bytes(call);
    std::vector<uint4> shared(static_cast<size_t>(size) / 16);
    auto* const memory = reinterpret_cast<uint8_t*>(shared.data());
    emulated_shared() = {memory, static_cast<uint32_t>(size)};
    emulator::cta().run(
        0, 32, [&] { decode_weighted_items(call, memory); }, 1);
    for (const StatusCode code : status) ASSERT_EQ(code, StatusCode::kOk);
  }

  void expect(const World& w, int32_t c, const std::vector<Asked>& asked) const {
    const int32_t dims = w.shape.head_dim;
    size_t token = 0;
    for (size_t r = 0; r < w.rows.size(); ++r) {
      const Asked& a = asked[r];
      const int32_t sinks = w.rows[r].sink_tokens, end = sinks + w.rows[r].coded_tokens;
      for (int32_t t = a.first; t < a.last; ++t) {
        for (int32_t d = 0; d < stride_; ++d) {
          const size_t from = (token + static_cast<size_t>(t)) * static_cast<size_t>(dims);
          const bool decoded = t >= sinks && t < end && d < dims;
          ASSERT_EQ(a.out[static_cast<size_t>((t - a.first) * stride_ + d)],
                    decoded ? raw_element(DType::kFloat16, w.y[c][from + static_cast<size_t>(d)])
                            : kPoison)
              << "row " << r << " position " << t << " dim " << d << " component " << c;
        }
      }
      token += static_cast<size_t>(w.tokens(r));
    }
  }

  CodeSource source_;
  int32_t stride_ = 0;
};

TEST_F(EmulatedWeightedRanges, OfTheRowsOfAttention) {
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const RopePairing pairing :
         {RopePairing::kNone, RopePairing::kHalves, RopePairing::kNeighbours}) {
      Shape shape;
      shape.head_dim = head_dim;
      shape.pairing = pairing;
      shape.streams = 1 + source_.below(2);
      SCOPED_TRACE(shape.name());
      World w;
      make_world(&source_, shape, {{300, 40}, {0, 7}, {source_.below(200), 0}, {61, 3}}, &w);
      if (HasFatalFailure()) return;
      stride_ = head_dim + 8 * source_.below(2) + source_.below(2);
      for (const Component c : {Component::kKey, Component::kValue}) {
        std::vector<Asked> asked = ask(w);
        decode(w, c, &asked);
        if (!HasFatalFailure()) expect(w, static_cast<int32_t>(c), asked);
        if (HasFatalFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv::test::weighted
