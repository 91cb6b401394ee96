// A host and a device store of coded pages that get the same calls, and the comparison of what they
// hold and find.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "codec/element.h"
#include "store/coded_device.h"
#include "tests/gpu/device_buffer.cuh"
#include "tests/store/random_input.h"

namespace tierkv::testing {

inline constexpr Component kComponents[] = {Component::kKey, Component::kValue};

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

inline bool differs(const void* a, const void* b, size_t bytes) {
  return std::memcmp(a, b, bytes) != 0;
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

inline std::string state_difference(const CodedView& a, const CodedView& b) {
  const PageTableShape& t = a.allocator.shape.table;
  const size_t rows = t.num_rows();
  if (differs(a.allocator.tokens, b.allocator.tokens, rows * sizeof(SideCounts))) return "tokens";
  if (differs(a.allocator.pages, b.allocator.pages, rows * sizeof(SideCounts))) return "pages";
  if (differs(a.allocator.slots, b.allocator.slots, rows * t.row_stride() * 4)) return "slots";
  const RingCursors &x = *a.allocator.ring.cursors, &y = *b.allocator.ring.cursors;
  if (differs(&x, &y, sizeof(x))) return "ring cursors";
  for (int64_t p = x.start; p < x.end; ++p) {
    const int64_t i = p % a.allocator.shape.num_pages;
    if (a.allocator.ring.ids[i] != b.allocator.ring.ids[i]) return "ring";
  }
  for (int32_t q = 0; q < t.num_sequences; ++q) {
    if (a.allocator.sequences[q].state != b.allocator.sequences[q].state) return "sequence state";
    if (a.allocator.sequences[q].state == SequenceState::kFree) continue;
    if (differs(&a.infos[q], &b.infos[q], sizeof(SequenceInfo))) return "info";
    for (int32_t w = 0; w < t.rows_per_sequence; ++w) {
      const int32_t row = q * t.rows_per_sequence + w;
      const std::string text = row_difference(a, b, row, a.infos[q]);
      if (!text.empty()) return "row " + std::to_string(row) + ": " + text;
    }
  }
  return "";
}

class CodedTwins {
 public:
  CodedTwins(const KvStoreConfig& config, RandomInput* input, GpuStream stream = nullptr)
      : config_(config), input_(input) {
    auto host = CodedHostStore::make(config);
    auto device = CodedDeviceStore::make(config, stream);
    EXPECT_TRUE(host.is_ok()) << host.status().message();
    EXPECT_TRUE(device.is_ok()) << device.status().message();
    if (host) host_ = std::move(*host);
    if (device) device_ = std::move(*device);
  }
  CodedHostStore& host() { return *host_; }
  CodedDeviceStore& device() { return *device_; }
  void set_spread(float spread) { spread_ = spread; }

  // Both statuses, which must be the same; what the device only finds out later is waited for.
  Status same(const Status& host, Status device) {
    if (!device) {
      EXPECT_EQ(host.code(), device.code()) << host.message() << " | " << device.message();
      return host;
    }
    const Status later = device_->take_status();
    EXPECT_EQ(host.code(), later.code()) << host.message() << " | " << later.message();
    return host;
  }
  Status add(SequenceId* id) {
    const auto a = host_->add_sequence(), b = device_->add_sequence();
    if (a) *id = *a;
    return same(a.status(), b.status());
  }
  Status append(SequenceList l, int32_t tokens) {
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      const std::vector<uint16_t> k = values(l.count * tokens), v = values(l.count * tokens);
      const Status s = same(host_->append({l, layer, tokens, k.data(), v.data()}),
                            device_->append({l, layer, tokens, k_.put(k), v_.put(v)}));
      if (!s) return s;
    }
    return Status::ok();
  }
  Status prompt(SequenceList l, int32_t tokens) {
    const Status s = same(host_->begin_prompt(l, tokens), device_->begin_prompt(l, tokens));
    return s ? append(l, tokens) : s;
  }
  // Of one layer; now and then a token is significant.
  Status score(SequenceList l, int32_t layer, int32_t tokens) {
    std::vector<float> x;
    for (int64_t i = 0; i < int64_t{l.count} * config_.layout.num_kv_heads; ++i) {
      for (int32_t p = 0; p < tokens; ++p) {
        const auto threshold = static_cast<float>(config_.policy.alpha_high / (p + 1));
        x.push_back(input_->chance(0.005) ? threshold : input_->real(0, 0.9f) * threshold);
      }
    }
    Buffer scores;
    return same(host_->score_prompt({l, layer, x.data(), tokens}),
                device_->score_prompt({l, layer, scores.put(x), tokens}));
  }
  std::string stats_difference() {
    const StoreStats a = *host_->stats(), b = *device_->stats();
    for (int32_t tier = 0; tier < kNumTiers; ++tier) {
      if (a.tokens[tier] != b.tokens[tier]) return "tokens of tier " + std::to_string(tier);
    }
    return a.nominal_bytes == b.nominal_bytes && a.pages_free == b.pages_free ? "" : "bytes";
  }
  Status end_prompt(SequenceList l) { return same(host_->end_prompt(l), device_->end_prompt(l)); }
  Status step(SequenceList l, int32_t tokens) {
    const Status s = same(host_->begin_step(l, tokens), device_->begin_step(l, tokens));
    return s ? append(l, tokens) : s;
  }
  Status truncate(SequenceId id, int32_t tokens) {
    return same(host_->truncate(id, tokens), device_->truncate(id, tokens));
  }
  Status release(SequenceId id) { return same(host_->release(id), device_->release(id)); }
  Status fork(SequenceId id, SequenceId* copy) {
    const auto a = host_->fork(id), b = device_->fork(id);
    if (a) *copy = *a;
    return same(a.status(), b.status());
  }
  Status transfer(SequenceId id, SequenceId* copy) {
    const auto a = host_->export_sequence(id), b = device_->export_sequence(id);
    if (!a || !b) return same(a.status(), b.status());
    EXPECT_TRUE(*a == *b) << "exports differ";
    const auto c = host_->import_sequence(a->data(), a->size());
    const auto d = device_->import_sequence(b->data(), b->size());
    if (c) *copy = *c;
    return same(c.status(), d.status());
  }
  std::string difference() {
    const Result<const CodedHostStore*> mirror = device_->download();
    return mirror ? state_difference(host_->view(), (*mirror)->view()) : mirror.status().message();
  }

  // Of attention at every layer, by one query or several, in either type.
  std::string attention_difference(SequenceList l) {
    const std::string one = attention_difference(l, 1, DType::kFloat16);
    if (!one.empty()) return one;
    const DType dtype = input_->chance(0.5) ? DType::kFloat16 : DType::kBFloat16;
    return attention_difference(l, input_->uniform(1, kMaxQueryTokens), dtype);
  }
  std::string attention_difference(SequenceList l, int32_t q_len, DType dtype) {
    const CacheLayout& layout = config_.layout;
    const int64_t queries = int64_t{l.count} * q_len * layout.num_q_heads;
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      std::vector<uint16_t> q;
      for (int64_t i = 0; i < queries * layout.head_dim; ++i) {
        q.push_back(float_to_raw(dtype, input_->real(-2, 2)));
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
      const Status a = host_->attend(request);
      Buffer device_q, device_out, device_lse;
      request.q = device_q.put(q);
      request.out = device_out.put(std::vector<uint16_t>(q.size(), 0x7e00));
      request.lse = device_lse.put(std::vector<float>(queries, NAN));
      const Status b = device_->attend(request);
      // A truncated sequence may have fewer tokens that are not coded.
      if (q_len > 1 && a.code() == StatusCode::kInvalidArgument && a.code() == b.code()) return "";
      if (!a || !b) return a.message() + " | " + b.message();
      if (const Status later = device_->take_status(); !later) return later.message();
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
    const double product = config_.coded.steps == StepSource::kPrompt ? 0x1p-12 : 1e-6;
    return product * 2 * largest_ * std::sqrt(config_.layout.head_dim) + 1e-5;
  }
  double value_tolerance(DType dtype = DType::kFloat16) const {
    const double rounding = dtype == DType::kFloat16 ? 0.0 : 0x1p-7;
    return largest_ * (5 * 0x1p-11 + rounding + 2 * std::expm1(2 * score_tolerance()));
  }

  std::vector<uint16_t> values(int64_t tokens) {
    std::vector<uint16_t> x;
    const float offset = input_->real(-3, 3);
    for (int64_t i = 0; i < tokens * config_.layout.num_kv_heads * config_.layout.head_dim; ++i) {
      float sum = 0;
      for (int32_t j = 0; j < 4; ++j) sum += input_->real(-1, 1);
      x.push_back(float_to_half(offset + spread_ * sum));
    }
    largest_ = std::max<double>(largest_, 3 + 4 * spread_);
    return x;
  }

 private:
  KvStoreConfig config_;
  std::unique_ptr<CodedHostStore> host_;
  std::unique_ptr<CodedDeviceStore> device_;
  RandomInput* input_;
  Buffer k_, v_;
  float spread_ = 1;
  double largest_ = 0;
};

}  // namespace tierkv::testing
