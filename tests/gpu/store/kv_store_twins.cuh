// SPDX-License-Identifier: Apache-2.0
// A store in device memory beside one in host memory: the same calls, and the same bytes in every
// exported sequence.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "codec/format/element.h"
#include "tests/gpu/device_buffer.cuh"
#include "tests/support/fresh_random.h"
#include "tierkv/kv_store.h"

namespace tierkv::testing {

struct TwinChoice {
  BodyFormat format = CodedFormat{};
  int32_t head_dim = 64, num_kv_heads = 2, group = 2, num_layers = 2;
  int32_t max_sequences = 4, max_tokens = 700;
  int32_t window = 64, sinks = 4;
  int64_t memory_bytes = int64_t{1} << 27;
  DType dtype = DType::kFloat16;
  RopePairing pairing = RopePairing::kHalves;
  int32_t rotary_dims = 0;  // 0: all
  std::vector<int32_t> raw_layers;
};

inline std::vector<Rope> twin_rope(const TwinChoice& c) {
  if (c.pairing == RopePairing::kNone) return {};
  Rope rope = Rope::plain(10000, c.rotary_dims == 0 ? c.head_dim : c.rotary_dims);
  rope.pairing = c.pairing;
  return {rope};
}

inline StoreConfig twin_config(const TwinChoice& c) {
  StoreConfig config;
  config.layout.num_layers = c.num_layers;
  config.layout.num_kv_heads = c.num_kv_heads;
  config.layout.num_q_heads = c.num_kv_heads * c.group;
  config.layout.head_dim = c.head_dim;
  config.layout.sm_scale = 1 / std::sqrt(static_cast<double>(c.head_dim));
  config.layout.dtype = c.dtype;
  config.rope = twin_rope(c);
  config.format = c.format;
  config.max_sequences = c.max_sequences;
  config.max_tokens = c.max_tokens;
  config.window_tokens = c.window;
  config.sink_tokens = c.sinks;
  config.raw_layers = c.raw_layers;
  config.memory_bytes = c.memory_bytes;
  return config;
}

// The tokens of a call, for all layers.
struct TwinTokens {
  std::vector<uint16_t> k, v, q;
  std::vector<float> significance;  // empty: none
};

class KvTwins {
 public:
  struct Live {
    SequenceId host, device;
    int32_t tokens = 0;
  };

  // Throws where a store is not made.
  KvTwins(const StoreConfig& config, std::mt19937* rng) : config_(config), rng_(*rng) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    auto host = KvStore::create(config);
    auto device = KvStore::create_device(config, stream_);
    for (const Status& s : {host.status(), device.status()}) {
      if (!s) throw std::runtime_error(s.message());
    }
    host_ = std::move(*host);
    device_ = std::move(*device);
  }
  ~KvTwins() {
    device_.reset();
    cudaStreamDestroy(stream_);
  }

  // Copies elements on the stream, late; null: queries are there when attend() is called. No
  // queries may count.
  std::function<void(uint16_t* to, const uint16_t* from, int32_t count, cudaStream_t)> write_late;

