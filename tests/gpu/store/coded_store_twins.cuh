// A host and a device store of coded pages that get the same calls, and the comparison of what they
// hold and find.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "codec/format/element.h"
#include "store/coded/coded_device.h"
#include "tests/gpu/store/store_pair.cuh"
#include "tests/support/code_source.h"

namespace tierkv::testing {

inline KvStoreConfig coded_config(RandomInput* input, int32_t head_dim) {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = 6;
  c.layout.num_kv_heads = 2;
  c.layout.head_dim = head_dim;
  c.layout.sm_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  c.policy.window_tokens = 24;
  c.num_pages = 120;
  c.max_sequences = 5;
  c.max_tokens = 500;
  c.coded.enabled = true;
  for (int32_t i = 0; i < 4; ++i) {
    c.coded.key_steps.push_back(input->real(0.5f, 1.0f));
    c.coded.value_steps.push_back(input->real(0.5f, 1.0f));
  }
  return c;
}

// A family of codebooks for codes of ever wider spread, around different centres.
inline void give_family(KvStoreConfig* config, int32_t count) {
  CodedConfig& coded = config->coded;
  coded.codebooks = CodebookSource::kGiven;
  CodeSource source(std::random_device{}());
  for (const Component component : kComponents) {
    for (int32_t i = 0; i < count; ++i) {
      CodeHistogram histogram(component, 64);
      histogram.add(source.bell(512 * 64, 0.5 * std::exp2(i), i % 2, false).data(), 512);
      CodebookSpec spec;
      spec.mode = BlockMode::kPair;
      spec.max_length = 9 + i % 3;
      spec.streams_per_lane = coded.streams_per_lane;
      spec.table_id = static_cast<uint8_t>(5 * i + 1);
      coded.given.emplace_back();
      serialize_codebook(*build_codebook(histogram, spec), &coded.given.back());
    }
  }
  coded.streams_per_lane = CodedConfig{}.streams_per_lane;
  coded.max_length = CodedConfig{}.max_length;
}

inline std::string row_difference(const CodedView& a, const CodedView& b, int32_t row,
                                  const SequenceInfo& info) {
  const int32_t blocks = info.window_first / kBlockTokens;
  for (const Component c : kComponents) {
    const CodedBlockRef *x = a.blocks(c, row), *y = b.blocks(c, row);
    if (differs(x, y, blocks * sizeof(CodedBlockRef))) return "directory";
    for (int32_t i = 0; i < blocks; ++i) {
      if (differs(a.pages.base + int64_t{x[i].offset} * 16,
                  b.pages.base + int64_t{x[i].offset} * 16, size_t{x[i].units} * 16)) {
        return "block " + std::to_string(i);
      }
    }
    const bool live = info.window_origin != kInPrompt;
    if (live && differs(a.means(c, row), b.means(c, row), a.head_dim * sizeof(float))) {
      return "means";
    }
    if (live && a.step(c, row) != b.step(c, row)) return "step";
    const bool scored = !live && a.fixed.format.any() && c == Component::kKey;
    for (int32_t p = 0; scored && p < info.num_tokens; ++p) {
      const int32_t at = raw_score_byte(a.head_dim, p % kBlockTokens);
      if (differs(a.raw_page(row, info, p) + at, b.raw_page(row, info, p) + at, 4)) return "score";
    }
    for (int32_t p = info.window_first; p < info.num_tokens; p += kTileTokens) {
      const int32_t at = raw_tile_byte(a.head_dim, c, p % kBlockTokens);
      if (differs(a.raw_page(row, info, p) + at, b.raw_page(row, info, p) + at,
                  static_cast<size_t>(32) * a.head_dim)) {
        return "raw tile of token " + std::to_string(p);
      }
    }
  }
  return "";
}

class CodedTwins : public StorePair<CodedHostStore, CodedDeviceStore> {
 public:
  CodedTwins(const KvStoreConfig& config, RandomInput* input, GpuStream stream = nullptr)
      : StorePair(config, input, stream) {}
  void set_spread(float spread) { spread_ = spread; }

  using StorePair::append;
  Status append(SequenceList l, int32_t tokens) {
    for (int32_t layer = 0; layer < config().layout.num_layers; ++layer) {
      const std::vector<uint16_t> k = values(l.count * tokens), v = values(l.count * tokens);
      if (const Status s = append(l, layer, tokens, k, v); !s) return s;
    }
    return Status::ok();
  }
  Status prompt(SequenceList l, int32_t tokens) {
    const Status s = begin_prompt(l, tokens);
    return s ? append(l, tokens) : s;
  }
  // Of one layer; now and then a token is significant.
  Status score(SequenceList l, int32_t layer, int32_t tokens) {
    std::vector<float> x;
    for (int64_t i = 0; i < int64_t{l.count} * config().layout.num_kv_heads; ++i) {
      for (int32_t p = 0; p < tokens; ++p) {
        const auto threshold = static_cast<float>(config().policy.alpha_high / (p + 1));
        x.push_back(input().chance(0.005) ? threshold : input().real(0, 0.9f) * threshold);
      }
    }
    Buffer scores;
    return same(host().score_prompt({l, layer, x.data(), tokens}),
                device().score_prompt({l, layer, scores.put(x), tokens}));
  }
  std::string stats_difference() {
    const StoreStats a = *host().stats(), b = *device().stats();
    for (int32_t tier = 0; tier < kNumTiers; ++tier) {
      if (a.tokens[tier] != b.tokens[tier]) return "tokens of tier " + std::to_string(tier);
    }
    return a.nominal_bytes == b.nominal_bytes && a.pages_free == b.pages_free ? "" : "bytes";
  }
  Status step(SequenceList l, int32_t tokens) {
    const Status s = begin_step(l, tokens);
    return s ? append(l, tokens) : s;
  }
  std::string difference() {
    const Result<const CodedHostStore*> mirror = device().download();
    if (!mirror) return mirror.status().message();
    return state_difference(host().view(), (*mirror)->view(),
                            [](const auto&... x) { return row_difference(x...); });
  }

