// What all pairs of a host and a device store share: calls made on both, and the comparison of page
// tables and of what every sequence says of itself.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "store/shared/sequence_info.h"
#include "tests/gpu/device_buffer.cuh"
#include "tests/support/random_input.h"
#include "tierkv/allocator.h"

namespace tierkv::testing {

inline constexpr Component kComponents[] = {Component::kKey, Component::kValue};

inline bool differs(const void* a, const void* b, size_t bytes) {
  return std::memcmp(a, b, bytes) != 0;
}

inline std::string allocator_difference(const PageAllocator& a, const PageAllocator& b) {
  const PageTableShape& t = a.shape.table;
  const size_t rows = t.num_rows();
  if (differs(a.tokens, b.tokens, rows * sizeof(SideCounts))) return "tokens";
  if (differs(a.pages, b.pages, rows * sizeof(SideCounts))) return "pages";
  if (differs(a.slots, b.slots, rows * t.row_stride() * 4)) return "slots";
  const RingCursors &x = *a.ring.cursors, &y = *b.ring.cursors;
  if (differs(&x, &y, sizeof(x))) return "ring cursors";
  for (int64_t p = x.start; p < x.end; ++p) {
    const int64_t i = p % a.shape.num_pages;
    if (a.ring.ids[i] != b.ring.ids[i]) return "ring";
  }
  return "";
}

// row_difference(a, b, row, info) compares what a row of a sequence holds: bytes that have a
// meaning, not what a page kept of an earlier owner.
template <class View, class RowDifference>
std::string state_difference(const View& a, const View& b, RowDifference row_difference) {
  const std::string tables = allocator_difference(a.allocator, b.allocator);
  if (!tables.empty()) return tables;
  const PageTableShape& t = a.allocator.shape.table;
  for (int32_t q = 0; q < t.num_sequences; ++q) {
    if (a.allocator.sequences[q].state != b.allocator.sequences[q].state) return "sequence state";
    if (a.allocator.sequences[q].state == SequenceState::kFree) continue;
    if (differs(&a.infos[q], &b.infos[q], sizeof(SequenceInfo))) {
      return "info of sequence " + std::to_string(q);
    }
    for (int32_t w = 0; w < t.rows_per_sequence; ++w) {
      const int32_t row = q * t.rows_per_sequence + w;
      const std::string text = row_difference(a, b, row, a.infos[q]);
      if (!text.empty()) return "row " + std::to_string(row) + ": " + text;
    }
  }
  return "";
}

// A host and a device store that get the same calls. Ids are equal by construction.
template <class Host, class Device>
class StorePair {
 public:
  StorePair(const KvStoreConfig& config, RandomInput* input, GpuStream stream)
      : config_(config), input_(input) {
    auto host = Host::make(config);
    auto device = Device::make(config, stream);
    EXPECT_TRUE(host.is_ok()) << host.status().message();
    EXPECT_TRUE(device.is_ok()) << device.status().message();
    if (host) host_ = std::move(*host);
    if (device) device_ = std::move(*device);
  }
  Host& host() { return *host_; }
  Device& device() { return *device_; }
  const KvStoreConfig& config() const { return config_; }

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
  Status add(SequenceId* id) { return same_id(host_->add_sequence(), device_->add_sequence(), id); }
  Status begin_prompt(SequenceList l, int32_t tokens) {
    return same(host_->begin_prompt(l, tokens), device_->begin_prompt(l, tokens));
  }
  Status end_prompt(SequenceList l) { return same(host_->end_prompt(l), device_->end_prompt(l)); }
  Status begin_step(SequenceList l, int32_t tokens) {
    return same(host_->begin_step(l, tokens), device_->begin_step(l, tokens));
  }
  template <class T>
  Status append(SequenceList l, int32_t layer, int32_t tokens, const std::vector<T>& k,
                const std::vector<T>& v) {
    return same(host_->append({l, layer, tokens, k.data(), v.data()}),
                device_->append({l, layer, tokens, k_.put(k), v_.put(v)}));
  }
  Status truncate(SequenceId id, int32_t tokens) {
    return same(host_->truncate(id, tokens), device_->truncate(id, tokens));
  }
  Status release(SequenceId id) { return same(host_->release(id), device_->release(id)); }
  Status fork(SequenceId id, SequenceId* copy) {
    return same_id(host_->fork(id), device_->fork(id), copy);
  }
  // Exported and imported again.
  Status transfer(SequenceId id, SequenceId* copy) {
    const auto a = host_->export_sequence(id), b = device_->export_sequence(id);
    if (!a || !b) return same(a.status(), b.status());
    EXPECT_TRUE(*a == *b) << "exports differ";
    return same_id(host_->import_sequence(a->data(), a->size()),
                   device_->import_sequence(b->data(), b->size()), copy);
  }
  // Of calls of a random life, which may run out of room.
  static bool is_expected(const Status& s) {
    return s || s.code() == StatusCode::kOutOfPages || s.code() == StatusCode::kOutOfRange;
  }

 protected:
  RandomInput& input() { return *input_; }

 private:
  Status same_id(const Result<SequenceId>& a, const Result<SequenceId>& b, SequenceId* id) {
    if (a) *id = *a;
    if (a && b) EXPECT_TRUE(*a == *b);
    return same(a.status(), b.status());
  }

  KvStoreConfig config_;
  std::unique_ptr<Host> host_;
  std::unique_ptr<Device> device_;
  RandomInput* input_;
  Buffer k_, v_;
};

}  // namespace tierkv::testing
