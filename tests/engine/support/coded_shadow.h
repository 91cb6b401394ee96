// SPDX-License-Identifier: Apache-2.0
// Coded rows in host memory with a shadow: the rows of a device, their kernels run on the host.
// Every call that compresses is done by both from the same state.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/engine/support/coded_copy.h"
#include "tests/engine/support/emulated_attention.h"
#include "tests/support/fresh_random.h"

namespace tierkv::store::test {

// How often what was compared.
struct Seen {
  int64_t blocks = 0, continued = 0, captured = 0, reads = 0, restored = 0, answers = 0,
          given_up = 0;
};

// CodedRows, beside which a device does the same.
class Shadowed final : public RowFormat {
 public:
  bool captures = false;  // all that can be captured

  Shadowed(const StoreConfig& config, std::mt19937* rng, Seen* seen)
      : config_(config), rng_(rng), seen_(seen) {
    inner_ = std::move(*make_row_format(config));
    other_ = std::move(*make_row_format(config));
    coded_ = static_cast<CodedRows*>(inner_.get());
    device_ = std::make_unique<DeviceCodedRows>(config, static_cast<CodedRows*>(other_.get()));
    if ((*rng)() % 2 == 0) device_->set_staging_bytes(1);
  }
  void begin(HostPlace* place) {
    host_pages_ = &place->pages();
    copy_ = std::make_unique<Copy>(config_, *inner_, place);
    const Status s = device_->bind(copy_->view(), &fault_, nullptr);
    ASSERT_TRUE(s) << s.message();
  }
  void fork(int32_t from, int32_t to) {
    copy_->sync();
    EXPECT_TRUE(device_->forked(from, to));
    for (int32_t l = 0; l < config_.layout.num_layers; ++l)
      body_ends_[{to, l}] = body_ends_[{from, l}];
  }
  // Attention over the bodies of a layer, against softmax in double.
  void attend(const std::vector<int32_t>& slots, int32_t layer, int32_t q_len) {
    copy_->sync();
    const CacheLayout& shape = config_.layout;
    const int32_t dim = shape.head_dim, count = static_cast<int32_t>(slots.size());
    const int32_t lines = count * q_len * shape.num_q_heads;
    std::vector<uint16_t> q, out(static_cast<size_t>(lines) * dim, 0x7e00);
    for (int32_t i = 0; i < lines * dim; ++i) {
      q.push_back(float_to_half(std::uniform_real_distribution<float>(-1, 1)(*rng_)));
    }
    std::vector<float> lse(lines, NAN);
    std::vector<LayerTokens> at;
    DeviceAttendBody body;
    for (const int32_t slot : slots) {
      const int32_t end = body_ends_[{slot, layer}];
      at.push_back({end + 20, end});
      body.most_tokens = std::max(body.most_tokens, end + 20);
    }
    body.slots = slots.data(), body.at = at.data();
    body.count = count, body.layer = layer, body.q_len = q_len;
    body.q = q.data(), body.out = out.data(), body.lse = lse.data();
    const Status s = device_->attend(body);
    ASSERT_TRUE(s) << s.message();
    for (int32_t i = 0; i < lines; ++i) {
      const int32_t sequence = i / (q_len * shape.num_q_heads);
      const int32_t h = i % shape.num_q_heads / (shape.num_q_heads / shape.num_kv_heads);
      const int32_t first = config_.sink_tokens, end = at[sequence].body_end;
      if (end == 0) {
        ASSERT_EQ(lse[i], -INFINITY);
        continue;
      }
      HostLayer of = {slots[sequence], layer, at[sequence], nullptr,
                      copy_->state(slots[sequence], layer)};
      std::vector<float> k(static_cast<size_t>(end - first) * dim), v(k.size());
      inner_->read(of, h, first, end, k.data(), v.data(), nullptr);
      std::vector<double> expected(dim), sizes(dim);
      double sum = 0, largest = 0;
      for (int32_t p = 0; p < end - first; ++p) {
        double logit = 0, size = 0;
        for (int32_t d = 0; d < dim; ++d) {
          const double product = half_to_float(q[i * dim + d]) * k[p * dim + d];
          logit += product, size += std::fabs(product);
        }
        largest = std::max(largest, size * shape.sm_scale);
        const double weight = std::exp(logit * shape.sm_scale);
        sum += weight;
        for (int32_t d = 0; d < dim; ++d) {
          expected[d] += weight * v[p * dim + d];
          sizes[d] += weight * std::fabs(v[p * dim + d]);
        }
      }
      // Each product's queries, keys and turns are fp16: off by 2^-9 of it. So are weights by as
      // much as their logit, and by 2^-10 of their own; they move the sum and what it divides.
      const double off = 0.002 + largest * 0x1p-9;
      ASSERT_NEAR(lse[i], std::log(sum), off) << "line " << i << " body " << end;
      for (int32_t d = 0; d < dim; ++d) {
        ASSERT_NEAR(half_to_float(out[i * dim + d]), expected[d] / sum,
                    0.001 + 2 * off * sizes[d] / sum)
            << "line " << i << " dim " << d;
      }
      ++seen_->answers;
    }
    EXPECT_EQ(fault_.status, StatusCode::kOk);
    // A row that attention gives up is told, but not which it is.
    uint8_t* const state = copy_->state(slots[0], layer);
    if (at[0].body_end == 0 || *reinterpret_cast<const int32_t*>(state) == 0) return;
    const int64_t refs = coded_->shape().refs_byte(0, Component::kValue);
    reinterpret_cast<CodedBlockRef*>(state + refs)->units = 0;
    ASSERT_TRUE(device_->attend(body));
    EXPECT_EQ(lse[0], -INFINITY);
    EXPECT_EQ(fault_.status, StatusCode::kCorrupt);
    EXPECT_EQ(fault_.slot, -1);
    fault_ = {};
    ++seen_->given_up;
  }