  KvStore& host() { return *host_; }
  KvStore& device() { return *device_; }
  cudaStream_t stream() const { return stream_; }
  std::vector<Live>& live() { return live_; }
  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
  std::mt19937& rng() { return rng_; }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(rng_) < p; }

  void add() {
    const Result<SequenceId> a = host_->add_sequence(), b = device_->add_sequence();
    ASSERT_TRUE(a);
    ASSERT_TRUE(b) << b.status().message();
    live_.push_back({*a, *b, 0});
  }
  void release(size_t i) {
    ASSERT_TRUE(host_->release(live_[i].host));
    ASSERT_TRUE(device_->release(live_[i].device));
    live_.erase(live_.begin() + static_cast<int64_t>(i));
  }
  void fork(size_t i) {
    const Result<SequenceId> a = host_->fork(live_[i].host);
    const Result<SequenceId> b = device_->fork(live_[i].device);
    ASSERT_TRUE(a);
    ASSERT_TRUE(b) << b.status().message();
    live_.push_back({*a, *b, live_[i].tokens});
  }
  void truncate(size_t i, int32_t tokens) {
    ASSERT_TRUE(host_->truncate(live_[i].host, tokens));
    const Status s = device_->truncate(live_[i].device, tokens);
    ASSERT_TRUE(s) << s.message();
    live_[i].tokens = tokens;
  }

  void leave_out_significances() { significant_ = 0; }
  // Half of the calls bring significances; without them what attention counts is all that decides.
  TwinTokens draw(size_t count, int32_t tokens) {
    const CacheLayout& l = config_.layout;
    TwinTokens x;
    std::normal_distribution<float> normal;
    const auto fill = [&](int32_t heads, std::vector<uint16_t>* to) {
      to->resize(static_cast<size_t>(l.num_layers) * count * tokens * heads * l.head_dim);
      for (uint16_t& e : *to) e = float_to_raw(l.dtype, normal(rng_));
    };
    fill(l.num_kv_heads, &x.k);
    fill(l.num_kv_heads, &x.v);
    if (chance(significant_)) {
      x.significance.resize(static_cast<size_t>(l.num_layers) * count * l.num_kv_heads * tokens);
      for (float& s : x.significance) s = std::uniform_real_distribution<float>(0, 0.02f)(rng_);
    }
    return x;
  }

  // The same tokens to both; between() after each layer but the last.
  template <class Between>
  void extend(const std::vector<size_t>& who, int32_t tokens, const Between& between) {
    const Ids ids = ids_of(who);
    const TwinTokens x = draw(who.size(), tokens);
    expect_ok(host_->begin(ids.host_list(), tokens));
    expect_ok(device_->begin(ids.device_list(), tokens));
    for (int32_t l = 0; l < config_.layout.num_layers; ++l) {
      expect_ok(host_->append(call(ids.host_list(), l, tokens, x, nullptr)));
      expect_ok(device_->append(call(ids.device_list(), l, tokens, x, this)));
      if (l + 1 < config_.layout.num_layers) between();
      if (::testing::Test::HasFatalFailure()) return;
    }
    for (const size_t i : who) live_[i].tokens += tokens;
  }
  void extend(const std::vector<size_t>& who, int32_t tokens) {
    extend(who, tokens, [] {});
  }

  // Attention of both over the newest q_len tokens of a layer.
  void attend(const std::vector<size_t>& who, int32_t layer, int32_t q_len, DType dtype,
              bool count_query = false) {
    const CacheLayout& l = config_.layout;
    const Ids ids = ids_of(who);
    const size_t lines = who.size() * q_len * l.num_q_heads, values = lines * l.head_dim;
    std::vector<uint16_t> q(values), out(values);
    for (uint16_t& x : q) {
      x = float_to_raw(dtype, std::uniform_real_distribution<float>(-1, 1)(rng_));
    }
    std::vector<float> lse(lines), sinks(l.num_q_heads);
    for (float& x : sinks) x = chance(0.3) ? -INFINITY : static_cast<float>(pick(-3, 3));
    const bool has_sinks = chance(0.3), has_probabilities = chance(0.3), has_lse = chance(0.7);
    LayerAttend a;
    a.stride = config_.max_tokens;
    std::vector<float> probabilities(who.size() * q_len * l.num_kv_heads * a.stride, -1.0f);
    const std::vector<float> untouched = probabilities;
    a.layer = layer;
    a.q_len = q_len;
    a.dtype = dtype;
    a.count_query = count_query;
    a.sequences = ids.host_list();
    a.q = q.data();
    a.out = out.data();
    a.lse = has_lse ? lse.data() : nullptr;
    a.sinks = has_sinks ? sinks.data() : nullptr;
    a.probabilities = has_probabilities ? probabilities.data() : nullptr;
    expect_ok(host_->attend(a));
    a.sequences = ids.device_list();
    a.out = put(&out_, std::vector<uint16_t>(values, 0x7e00));
    a.lse = has_lse ? put(&lse_, std::vector<float>(lines, NAN)) : nullptr;
    a.sinks = has_sinks ? put(&sinks_, sinks) : nullptr;
    a.probabilities = has_probabilities ? put(&probabilities_, untouched) : nullptr;
    a.q = put(&q_, q);
    if (write_late) {
      expect_ok(device_->attend(a));  // makes the plan, which attention waits for
      put(&q_, std::vector<uint16_t>(values, 0x7e00));
      write_late(q_.get<uint16_t>(), put(&late_q_, q), static_cast<int32_t>(values), stream_);
    }
    expect_ok(device_->attend(a));
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    if (!has_lse) lse.clear();
    expect_close(out, out_.read<uint16_t>(values), lse,
                 has_lse ? lse_.read<float>(lines) : std::vector<float>(), dtype);
    if (!has_probabilities) return;
    const std::vector<float> found = probabilities_.read<float>(probabilities.size());
    for (size_t i = 0; i < found.size(); ++i) {  // logits are as exact as the lse
      ASSERT_NEAR(found[i], probabilities[i], 0.02f * std::fabs(probabilities[i]) + 1e-7f)
          << "probability " << i << ", stride " << a.stride;
    }
  }

  // Every open sequence has the same bytes in both.
  void expect_equal() {
    for (const Live& x : live_) {
      const auto a = host_->export_sequence(x.host), b = device_->export_sequence(x.device);
      ASSERT_TRUE(a);
      ASSERT_TRUE(b) << b.status().message();
      ASSERT_EQ(a->size(), b->size());
      for (size_t i = 0; i < a->size(); ++i) {
        ASSERT_EQ((*a)[i], (*b)[i]) << "byte " << i << " of " << a->size() << ", sequence of "
                                    << x.tokens << " tokens, slot " << x.device.slot;
      }
    }
    expect_ok(device_->take_status());
  }

  // Some positions of a layer, decoded.
  void expect_decoded(size_t i, int32_t layer, DType dtype) {
    const int32_t first = pick(0, live_[i].tokens), end = pick(first, live_[i].tokens);
    if (first == end) return;
    const Decoded x = decode(i, layer, {first, end}, dtype);
    expect_values(x.k[0], x.k[1], dtype, "k");
    expect_values(x.v[0], x.v[1], dtype, "v");
  }

  // The host goes on with the device's sequence: probabilities that a GPU counts are rounded in
  // another way, so that tokens in doubt become different ones. Returns how many rows of tokens in
  // [first, end) of a layer did.
  int32_t adopt(size_t i, int32_t layer, int32_t first, int32_t end) {
    const Decoded x = decode(i, layer, {first, end}, DType::kFloat16);
    const int32_t dim = config_.layout.head_dim;
    int32_t others = 0;
    for (size_t at = 0; at < x.v[0].size(); at += dim) {
      int32_t far = 0;
      for (size_t d = at; d < at + dim; ++d) {
        const float a = half_to_float(x.v[0][d]), b = half_to_float(x.v[1][d]);
        far += std::fabs(a - b) > 0x1p-9f * (0.5f + std::fabs(a)) ? 1 : 0;
      }
      others += far > 0 ? 1 : 0;
    }
    const auto bytes = device_->export_sequence(live_[i].device);
    EXPECT_TRUE(bytes);
    if (!bytes) return others;
    const auto id = host_->import_sequence(bytes->data(), bytes->size());
    EXPECT_TRUE(id) << id.status().message();
    EXPECT_TRUE(host_->release(live_[i].host));
    if (id) live_[i].host = *id;
    return others;
  }

  struct Ids {
    std::vector<SequenceId> host, device;
    SequenceList host_list() const { return {host.data(), static_cast<int32_t>(host.size())}; }
    SequenceList device_list() const {
      return {device.data(), static_cast<int32_t>(device.size())};
    }
  };
  Ids ids_of(const std::vector<size_t>& who) const {
    Ids ids;
    for (const size_t i : who) {
      ids.host.push_back(live_[i].host);
      ids.device.push_back(live_[i].device);
    }
    return ids;
  }
  // A random part of the open sequences, in random order.
  std::vector<size_t> some() {
    std::vector<size_t> who(live_.size());
    for (size_t i = 0; i < who.size(); ++i) who[i] = i;
    std::shuffle(who.begin(), who.end(), rng_);
    who.resize(static_cast<size_t>(pick(1, static_cast<int32_t>(who.size()))));
    return who;
  }

  // up: where the tokens go to the device.
  LayerAppend call(SequenceList list, int32_t layer, int32_t tokens, const TwinTokens& x,
                   KvTwins* up) {
    const CacheLayout& l = config_.layout;
    const size_t values = static_cast<size_t>(list.count) * tokens * l.num_kv_heads * l.head_dim;
    const size_t scores = static_cast<size_t>(list.count) * l.num_kv_heads * tokens;
    const auto part = [layer](const auto& from, size_t size) {
      return std::decay_t<decltype(from)>(from.begin() + static_cast<int64_t>(layer * size),
                                          from.begin() + static_cast<int64_t>((layer + 1) * size));
    };
    LayerAppend a;
    a.sequences = list;
    a.layer = layer;
    a.tokens = tokens;
    a.stride = tokens;
    const bool scored = !x.significance.empty();
    if (up == nullptr) {
      a.k = x.k.data() + layer * values;
      a.v = x.v.data() + layer * values;
      a.significance = scored ? x.significance.data() + layer * scores : nullptr;
    } else {
      EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
      a.k = put(&k_, part(x.k, values));
      a.v = put(&v_, part(x.v, values));
      a.significance = scored ? put(&scores_, part(x.significance, scores)) : nullptr;
    }
    return a;
  }
  static void expect_ok(const Status& s) {
    ASSERT_TRUE(s) << status_name(s.code()) << ": " << s.message();
  }
  // On the device before anything that is enqueued later, and after what was enqueued before: the
  // stream and the copy do not wait for each other.
  template <class T>
  T* put(Buffer* buffer, const std::vector<T>& x) {
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    T* const to = buffer->put(x);
    EXPECT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess);
    return to;
  }

  // Keys and queries: |q| <= 1, keys normal; the body's scores come of fp16 operands summed in
  // fp32, each product off by 2^-11 at most of |q k|: sqrt(dim) * sm_scale * 3 * 2^-10 is below
  // 0.005. Outputs: p in fp16, the bodies' and the result rounded to the type, values to 6 sigma.
  static void expect_close(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b,
                           const std::vector<float>& lse_a, const std::vector<float>& lse_b,
                           DType dtype) {
    for (size_t i = 0; i < lse_a.size(); ++i) {
      ASSERT_NEAR(lse_a[i], lse_b[i], 0.01) << "lse of line " << i;
    }
    const float bound = dtype == DType::kBFloat16 ? 0.06f : 0.03f;
    float most = 0, sum = 0;
    size_t at = 0;
    for (size_t i = 0; i < a.size(); ++i) {
      const float off = std::fabs(raw_to_float(dtype, a[i]) - raw_to_float(dtype, b[i]));
      ASSERT_FALSE(std::isnan(off)) << "out " << i;
      sum += off;
      if (off > most) most = off, at = i;
    }
    ASSERT_LE(most, bound) << "out " << at << ", mean " << sum / static_cast<float>(a.size());
  }

 private:
  // By the host, then by the device.
  struct Decoded {
    std::vector<uint16_t> k[2], v[2];
  };
  Decoded decode(size_t i, int32_t layer, std::pair<int32_t, int32_t> range, DType dtype) {
    const auto [first, end] = range;
    const CacheLayout& l = config_.layout;
    const auto values = static_cast<size_t>(end - first) * l.num_kv_heads * l.head_dim;
    Decoded x;
    x.k[0].resize(values), x.v[0].resize(values);
    LayerRange call = {live_[i].host, layer, first, end, dtype, x.k[0].data(), x.v[0].data()};
    expect_ok(host_->decode_range(call));
    call.sequence = live_[i].device;
    call.k = put(&k_, std::vector<uint16_t>(values, 0x7e00));
    call.v = put(&v_, std::vector<uint16_t>(values, 0x7e00));
    expect_ok(device_->decode_range(call));
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    x.k[1] = k_.read<uint16_t>(values), x.v[1] = v_.read<uint16_t>(values);
    return x;
  }
  // The host rounds finished values once; kernels may differ by that rounding.
  static void expect_values(const std::vector<uint16_t>& a, const std::vector<uint16_t>& b,
                            DType dtype, const char* what) {
    for (size_t i = 0; i < a.size(); ++i) {
      const float x = raw_to_float(dtype, a[i]), y = raw_to_float(dtype, b[i]);
      const float unit = dtype == DType::kBFloat16 ? 0x1p-7f : 0x1p-9f;
      ASSERT_NEAR(x, y, unit * (0.5f + std::fabs(x))) << what << " " << i;
    }
  }

  StoreConfig config_;
  std::mt19937& rng_;
  double significant_ = 0.5;  // of the calls, those with significances
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<KvStore> host_, device_;
  std::vector<Live> live_;
  Buffer k_, v_, scores_, q_, late_q_, out_, lse_, sinks_, probabilities_;
};

}  // namespace tierkv::testing
