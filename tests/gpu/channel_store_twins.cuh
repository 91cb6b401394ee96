// A host and a device store of channel blocks that get the same calls, and the comparison of what
// they hold and find.
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
#include "store/channel_device.h"
#include "tests/gpu/device_buffer.cuh"
#include "tests/store/random_input.h"

namespace tierkv::testing {

inline constexpr Component kComponents[] = {Component::kKey, Component::kValue};

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

inline bool differs(const void* a, const void* b, size_t bytes) {
  return std::memcmp(a, b, bytes) != 0;
}

inline std::string row_difference(const ChannelView& a, const ChannelView& b, int32_t row,
                                  const SequenceInfo& info) {
  for (int32_t i = 0; i < a.blocks_of(info); ++i) {
    if (differs(a.block(row, i), b.block(row, i), a.layout.bytes)) {
      return "block " + std::to_string(i);
    }
  }
  const size_t tile_bytes = TileLayout{16, a.head_dim()}.bytes();
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

inline std::string state_difference(const ChannelView& a, const ChannelView& b) {
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

class ChannelTwins {
 public:
  ChannelTwins(const KvStoreConfig& config, RandomInput* input, GpuStream stream = nullptr)
      : config_(config), input_(input) {
    auto host = ChannelHostStore::make(config);
    auto device = ChannelDeviceStore::make(config, stream);
    EXPECT_TRUE(host.is_ok()) << host.status().message();
    EXPECT_TRUE(device.is_ok()) << device.status().message();
    if (host) host_ = std::move(*host);
    if (device) device_ = std::move(*device);
  }
  ChannelHostStore& host() { return *host_; }
  ChannelDeviceStore& device() { return *device_; }

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
  // Of one layer; a value may be bad, and is then refused.
  Status append_layer(SequenceList l, int32_t layer, int32_t tokens, bool bad) {
    std::vector<uint8_t> k = values(l.count * tokens), v = values(l.count * tokens);
    if (bad) {
      const auto bytes = static_cast<int32_t>(dtype_bytes(config_.layout.dtype));
      const auto count = static_cast<int32_t>(v.size()) / bytes;
      std::fill_n(v.data() + int64_t{input_->uniform(0, count - 1)} * bytes, bytes, uint8_t{0xff});
    }
    return same(host_->append({l, layer, tokens, k.data(), v.data()}),
                device_->append({l, layer, tokens, k_.put(k), v_.put(v)}));
  }
  Status append(SequenceList l, int32_t tokens) {
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      if (input_->chance(0.1)) {
        EXPECT_EQ(append_layer(l, layer, tokens, true).code(), StatusCode::kNonFinite);
      }
      if (const Status s = append_layer(l, layer, tokens, false); !s) return s;
    }
    return Status::ok();
  }
  Status prompt(SequenceList l, int32_t tokens) {
    const Status s = same(host_->begin_prompt(l, tokens), device_->begin_prompt(l, tokens));
    return s ? append(l, tokens) : s;
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
    const Result<const ChannelHostStore*> mirror = device_->download();
    return mirror ? state_difference(host_->view(), (*mirror)->view()) : mirror.status().message();
  }

  // One query of each head, random.
  std::vector<uint16_t> queries(int32_t count) {
    std::vector<uint16_t> q;
    const int64_t n = int64_t{count} * config_.layout.num_q_heads * config_.layout.head_dim;
    for (int64_t i = 0; i < n; ++i) q.push_back(float_to_half(input_->real(-1, 1)));
    return q;
  }
  // Of attention at every layer.
  std::string attention_difference(SequenceList l) {
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      const std::vector<uint16_t> q = queries(l.count);
      AttendRequest request;
      request.sequences = l;
      request.layer = layer;
      Buffer device_q, device_out, device_lse;
      request.q = device_q.put(q);
      request.out = device_out.put(std::vector<uint16_t>(q.size(), 0x7e00));
      const size_t heads = q.size() / config_.layout.head_dim;
      request.lse = device_lse.put(std::vector<float>(heads, NAN));
      if (const Status s = device_->attend(request); !s) return s.message();
      if (const Status s = device_->take_status(); !s) return s.message();
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
  // weights and outputs are rounded to fp16 once each.
  std::string output_difference(AttendRequest request, const std::vector<uint16_t>& q,
                                const std::vector<uint16_t>& got,
                                const std::vector<float>& got_lse) {
    std::vector<uint16_t> out(q.size(), 0x7e00);
    std::vector<float> lse(q.size() / config_.layout.head_dim, NAN);
    request.q = q.data();
    request.out = out.data();
    request.lse = lse.data();
    if (const Status s = host_->attend(request); !s) return s.message();
    const double score = 1.01 * 6 * 0x1p-11 * 2 / std::sqrt(3) *
                         std::sqrt(config_.layout.head_dim) * config_.layout.sm_scale;
    const double value = kLargest * (3 * 0x1p-11 + 2 * std::expm1(2 * score));
    for (size_t i = 0; i < got_lse.size(); ++i) {
      if (std::isinf(lse[i]) && lse[i] == got_lse[i]) continue;
      if (!(std::fabs(lse[i] - got_lse[i]) <= score + 1e-5 * std::fabs(lse[i]))) {
        return "lse " + std::to_string(lse[i]) + " " + std::to_string(got_lse[i]);
      }
    }
    for (size_t i = 0; i < out.size(); ++i) {
      const double x = half_to_float(out[i]), y = half_to_float(got[i]);
      if (!(std::fabs(x - y) <= value)) {
        return "out " + std::to_string(x) + " " + std::to_string(y) + " at " + std::to_string(i);
      }
    }
    return "";
  }

  // Within +-kLargest.
  static constexpr double kLargest = 2;
  std::vector<uint8_t> values(int64_t tokens) {
    const DType dtype = config_.layout.dtype;
    const int64_t n = tokens * config_.layout.num_kv_heads * config_.layout.head_dim;
    std::vector<uint8_t> x(n * dtype_bytes(dtype));
    const float offset = input_->real(-1, 1), spread = std::exp2(input_->real(-6, 0));
    for (int64_t i = 0; i < n; ++i) {
      store_element(x.data(), dtype, i, offset + spread * input_->real(-1, 1));
    }
    return x;
  }

 private:
  KvStoreConfig config_;
  std::unique_ptr<ChannelHostStore> host_;
  std::unique_ptr<ChannelDeviceStore> device_;
  RandomInput* input_;
  Buffer k_, v_;
};

}  // namespace tierkv::testing
