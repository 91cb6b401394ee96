// A host and a device store that get the same calls, and the comparison of what they hold.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "store/cold/sequence_bytes.h"
#include "store/tiers/device_store.h"
#include "tests/gpu/store/store_pair.cuh"
#include "tests/support/small_store.h"

namespace tierkv::testing {

// Records of pages, and their defined bytes.
inline std::string row_difference(const StoreView& a, const StoreView& b, int32_t row) {
  RowPages pages[2];
  std::vector<uint8_t> bytes[2];
  for (int32_t k = 0; k < 2; ++k) {
    const StoreView& s = k == 0 ? a : b;
    pages[k].tokens = s.allocator.tokens[row];
    for (int32_t side = 0; side < kStoreSides; ++side) {
      for (int32_t i = 0; i < s.allocator.pages[row].of[side]; ++i) {
        const int32_t page = s.page_id(row, side, i);
        pages[k].pages[side].push_back(s.page_bytes(page));
        if (differs(&a.allocator.records[page], &b.allocator.records[page], sizeof(PageRecord))) {
          return "record of page " + std::to_string(page);
        }
      }
    }
    export_row(s, pages[k], &bytes[k]);
  }
  if (bytes[0] == bytes[1]) return "";
  const auto at = std::mismatch(bytes[0].begin(), bytes[0].end(), bytes[1].begin(), bytes[1].end());
  return "byte " + std::to_string(at.first - bytes[0].begin()) + " of " +
         std::to_string(bytes[0].size());
}

inline std::string state_difference(const StoreView& a, const StoreView& b) {
  const auto rows = [](const StoreView& x, const StoreView& y, int32_t row, const SequenceInfo&) {
    return row_difference(x, y, row);
  };
  return state_difference(a, b, rows);
}

class Twins : public StorePair<HostStore, DeviceStore> {
 public:
  Twins(const KvStoreConfig& config, RandomInput* input, GpuStream stream = nullptr)
      : StorePair(config, input, stream) {}

  std::string difference() {
    const Result<StoreView> view = device().download();
    return view ? state_difference(host().view(), *view) : view.status().message();
  }

  using StorePair::append;
  Status append(SequenceList l, int32_t layer, int32_t tokens) {
    const CallValues values(&input(), config().layout, l.count, tokens);
    return append(l, layer, tokens, values.k_bytes(), values.v_bytes());
  }
  Status append_all(SequenceList l, int32_t tokens) {
    for (int32_t layer = 0; layer < config().layout.num_layers; ++layer) {
      if (Status s = append(l, layer, tokens); !s) return s;
    }
    return Status::ok();
  }
  std::vector<float> scores(SequenceList l) {
    return input().scores(int64_t{l.count} * config().layout.num_kv_heads * config().max_tokens,
                          config().max_tokens / 3);
  }
  Status score_prompt(SequenceList l, int32_t layer) {
    const std::vector<float> x = scores(l);
    return same(host().score_prompt({l, layer, x.data(), config().max_tokens}),
                device().score_prompt({l, layer, scores_.put(x), config().max_tokens}));
  }
  Status update_scores(SequenceList l, int32_t layer, int32_t back) {
    const std::vector<float> x = scores(l);
    return same(host().update_scores({l, layer, back, x.data(), config().max_tokens}),
                device().update_scores({l, layer, back, scores_.put(x), config().max_tokens}));
  }

 private:
  Buffer scores_;
};

}  // namespace tierkv::testing