  const FormatSizes& sizes() const override { return inner_->sizes(); }
  void bind(const PagesView& pages) override { inner_->bind(pages); }
  int64_t layer_pages(int32_t layer, int32_t tokens, bool at_most) const override {
    return inner_->layer_pages(layer, tokens, at_most);
  }
  // The sequence is a new one.
  void open(int32_t slot) {
    device_->released(slot);
    for (int32_t l = 0; l < config_.layout.num_layers; ++l) body_ends_[{slot, l}] = 0;
  }
  Result<std::unique_ptr<BodyPlan>> plan(const std::vector<BodyWork>& works) override {
    copy_->sync();
    call_ = std::make_unique<Call>(config_, works, copy_->view().pages.allocator);
    fault_ = {};
    // A captured step, which knows bounds alone.
    DeviceWorks& of_device = call_->works;
    cuts_ = device_->may_rewrite(of_device);
    is_captured_ = !cuts_ && of_device.most_leaving <= kBlockTokens && (*rng_)() % 2 == 0 &&
                   device_->require_capturable(of_device);
    is_captured_ |= captures;
    if (is_captured_) of_device.moves = nullptr, ++seen_->captured;
    const int64_t frees = emulator::frees;
    const Status planned = device_->plan(of_device, {call_->kept.data(), call_->target.data()});
    EXPECT_TRUE(!is_captured_ || emulator::frees == frees) << "memory is freed in a capture";
    Result<std::unique_ptr<BodyPlan>> plan = inner_->plan(works);
    if (!plan) {
      const StatusCode found = planned ? fault_.status : planned.code();
      EXPECT_EQ(found, plan.status().code()) << plan.status().message();
      return plan;
    }
    EXPECT_TRUE(planned) << planned.message();
    EXPECT_EQ(fault_.status, StatusCode::kOk)
        << "slot " << fault_.slot << " layer " << fault_.layer;
    works_ = works;
    return plan;
  }
  PageRanges place(const HostLayer& layer, BodyPlan& plan, size_t work) override {
    if (work == 0) {
      std::vector<PageCopy> copies;
      copy_->take_pages(call_->batch, call_->kept, call_->target, cuts_, &copies);
      const Status written = device_->write(call_->works, copies.empty() ? nullptr : copies.data());
      EXPECT_TRUE(written) << written.message();
    }
    return inner_->place(layer, plan, work);
  }
  void finish(BodyPlan& plan) override {
    inner_->finish(plan);
    for (const BodyWork& work : works_) {
      compare(work);
      body_ends_[{work.layer.slot, work.layer.layer}] = work.body_end;
    }
  }
  void read(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end, float* k, float* v,
            uint8_t* pruned) const override {
    inner_->read(layer, kv_head, first, end, k, v, pruned);
    copy_->sync();
    const int32_t heads = config_.layout.num_kv_heads, dim = config_.layout.head_dim;
    const DType dtype = first % 2 == 0 ? DType::kFloat16 : DType::kBFloat16;
    std::vector<uint16_t> got[2];
    for (auto& x : got) x.resize(static_cast<size_t>(end - first) * heads * dim, 0x7e00);
    const DeviceRead to = {layer.slot, layer.layer,   layer.at.body_end, {first, end},
                           dtype,      got[0].data(), got[1].data()};
    ASSERT_TRUE(device_->read(to));
    for (int32_t i = 0; i < (end - first) * dim; ++i) {
      const int32_t at = (i / dim * heads + kv_head) * dim + i % dim;
      ASSERT_EQ(got[0][at], rounded(dtype, k[i])) << "position " << first + i / dim;
      ASSERT_EQ(got[1][at], rounded(dtype, v[i])) << "position " << first + i / dim;
    }
    ++seen_->reads;
  }
  void read_decided(const HostLayer& layer, int32_t kv_head, int32_t first, int32_t end,
                    RawScore* scores) const override {
    inner_->read_decided(layer, kv_head, first, end, scores);
    copy_->sync();
    const LayerMove move = {
        layer.slot, layer.layer, layer.at, {end, first / kBlockTokens * kBlockTokens}};
    ASSERT_TRUE(device_->restore(move, {first, end}));
    const int32_t dim = config_.layout.head_dim;
    std::vector<float> x[2];
    for (auto& of : x) of.resize(static_cast<size_t>(end - first) * dim);
    inner_->read(layer, kv_head, first, end, x[0].data(), x[1].data(), nullptr);
    const RawLayout& raw = copy_->view().raw;
    const uint8_t* row = copy_->view().slots.raw(layer.slot, layer.layer) + kv_head * raw.row_bytes;
    for (int32_t i = 0; i < (end - first) * dim; ++i) {
      const int32_t p = first + i / dim;
      RawScore score;
      std::memcpy(&score, row + raw.score_byte(p), sizeof(score));
      ASSERT_EQ(float_bits(score.sum), float_bits(scores[p - first].sum)) << "position " << p;
      ASSERT_EQ(score.count, scores[p - first].count);
      for (const Component c : {Component::kKey, Component::kValue}) {
        uint16_t got;
        std::memcpy(&got, row + raw.token_byte(c, p) + i % dim * 2, sizeof(got));
        ASSERT_EQ(got, rounded(DType::kFloat16, x[static_cast<int32_t>(c)][i]));
      }
    }
    ++seen_->restored;
  }
  std::vector<SideCounts> cut_counts(const HostLayer& layer, int32_t body_end) const override {
    return inner_->cut_counts(layer, body_end);
  }
  void cut(const HostLayer& layer, int32_t body_end) override {
    inner_->cut(layer, body_end);
    body_ends_[{layer.slot, layer.layer}] = body_end;
  }
  void relocate(const HostLayer& layer, const PageCopy* copies) override {
    inner_->relocate(layer, copies);
  }
  int64_t nominal_bytes(const HostLayer& layer) const override {
    return inner_->nominal_bytes(layer);
  }
  std::vector<uint8_t> identity() const override { return inner_->identity(); }
  std::vector<uint8_t> export_shared(const HostLayer& layer) const override {
    return inner_->export_shared(layer);
  }
  int64_t body_bytes(const HostLayer& layer, int32_t kv_head) const override {
    return inner_->body_bytes(layer, kv_head);
  }
  ExportedBody export_body(const HostLayer& layer, int32_t kv_head) const override {
    return inner_->export_body(layer, kv_head);
  }
  Result<std::unique_ptr<BodyPlan>> plan_import(const ImportWork& work) override {
    return inner_->plan_import(work);
  }

