// A host and a device store of coded pages that get the same calls: equal states after each, byte
// for byte, and attention that agrees.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "store/coded_device.h"
#include "tests/store/random_input.h"

namespace tierkv::testing {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// Device memory that grows with what is put into it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { cudaFree(memory_); }
  template <class T>
  T* put(const std::vector<T>& x) {
    const size_t bytes = x.size() * sizeof(T);
    if (bytes > bytes_) {
      cudaFree(memory_);
      EXPECT_EQ(cudaMalloc(&memory_, bytes), cudaSuccess);
      bytes_ = bytes;
    }
    EXPECT_EQ(cudaMemcpy(memory_, x.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
    return static_cast<T*>(memory_);
  }
  template <class T>
  std::vector<T> read(size_t count) const {
    std::vector<T> x(count);
    EXPECT_EQ(cudaMemcpy(x.data(), memory_, count * sizeof(T), cudaMemcpyDeviceToHost),
              cudaSuccess);
    return x;
  }

 private:
  void* memory_ = nullptr;
  size_t bytes_ = 0;
};

KvStoreConfig coded_config(RandomInput* input, int32_t head_dim) {
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

bool differs(const void* a, const void* b, size_t bytes) {
  return std::memcmp(a, b, bytes) != 0;
}

std::string row_difference(const CodedView& a, const CodedView& b, int32_t row,
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

std::string state_difference(const CodedView& a, const CodedView& b) {
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

  // Of attention at every layer.
  std::string attention_difference(SequenceList l) {
    const CacheLayout& layout = config_.layout;
    const int64_t queries = int64_t{l.count} * layout.num_q_heads;
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      std::vector<uint16_t> q;
      for (int64_t i = 0; i < queries * layout.head_dim; ++i) {
        q.push_back(float_to_half(input_->real(-2, 2)));
      }
      std::vector<uint16_t> out(q.size(), 0x7e00);
      std::vector<float> lse(queries, NAN);
      AttendRequest request;
      request.sequences = l;
      request.layer = layer;
      request.q = q.data();
      request.out = out.data();
      request.lse = lse.data();
      const Status a = host_->attend(request);
      Buffer device_q, device_out, device_lse;
      request.q = device_q.put(q);
      request.out = device_out.put(std::vector<uint16_t>(q.size(), 0x7e00));
      request.lse = device_lse.put(std::vector<float>(queries, NAN));
      const Status b = device_->attend(request);
      if (!a || !b) return a.message() + " | " + b.message();
      if (const Status later = device_->take_status(); !later) return later.message();
      const auto got = device_out.read<uint16_t>(q.size());
      const auto got_lse = device_lse.read<float>(queries);
      // Scores are sums in fp32 of up to 128 products, |q k| at most 2 largest each: an error of
      // 1e-6 of their sum at most, which weights an output by its exponential. Probabilities, both
      // parts and the output are rounded to fp16 once each.
      const double score = 1e-6 * 2 * largest_ * std::sqrt(layout.head_dim) + 1e-5;
      const double value = largest_ * (5 * 0x1p-11 + 2 * std::expm1(2 * score));
      for (int64_t i = 0; i < queries; ++i) {
        if (std::isinf(lse[i]) && lse[i] == got_lse[i]) continue;
        if (!(std::fabs(lse[i] - got_lse[i]) <= 2e-3 + 2 * score)) {
          return "lse " + std::to_string(lse[i]) + " " + std::to_string(got_lse[i]);
        }
      }
      for (size_t i = 0; i < out.size(); ++i) {
        const double x = half_to_float(out[i]), y = half_to_float(got[i]);
        if (!(std::fabs(x - y) <= value)) {
          return "out " + std::to_string(x) + " " + std::to_string(y) + " at " + std::to_string(i);
        }
      }
    }
    return "";
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

struct Sequence {
  SequenceId id;
  bool live = false;
  int32_t tokens = 0;
};

class Trace {
 public:
  Trace(const KvStoreConfig& config, RandomInput* input) : twins_(config, input), input_(input) {
    twins_.set_spread(std::exp2(input->real(-2, 5)));
  }
  void run(int32_t calls) {
    for (int32_t i = 0; i < calls; ++i) {
      const Status s = call();
      const bool expected =
          s || s.code() == StatusCode::kOutOfPages || s.code() == StatusCode::kOutOfRange;
      ASSERT_TRUE(expected) << s.message();
      ASSERT_EQ(twins_.difference(), "") << "after call " << i;
      if (i % 8 != 7) continue;
      for (const bool live : {false, true}) {
        const std::vector<SequenceId> ids = some(live, 1.0);
        if (ids.empty()) continue;
        ASSERT_EQ(twins_.attention_difference({ids.data(), static_cast<int32_t>(ids.size())}), "")
            << "after call " << i;
      }
    }
  }

 private:
  std::vector<SequenceId> some(bool live, double share) {
    std::vector<SequenceId> ids;
    for (const Sequence& s : sequences_) {
      if (s.live == live && input_->chance(share)) ids.push_back(s.id);
    }
    return ids;
  }
  void grow(const std::vector<SequenceId>& ids, int32_t tokens) {
    for (Sequence& s : sequences_) s.tokens += std::count(ids.begin(), ids.end(), s.id) * tokens;
  }
  Status call() {
    const int32_t kind = input_->uniform(0, 99);
    if (sequences_.empty() || kind < 8) {
      Sequence s;
      const Status status = twins_.add(&s.id);
      if (status) sequences_.push_back(s);
      return status;
    }
    const bool live = kind >= 36;
    const std::vector<SequenceId> ids = some(live, 0.7);
    const SequenceList list = {ids.data(), static_cast<int32_t>(ids.size())};
    if (kind < 76 && ids.empty()) return Status::ok();
    if (kind < 26) {
      const int32_t tokens = input_->uniform(1, 180);
      const Status s = twins_.prompt(list, tokens);
      if (s) grow(ids, tokens);
      return s;
    }
    if (kind < 36) {
      const Status status = twins_.end_prompt(list);
      for (Sequence& s : sequences_) {
        s.live |= status && std::count(ids.begin(), ids.end(), s.id) > 0;
      }
      return status;
    }
    if (kind < 76) {
      const int32_t tokens = input_->uniform(1, kMaxStepTokens);
      const Status s = twins_.step(list, tokens);
      if (s) grow(ids, tokens);
      return s;
    }
    return one(kind);
  }
  Status one(int32_t kind) {
    const int32_t i = input_->uniform(0, static_cast<int32_t>(sequences_.size()) - 1);
    Sequence& s = sequences_[i];
    if (kind < 82) {
      const int32_t tokens = input_->uniform(std::max(0, s.tokens - 100), s.tokens);
      const Status status = twins_.truncate(s.id, tokens);
      if (status) s.tokens = tokens;
      return status;
    }
    if (kind < 88) {
      const SequenceId id = s.id;
      sequences_.erase(sequences_.begin() + i);
      return twins_.release(id);
    }
    if (!s.live) return Status::ok();
    Sequence copy = s;
    const Status status = kind < 94 ? twins_.fork(s.id, &copy.id) : twins_.transfer(s.id, &copy.id);
    if (status) sequences_.push_back(copy);
    return status;
  }

  CodedTwins twins_;
  RandomInput* input_;
  std::vector<Sequence> sequences_;
};

TEST(GpuCodedStore, IsTheHostStoreByteForByte) {
  for (int32_t i = 0; i < 9; ++i) {
    RandomInput input;
    KvStoreConfig config = coded_config(&input, i % 3 == 0 ? 64 : i % 3 == 1 ? 128 : 96);
    if (i % 2 == 1) config.coded.streams_per_lane = 1;
    if (i % 4 == 1) config.coded.max_length = 9;
    if (i % 4 == 2) config.policy.window_tokens = 64;
    if (i % 4 == 3) config.num_pages = 60;
    if (i % 5 == 4) config.coded.means = MeanSource::kNone;
    if (i % 5 == 3) {
      config.coded.means = MeanSource::kGiven;
      for (int32_t j = 0; j < 4 * config.layout.head_dim; ++j) {
        config.coded.key_means.push_back(input.real(-3, 3));
        config.coded.value_means.push_back(input.real(-3, 3));
      }
    }
    Trace trace(config, &input);
    trace.run(60);
    if (::testing::Test::HasFatalFailure()) return;
  }
}

// A long life of steps alone: blocks that steps code, on pages that steps take.
TEST(GpuCodedStore, StepsCodeTheirBlocks) {
  RandomInput input;
  KvStoreConfig config = coded_config(&input, 128);
  config.max_tokens = 1000;
  CodedTwins twins(config, &input);
  SequenceId ids[2];
  ASSERT_TRUE(twins.add(&ids[0]));
  ASSERT_TRUE(twins.add(&ids[1]));
  ASSERT_TRUE(twins.prompt({ids, 1}, 130));
  ASSERT_TRUE(twins.prompt({ids + 1, 1}, 7));
  ASSERT_TRUE(twins.end_prompt({ids, 2}));
  for (int32_t i = 0; i < 110; ++i) {
    ASSERT_TRUE(twins.step({ids, 2}, 1 + i % 5));
    if (i % 10 != 9) continue;
    ASSERT_EQ(twins.difference(), "") << i;
    ASSERT_EQ(twins.attention_difference({ids, 2}), "") << i;
  }
  const StoreStats a = *twins.host().stats(), b = *twins.device().stats();
  EXPECT_EQ(a.nominal_bytes, b.nominal_bytes);
  EXPECT_EQ(a.pages_free, b.pages_free);
}

TEST(GpuCodedStore, BadValuesAreToldAndTakenBack) {
  RandomInput input;
  CodedTwins twins(coded_config(&input, 64), &input);
  SequenceId id;
  ASSERT_TRUE(twins.add(&id));
  ASSERT_TRUE(twins.prompt({&id, 1}, 100));
  ASSERT_TRUE(twins.end_prompt({&id, 1}));
  const std::vector<uint16_t> good = twins.values(1);
  for (const uint16_t bits : {0x7c00, 0x7e00, 0x7bff}) {  // the last has no code
    ASSERT_TRUE(
        twins.same(twins.host().begin_step({&id, 1}, 1), twins.device().begin_step({&id, 1}, 1)));
    std::vector<uint16_t> bad = good;
    bad[65] = bits;
    Buffer k, v;
    const Status host = twins.host().append({{&id, 1}, 0, 1, good.data(), bad.data()});
    ASSERT_FALSE(host);
    ASSERT_TRUE(twins.device().append({{&id, 1}, 0, 1, k.put(good), v.put(bad)}));
    // What comes behind the failure is not done.
    ASSERT_TRUE(twins.device().append({{&id, 1}, 1, 1, k.put(good), v.put(good)}));
    EXPECT_EQ(twins.device().take_status().code(), host.code());
    ASSERT_TRUE(twins.append({&id, 1}, 1));
    EXPECT_EQ(twins.difference(), "");
  }
}

// A coded token, or one of the window, that has no code: the prompt stays a prompt.
TEST(GpuCodedStore, APromptWithoutACodeStaysAPrompt) {
  RandomInput input;
  for (const bool first : {true, false}) {  // before and after there are codebooks
    CodedTwins twins(coded_config(&input, 64), &input);
    SequenceId id;
    for (int32_t i = first ? 0 : 1; i < 2; ++i) {
      ASSERT_TRUE(twins.add(&id));
      ASSERT_TRUE(twins.prompt({&id, 1}, 200));
      if (i == 0) break;
      ASSERT_TRUE(twins.end_prompt({&id, 1}));
    }
    for (const int32_t at : {10, 190}) {
      ASSERT_TRUE(twins.add(&id));
      ASSERT_TRUE(twins.same(twins.host().begin_prompt({&id, 1}, 200),
                             twins.device().begin_prompt({&id, 1}, 200)));
      for (int32_t layer = 0; layer < 2; ++layer) {
        std::vector<uint16_t> x = twins.values(200);
        if (layer == 1) x[at * 128 + 70] = 0x7bff;
        Buffer k;
        const uint16_t* device = k.put(x);
        ASSERT_TRUE(twins.same(twins.host().append({{&id, 1}, layer, 200, x.data(), x.data()}),
                               twins.device().append({{&id, 1}, layer, 200, device, device})));
      }
      EXPECT_EQ(twins.end_prompt({&id, 1}).code(), StatusCode::kOutOfRange);
      EXPECT_EQ(twins.difference(), "") << at;
      ASSERT_TRUE(twins.release(id));
    }
  }
}

// One captured step, replayed: whether a block is due is the device's to find.
TEST(GpuCodedStore, ACapturedStepCodesBlocks) {
  RandomInput input;
  KvStoreConfig config = coded_config(&input, 128);
  cudaStream_t stream;
  ASSERT_EQ(cudaStreamCreate(&stream), cudaSuccess);
  {
    CodedTwins twins(config, &input, stream);
    SequenceId ids[2];
    ASSERT_TRUE(twins.add(&ids[0]));
    ASSERT_TRUE(twins.add(&ids[1]));
    ASSERT_TRUE(twins.prompt({ids, 1}, 140));
    ASSERT_TRUE(twins.prompt({ids + 1, 1}, 100));
    ASSERT_TRUE(twins.end_prompt({ids, 2}));
    Buffer k[2], v[2];
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    for (int32_t i = 0; i < 200; ++i) {
      ASSERT_TRUE(twins.host().begin_step({ids, 2}, 1));
      uint16_t *device_k[2], *device_v[2];
      for (int32_t layer = 0; layer < 2; ++layer) {
        const std::vector<uint16_t> x = twins.values(2), y = twins.values(2);
        ASSERT_TRUE(twins.host().append({{ids, 2}, layer, 1, x.data(), y.data()}));
        device_k[layer] = k[layer].put(x);
        device_v[layer] = v[layer].put(y);
      }
      if (i == 0) {
        ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
        const Status begun = twins.device().begin_step({ids, 2}, 1);
        EXPECT_TRUE(begun) << begun.message();
        for (int32_t layer = 0; layer < 2; ++layer) {
          EXPECT_TRUE(
              twins.device().append({{ids, 2}, layer, 1, device_k[layer], device_v[layer]}));
        }
        ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
      } else {
        ASSERT_TRUE(twins.device().note_replay({ids, 2}, 1));
      }
      ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
      ASSERT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
      if (i % 20 == 19) {
        ASSERT_TRUE(twins.device().take_status());
        ASSERT_EQ(twins.difference(), "") << i;
        ASSERT_EQ(twins.attention_difference({ids, 2}), "") << i;
      }
    }
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  cudaStreamDestroy(stream);
}

TEST(GpuCodedStore, RefusesByName) {
  RandomInput input;
  const auto refused = [](const KvStoreConfig& c) {
    const auto store = create_device_store(c, nullptr);
    return store ? Status::ok() : store.status();
  };
  EXPECT_EQ(refused(coded_config(&input, 256)).code(), StatusCode::kUnsupported);
  KvStoreConfig c = coded_config(&input, 64);
  c.layout.num_q_heads = 18;
  EXPECT_EQ(refused(c).code(), StatusCode::kUnsupported);
  c = coded_config(&input, 64);
  c.coded.key_steps.clear();
  EXPECT_EQ(refused(c).code(), StatusCode::kInvalidArgument);
  c = coded_config(&input, 64);
  CodedTwins twins(c, &input);
  SequenceId id;
  ASSERT_TRUE(twins.add(&id));
  ASSERT_TRUE(twins.prompt({&id, 1}, 3));
  EXPECT_EQ(twins.device().score_prompt({}).code(), StatusCode::kUnsupported);
  Buffer q;
  AttendRequest request;
  request.sequences = {&id, 1};
  request.q = request.out = q.put(std::vector<uint16_t>(6 * 64));
  request.probabilities = reinterpret_cast<float*>(q.put(std::vector<float>(2000)));
  request.stride = 500;
  EXPECT_EQ(twins.device().attend(request).code(), StatusCode::kUnsupported);
}

}  // namespace
}  // namespace tierkv::testing
