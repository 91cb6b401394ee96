// A host and a device store of channel blocks that get the same calls, and the comparison of what
// they hold and find.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "codec/format/element.h"
#include "store/channel/channel_device.h"
#include "tests/gpu/store/store_pair.cuh"

namespace tierkv::testing {

inline KvStoreConfig channel_config(int32_t head_dim) {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = 6;
  c.layout.num_kv_heads = 2;
  c.layout.head_dim = head_dim;
  c.layout.sm_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  c.policy.window_tokens = 24;
  c.num_pages = 180;
  c.max_sequences = 5;
  c.max_tokens = 500;
  c.channel.enabled = true;
  return c;
}

inline std::string row_difference(const ChannelView& a, const ChannelView& b, int32_t row,
                                  const SequenceInfo& info) {
  for (int32_t i = 0; i < a.blocks_of(info); ++i) {
    if (differs(a.block(row, i), b.block(row, i), a.layout.bytes)) {
      return "block " + std::to_string(i);
    }
  }
  const size_t tile_bytes = TileLayout{kRawCodes, a.head_dim()}.bytes();
  for (int32_t p = info.window_first; p < info.num_tokens; p += kTileTokens) {
    for (const Component c : kComponents) {
      const int32_t at = a.raw_tile_byte(c, p), first = info.window_first;
      if (differs(a.raw_page(row, first, p) + at, b.raw_page(row, first, p) + at, tile_bytes)) {
        return "raw tile of token " + std::to_string(p);
      }
    }
  }
  return "";
}

class ChannelTwins : public StorePair<ChannelHostStore, ChannelDeviceStore> {
 public:
  ChannelTwins(const KvStoreConfig& config, RandomInput* input, GpuStream stream = nullptr)
      : StorePair(config, input, stream) {}

  // Of one layer; a value may be bad, and is then refused.
  Status append_layer(SequenceList l, int32_t layer, int32_t tokens, bool bad) {
    std::vector<uint8_t> k = values(l.count * tokens), v = values(l.count * tokens);
    if (bad) {
      const auto bytes = static_cast<int32_t>(dtype_bytes(config().layout.dtype));
      const auto count = static_cast<int32_t>(v.size()) / bytes;
      std::fill_n(v.data() + int64_t{input().uniform(0, count - 1)} * bytes, bytes, uint8_t{0xff});
    }
    return append(l, layer, tokens, k, v);
  }
  using StorePair::append;
  Status append(SequenceList l, int32_t tokens) {
    for (int32_t layer = 0; layer < config().layout.num_layers; ++layer) {
      if (input().chance(0.1)) {
        EXPECT_EQ(append_layer(l, layer, tokens, true).code(), StatusCode::kNonFinite);
      }
      if (const Status s = append_layer(l, layer, tokens, false); !s) return s;
    }
    return Status::ok();
  }
  Status prompt(SequenceList l, int32_t tokens) {
    const Status s = begin_prompt(l, tokens);
    return s ? append(l, tokens) : s;
  }
  Status step(SequenceList l, int32_t tokens) {
    const Status s = begin_step(l, tokens);
    return s ? append(l, tokens) : s;
  }
  std::string difference() {
    const Result<const ChannelHostStore*> mirror = device().download();
    if (!mirror) return mirror.status().message();
    return state_difference(host().view(), (*mirror)->view(),
                            [](const auto&... x) { return row_difference(x...); });
  }