 private:
  static uint16_t rounded(DType dtype, float x) {
    return float_to_raw(dtype, dtype == DType::kFloat16 ? saturate_to_half_range(x) : x);
  }

  // A place by page of the row and unit in it, and the bytes there.
  struct Block {
    uint32_t page, unit, units;
    std::vector<uint8_t> bytes;
    bool operator==(const Block&) const = default;
  };
  Block block_of(const PageAllocator& a, const uint8_t* base, int32_t row,
                 CodedBlockRef ref) const {
    const auto units = static_cast<uint32_t>(coded_->shape().page_units);
    Block b = {INT32_MAX, ref.offset % units, ref.units, {}};
    for (int32_t i = 0; i < a.pages[row].of[0]; ++i) {
      if (page_at(a, row, 0, i) == static_cast<int32_t>(ref.offset / units)) b.page = i;
    }
    const uint8_t* from = base + int64_t{ref.offset} * kUnitBytes;
    b.bytes.assign(from, from + int64_t{ref.units} * kUnitBytes);
    return b;
  }

  void compare(const BodyWork& work) {
    if (::testing::Test::HasFailure()) return;
    const CodedShape& shape = coded_->shape();
    const int32_t slot = work.layer.slot, layer = work.layer.layer;
    SCOPED_TRACE("slot " + std::to_string(slot) + " layer " + std::to_string(layer) + " body " +
                 std::to_string(work.layer.at.body_end) + " to " + std::to_string(work.body_end) +
                 (is_captured_ ? " captured" : "") + (cuts_ ? " cuts" : ""));
    const uint8_t *host = work.layer.state, *device = copy_->state(slot, layer);
    const auto equal = [&](int64_t first, int64_t end) {
      return std::equal(host + first, host + end, device + first);
    };
    EXPECT_TRUE(equal(0, 4)) << "fixed: " << int32_t{host[0]};
    const int32_t blocks = block_count(work.body_end);
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      EXPECT_TRUE(equal(shape.row_byte(h), shape.row_byte(h + 1))) << "kv_head " << h;
    }
    const PagesView& mine = copy_->view().pages;
    const int32_t row = mine.row(slot, layer, 0);
    const PageAllocator& a = host_pages_->allocator;
    const bool elsewhere = is_captured_ && a.sequences[slot].shares != 0;
    if (!elsewhere) {
      EXPECT_EQ(mine.allocator.tokens[row].of[0], a.tokens[row].of[0]);
      EXPECT_TRUE(equal(shape.ends_byte(), shape.ends_byte() + 4 * blocks));
    }
    for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        const auto* theirs = reinterpret_cast<const CodedBlockRef*>(host + shape.refs_byte(h, c));
        const auto* ours = reinterpret_cast<const CodedBlockRef*>(device + shape.refs_byte(h, c));
        for (int32_t b = 0; b < blocks; ++b) {
          Block expected = block_of(a, host_pages_->base, row, theirs[b]);
          Block got = block_of(mine.allocator, mine.base, row, ours[b]);
          ASSERT_NE(got.page, uint32_t{INT32_MAX});
          if (elsewhere) got.page = expected.page, got.unit = expected.unit;
          ASSERT_EQ(got.page, expected.page) << "block " << b << " kv_head " << h;
          ASSERT_EQ(got.unit, expected.unit) << "block " << b << " kv_head " << h;
          ASSERT_EQ(got.units, expected.units) << "block " << b << " kv_head " << h;
          ASSERT_EQ(got.bytes, expected.bytes)
              << "block " << b << " kv_head " << h << " component " << static_cast<int32_t>(c);
          ++seen_->blocks;
        }
      }
    }
    seen_->continued += work.layer.at.body_end % kBlockTokens != 0;
    const auto books = [&](const RowFormat& of) {
      return static_cast<const CodedRows&>(of).books(layer).bytes;
    };
    EXPECT_EQ(books(*inner_), books(*other_));
  }

  StoreConfig config_;
  std::mt19937* rng_;
  Seen* seen_;
  const PagesView* host_pages_ = nullptr;
  std::unique_ptr<RowFormat> inner_, other_;
  CodedRows* coded_;
  std::unique_ptr<DeviceCodedRows> device_;
  std::unique_ptr<Copy> copy_;
  DeviceFault fault_{};
  std::unique_ptr<Call> call_;
  std::vector<BodyWork> works_;
  bool cuts_ = false, is_captured_ = false;
  std::map<std::pair<int32_t, int32_t>, int32_t> body_ends_;  // by slot and layer
};

// A store of such rows.
struct ShadowedStore {
  Shadowed* rows;
  std::unique_ptr<KvStore> engine;

  ShadowedStore(const StoreConfig& config, std::mt19937* rng, Seen* seen) {
    auto format = std::make_unique<Shadowed>(config, rng, seen);
    rows = format.get();
    auto place = HostPlace::make(config, std::move(format));
    rows->begin(place->get());
    engine = Engine::make(config, std::move(*place));
  }
  Result<SequenceId> add() {
    const Result<SequenceId> id = engine->add_sequence();
    if (id) rows->open(id->slot);
    return id;
  }
};

}  // namespace tierkv::store::test