  // Of attention at every layer, by one query or several, in either type.
  std::string attention_difference(SequenceList l) {
    const std::string one = attention_difference(l, 1, DType::kFloat16);
    if (!one.empty()) return one;
    const DType dtype = input().chance(0.5) ? DType::kFloat16 : DType::kBFloat16;
    return attention_difference(l, input().uniform(1, kMaxQueryTokens), dtype);
  }
  std::string attention_difference(SequenceList l, int32_t q_len, DType dtype) {
    const CacheLayout& layout = config().layout;
    const int64_t queries = int64_t{l.count} * q_len * layout.num_q_heads;
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      std::vector<uint16_t> q;
      for (int64_t i = 0; i < queries * layout.head_dim; ++i) {
        q.push_back(float_to_raw(dtype, input().real(-2, 2)));
      }
      std::vector<uint16_t> out(q.size(), 0x7e00);
      std::vector<float> lse(queries, NAN);
      AttendRequest request;
      request.sequences = l;
      request.layer = layer;
      request.q_len = q_len;
      request.dtype = dtype;
      request.q = q.data();
      request.out = out.data();
      request.lse = lse.data();
      const Status a = host().attend(request);
      Buffer device_q, device_out, device_lse;
      request.q = device_q.put(q);
      request.out = device_out.put(std::vector<uint16_t>(q.size(), 0x7e00));
      request.lse = device_lse.put(std::vector<float>(queries, NAN));
      const Status b = device().attend(request);
      // A truncated sequence may have fewer tokens that are not coded.
      if (q_len > 1 && a.code() == StatusCode::kInvalidArgument && a.code() == b.code()) return "";
      if (!a || !b) return a.message() + " | " + b.message();
      if (const Status later = device().take_status(); !later) return later.message();
      const auto got = device_out.read<uint16_t>(q.size());
      const auto got_lse = device_lse.read<float>(queries);
      const double score = score_tolerance(), value = value_tolerance(dtype);
      for (int64_t i = 0; i < queries; ++i) {
        if (std::isinf(lse[i]) && lse[i] == got_lse[i]) continue;
        if (!(std::fabs(lse[i] - got_lse[i]) <= 2e-3 + 2 * score)) {
          return "lse " + std::to_string(lse[i]) + " " + std::to_string(got_lse[i]);
        }
      }
      for (size_t i = 0; i < out.size(); ++i) {
        const double x = raw_to_float(dtype, out[i]), y = raw_to_float(dtype, got[i]);
        if (!(std::fabs(x - y) <= value)) {
          return "out " + std::to_string(x) + " " + std::to_string(y) + " at " + std::to_string(i);
        }
      }
    }
    return "";
  }

  // Scores are sums in fp32 of up to 128 products, |q k| at most 2 largest each: an error of 1e-6
  // of their sum at most, which weights an output by its exponential. Probabilities, both parts and
  // the output are rounded to fp16 once each; an output in bfloat16 to 8 bits. With the step of a
  // prompt of few tokens the codes of later ones may have 16 bits, which attention rounds to 11.
  double score_tolerance() const {
    const double product = config().coded.steps == StepSource::kPrompt ? 0x1p-12 : 1e-6;
    return product * 2 * largest_ * std::sqrt(config().layout.head_dim) + 1e-5;
  }
  double value_tolerance(DType dtype = DType::kFloat16) const {
    const double rounding = dtype == DType::kFloat16 ? 0.0 : 0x1p-7;
    return largest_ * (5 * 0x1p-11 + rounding + 2 * std::expm1(2 * score_tolerance()));
  }

  std::vector<uint16_t> values(int64_t tokens) {
    std::vector<uint16_t> x;
    const float offset = input().real(-3, 3);
    for (int64_t i = 0; i < tokens * config().layout.num_kv_heads * config().layout.head_dim; ++i) {
      float sum = 0;
      for (int32_t j = 0; j < 4; ++j) sum += input().real(-1, 1);
      x.push_back(float_to_half(offset + spread_ * sum));
    }
    largest_ = std::max<double>(largest_, 3 + 4 * spread_);
    return x;
  }

 private:
  float spread_ = 1;
  double largest_ = 0;
};

}  // namespace tierkv::testing