  // Of `count` tokens, a query of each head, random.
  std::vector<uint16_t> queries(int32_t count, DType dtype = DType::kFloat16) {
    std::vector<uint16_t> q;
    const int64_t n = int64_t{count} * config().layout.num_q_heads * config().layout.head_dim;
    for (int64_t i = 0; i < n; ++i) q.push_back(float_to_raw(dtype, input().real(-1, 1)));
    return q;
  }
  // Of attention at every layer; the request says what queries there are, and sinks on the host.
  std::string attention_difference(SequenceList l, AttendRequest request = {}) {
    const float* sinks = request.sinks;
    for (int32_t layer = 0; layer < config().layout.num_layers; ++layer) {
      const std::vector<uint16_t> q = queries(l.count * request.q_len, request.dtype);
      request.sequences = l;
      request.layer = layer;
      Buffer device_sinks;
      if (sinks != nullptr) {
        request.sinks =
            device_sinks.put(std::vector<float>(sinks, sinks + config().layout.num_q_heads));
      }
      Buffer device_q, device_out, device_lse;
      request.q = device_q.put(q);
      request.out = device_out.put(std::vector<uint16_t>(q.size(), 0x7e00));
      const size_t heads = q.size() / config().layout.head_dim;
      request.lse = device_lse.put(std::vector<float>(heads, NAN));
      if (const Status s = device().attend(request); !s) return s.message();
      if (const Status s = device().take_status(); !s) return s.message();
      request.sinks = sinks;
      const std::string text = output_difference(request, q, device_out.read<uint16_t>(q.size()),
                                                 device_lse.read<float>(heads));
      if (!text.empty()) return text;
    }
    return "";
  }

  // What the device found for the request with queries q, beside the host's.
  //
  // Of a query's scores the device rounds q * scale of each channel to fp16, 2^-11 at most of
  // |q| * range, as if at random: six standard deviations of the sum over head_dim channels, with
  // |q| <= 1 and ranges of 2, are 6 * 2^-11 * 2 / sqrt(3) * sqrt(head_dim) * sm_scale. Sums in fp32
  // add less than a thousandth of it. An error of a score weighs an output by its exponential;
  // weights and outputs are rounded to fp16 once each, or outputs to bfloat16 here and there.
  std::string output_difference(AttendRequest request, const std::vector<uint16_t>& q,
                                const std::vector<uint16_t>& got,
                                const std::vector<float>& got_lse) {
    std::vector<uint16_t> out(q.size(), 0x7e00);
    std::vector<float> lse(q.size() / config().layout.head_dim, NAN);
    request.q = q.data();
    request.out = out.data();
    request.lse = lse.data();
    if (const Status s = host().attend(request); !s) return s.message();
    const double score = 1.01 * 6 * 0x1p-11 * 2 / std::sqrt(3) *
                         std::sqrt(config().layout.head_dim) * config().layout.sm_scale;
    const double rounding = request.dtype == DType::kFloat16 ? 3 * 0x1p-11 : 2 * 0x1p-11 + 0x1p-8;
    const double value = kLargest * (rounding + 2 * std::expm1(2 * score));
    for (size_t i = 0; i < got_lse.size(); ++i) {
      if (std::isinf(lse[i]) && lse[i] == got_lse[i]) continue;
      if (!(std::fabs(lse[i] - got_lse[i]) <= score + 1e-5 * std::fabs(lse[i]))) {
        return "lse " + std::to_string(lse[i]) + " " + std::to_string(got_lse[i]);
      }
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const double x = raw_to_float(request.dtype, out[i]), y = raw_to_float(request.dtype, got[i]);
      if (!(std::fabs(x - y) <= value)) {
        return "out " + std::to_string(x) + " " + std::to_string(y) + " at " + std::to_string(i);
      }
    }
    return "";
  }

  // Within +-kLargest.
  static constexpr double kLargest = 2;
  std::vector<uint8_t> values(int64_t tokens) {
    const DType dtype = config().layout.dtype;
    const int64_t n = tokens * config().layout.num_kv_heads * config().layout.head_dim;
    std::vector<uint8_t> x(n * dtype_bytes(dtype));
    const float offset = input().real(-1, 1), spread = std::exp2(input().real(-6, 0));
    for (int64_t i = 0; i < n; ++i) {
      store_element(x.data(), dtype, i, offset + spread * input().real(-1, 1));
    }
    return x;
  }
};

}  // namespace tierkv::testing
