// A host and a device store that get the same calls, and the comparison of what they hold.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "store/device_store.h"
#include "store/sequence_bytes.h"
#include "tests/gpu/device_buffer.cuh"
#include "tests/store/small_store.h"

namespace tierkv::testing {

inline std::unique_ptr<DeviceStore> make_device(const KvStoreConfig& config,
                                                GpuStream stream = nullptr) {
  auto store = DeviceStore::make(config, stream);
  EXPECT_TRUE(store.is_ok()) << store.status().message();
  return store ? std::move(*store) : nullptr;
}

// What must be equal: tables, counts, records, the free ring, infos and the defined bytes of all
// pages.
inline std::string state_difference(const StoreView& a, const StoreView& b) {
  const PageTableShape& t = a.allocator.shape.table;
  const auto differs = [](const void* x, const void* y, size_t bytes) {
    return std::memcmp(x, y, bytes) != 0;
  };
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
    if (differs(&a.infos[q], &b.infos[q], sizeof(SequenceInfo))) {
      return "info of sequence " + std::to_string(q);
    }
    for (int32_t w = 0; w < t.rows_per_sequence; ++w) {
      const int32_t row = q * t.rows_per_sequence + w;
      RowPages pages[2];
      std::vector<uint8_t> bytes[2];
      for (int32_t k = 0; k < 2; ++k) {
        const StoreView& s = k == 0 ? a : b;
        pages[k].tokens = s.allocator.tokens[row];
        for (int32_t side = 0; side < kStoreSides; ++side) {
          for (int32_t i = 0; i < s.allocator.pages[row].of[side]; ++i) {
            const int32_t page = s.page_id(row, side, i);
            pages[k].pages[side].push_back(s.page_bytes(page));
            const PageRecord &r = a.allocator.records[page], &o = b.allocator.records[page];
            if (differs(&r, &o, sizeof(r))) return "record of page " + std::to_string(page);
          }
        }
        export_row(s, pages[k], &bytes[k]);
      }
      if (bytes[0] != bytes[1]) {
        for (size_t i = 0; i < bytes[0].size(); ++i) {
          if (bytes[0][i] != bytes[1][i]) {
            return "row " + std::to_string(row) + " byte " + std::to_string(i) + " of " +
                   std::to_string(bytes[0].size());
          }
        }
      }
    }
  }
  return "";
}

// A host and a device store that get the same calls. Ids are equal by construction.
class Twins {
 public:
  Twins(const KvStoreConfig& config, RandomInput* input, GpuStream stream = nullptr)
      : config_(config),
        host_(make_store(config)),
        device_(make_device(config, stream)),
        input_(input) {}

  HostStore& host() { return *host_; }
  DeviceStore& device() { return *device_; }
  const KvStoreConfig& config() const { return config_; }

  // Both statuses, which must be the same; what the device only finds out later is waited for.
  Status same(const Status& host, Status device) {
    if (!device) {
      EXPECT_EQ(host.code(), device.code()) << device.message();
      return host;
    }
    const Status later = device_->take_status();
    EXPECT_EQ(host.code(), later.code()) << host.message() << " | " << later.message();
    return host;
  }
  std::string difference() {
    const Result<StoreView> view = device_->download();
    return view ? state_difference(host_->view(), *view) : view.status().message();
  }

  Status add(SequenceId* id) {
    const auto a = host_->add_sequence(), b = device_->add_sequence();
    if (a) *id = *a;
    if (a && b) EXPECT_TRUE(*a == *b);
    return same(a.status(), b.status());
  }
  Status begin_prompt(SequenceList l, int32_t tokens) {
    return same(host_->begin_prompt(l, tokens), device_->begin_prompt(l, tokens));
  }
  Status end_prompt(SequenceList l) { return same(host_->end_prompt(l), device_->end_prompt(l)); }
  Status begin_step(SequenceList l, int32_t tokens) {
    return same(host_->begin_step(l, tokens), device_->begin_step(l, tokens));
  }
  Status release(SequenceId id) { return same(host_->release(id), device_->release(id)); }
  Status truncate(SequenceId id, int32_t tokens) {
    return same(host_->truncate(id, tokens), device_->truncate(id, tokens));
  }
  Status fork(SequenceId id, SequenceId* copy) {
    const auto a = host_->fork(id), b = device_->fork(id);
    if (a) *copy = *a;
    if (a && b) EXPECT_TRUE(*a == *b);
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
  Status append(SequenceList l, int32_t layer, int32_t tokens) {
    const CallValues values(input_, config_.layout, l.count, tokens);
    return append(l, layer, tokens, values.k_bytes(), values.v_bytes());
  }
  Status append(SequenceList l, int32_t layer, int32_t tokens, const std::vector<uint8_t>& k,
                const std::vector<uint8_t>& v) {
    return same(host_->append({l, layer, tokens, k.data(), v.data()}),
                device_->append({l, layer, tokens, k_.put(k), v_.put(v)}));
  }
  Status append_all(SequenceList l, int32_t tokens) {
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      if (Status s = append(l, layer, tokens); !s) return s;
    }
    return Status::ok();
  }
  std::vector<float> scores(SequenceList l) {
    return input_->scores(int64_t{l.count} * config_.layout.num_kv_heads * config_.max_tokens,
                          config_.max_tokens / 3);
  }
  Status score_prompt(SequenceList l, int32_t layer) {
    const std::vector<float> x = scores(l);
    return same(host_->score_prompt({l, layer, x.data(), config_.max_tokens}),
                device_->score_prompt({l, layer, scores_.put(x), config_.max_tokens}));
  }
  Status update_scores(SequenceList l, int32_t layer, int32_t back) {
    const std::vector<float> x = scores(l);
    return same(host_->update_scores({l, layer, back, x.data(), config_.max_tokens}),
                device_->update_scores({l, layer, back, scores_.put(x), config_.max_tokens}));
  }

 private:
  KvStoreConfig config_;
  std::unique_ptr<HostStore> host_;
  std::unique_ptr<DeviceStore> device_;
  RandomInput* input_;
  Buffer k_, v_, scores_;
};

}  // namespace tierkv::testing
