// SPDX-License-Identifier: Apache-2.0
// What the host knows of the layers of the sequences on a device: arithmetic of counts. A layer is
// fixed by a call that is enqueued; whether that call took effect shows in the counts of the next
// one.
#pragma once

#include <cstdint>
#include <vector>

#include "store/place/place.h"

namespace tierkv::store {

class DeviceLayerStates {
 public:
  DeviceLayerStates() = default;
  DeviceLayerStates(int32_t sequences, int32_t layers)
      : layers_(layers), states_(static_cast<size_t>(sequences) * layers) {}

  // What calls did to the layer until it had move.from.
  void settle(const LayerMove& move) { of(move.slot, move.layer) = settled(move); }
  // A call that compresses up to move.to was enqueued.
  void note(const LayerMove& move, bool fixed, bool is_private) {
    State& s = of(move.slot, move.layer);
    s.pending_end = move.to.body_end;
    s.pending_fixed = fixed, s.pending_private = is_private;
  }
  // Whether the layer's blocks, if there are any, are coded.
  bool is_fixed(const LayerMove& move) const {
    const State s = settled(move);
    return s.fixed || (!s.waits && move.from.body_end > 0);
  }
  bool waits(int32_t slot, int32_t layer) const { return of(slot, layer).waits; }
  // Whether another sequence may read the pages of the newest block.
  bool may_share(const LayerMove& move) const { return settled(move).shares; }

  // Whether any sequence may have raw blocks that wait.
  bool any_waits(int32_t layer) const {
    for (size_t s = static_cast<size_t>(layer); s < states_.size(); s += layers_) {
      if (states_[s].waits || (states_[s].pending_end != 0 && !states_[s].pending_fixed)) {
        return true;
      }
    }
    return false;
  }

  void open(int32_t slot) {
    for (int32_t l = 0; l < layers_; ++l) of(slot, l) = State{};
  }
  void fork(int32_t from, int32_t to) {
    for (int32_t l = 0; l < layers_; ++l) {
      of(from, l).shares = true;
      of(from, l).pending_private = false;
      of(to, l) = of(from, l);
    }
  }
  // As the slot's state says.
  void import(int32_t slot, int32_t layer, bool fixed) {
    State& s = of(slot, layer);
    if (s.pending_end != 0) return;
    s.fixed = fixed, s.waits = !fixed;
  }

 private:
  struct State {
    bool fixed = false, waits = false, shares = false;
    int32_t pending_end = 0;  // 0: nothing is pending
    bool pending_fixed = false, pending_private = false;
  };
  State settled(const LayerMove& move) const {
    State s = of(move.slot, move.layer);
    if (s.pending_end != 0 && move.from.body_end >= s.pending_end) {
      s.fixed = s.pending_fixed;
      s.waits = !s.pending_fixed;
      s.shares = s.shares && !s.pending_private;
    }
    s.pending_end = 0;
    return s;
  }
  State& of(int32_t slot, int32_t layer) {
    return states_[static_cast<size_t>(slot) * layers_ + layer];
  }
  const State& of(int32_t slot, int32_t layer) const {
    return states_[static_cast<size_t>(slot) * layers_ + layer];
  }

  int32_t layers_ = 0;
  std::vector<State> states_;
};

}  // namespace tierkv::store
