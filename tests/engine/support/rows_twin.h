// SPDX-License-Identifier: Apache-2.0
// A row format of a device beside that of host memory: the same calls, and after each the same
// bytes. The store in host memory plays the place.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <random>
#include <vector>

#include "tests/engine/support/device_twin.h"
#include "tests/engine/support/tiers_world.h"

namespace tierkv::store::test {

class RowsTwin {
 public:
  using MakeFormat =
      std::function<Result<std::unique_ptr<DeviceRowFormat>>(const StoreConfig&, RowFormat*)>;
  // Bytes of a page that are defined: of which page of a side of table row i of a layer, of which
  // the allocator counts `units` on that side.
  struct PageAsked {
    int32_t layer, row, side, page, units;
  };
  using PageBytes = std::function<int64_t(const RowFormat&, const PageAsked&)>;

  RowsTwin(const StoreConfig& config, TwinMemory* memory, const MakeFormat& make,
           PageBytes page_bytes, std::mt19937* rng);

  void add();
  void fork(int32_t place);
  // A call for several sequences that are equally complete.
  void extend(const std::vector<int32_t>& places, int32_t tokens, bool significance);
  void truncate(int32_t place, int32_t tokens);
  // A chunk that has, for the format under test, a key that is not finite. What is read of it must
  // be finite. The last call.
  void spoil(int32_t place, int32_t tokens);
  // Queries that count, in host memory alone.
  void count_queries(int32_t place);
  // Some of a layer's body.
  void read(int32_t place);
  // Attention over the bodies of all layers, against softmax in double.
  void attend(const std::vector<int32_t>& places, int32_t q_len);
  // Random calls with chunks of up to `longest` tokens, and attention in every attend_every-th
  // round; in the end a chunk that is spoiled. The only call, of a twin without sequences.
  void soak(int32_t rounds, int32_t longest, int32_t attend_every);

  int32_t tokens(int32_t place) const { return live_[place].at.tokens; }
  int32_t count() const { return static_cast<int32_t>(live_.size()); }

 private:
  struct Live {
    SequenceId id;
    LayerTokens at;
  };
  struct Row {
    std::vector<float> k, v;  // [tokens, head_dim], finished
    std::vector<uint8_t> pruned;
  };

  int32_t pick(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(rng_);
  }
  // All layers from first_layer on, of every sequence.
  void set_works(const std::vector<int32_t>& places, Positions layers,
                 const std::function<LayerTokens(LayerTokens)>& after);
  void set_chunk(const LayerAppend& call);
  void plan();
  void write();
  // Calls the host and the format; the chunks of long calls may be changed for the latter.
  void append_all(const std::vector<int32_t>& places, int32_t tokens, bool significance,
                  const std::function<void(int32_t)>& change_chunk);
  void compare();
  // The keys of a token.
  bool reads_finite(const LayerMove& at, int32_t position);
  Row body_row(int32_t place, int32_t layer, int32_t kv_head) const;
  void check_answers(const DeviceAttendBody& call, const std::vector<int32_t>& places);
  void check_query(const DeviceAttendBody& call, const Row& row, int64_t vector);

  StoreConfig config_;
  std::mt19937& rng_;
  TwinMemory* memory_;
  OpenStore host_;
  DeviceTwin twin_;
  std::unique_ptr<RowFormat> host_format_;
  std::unique_ptr<DeviceRowFormat> format_;
  PageBytes page_bytes_;
  std::vector<Live> live_;
  DeviceWorks works_;
  std::vector<int32_t> slots_;
  LayerMoves moves_;
  TwinArray<DeviceFault> fault_;
  TwinArray<int32_t> slot_array_;
  TwinArray<LayerTokens> from_, to_;
  TwinArray<SideCounts> kept_, target_;
  TwinArray<uint16_t> k_, v_, q_, out_;
  TwinArray<float> significance_, lse_;
  int64_t pages_before_ = 0;
};

}  // namespace tierkv::store::test
