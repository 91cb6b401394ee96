// A random life of two stores that get the same calls: states are compared after each, attention
// now and then.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/support/random_input.h"
#include "tierkv/store.h"

namespace tierkv::testing {

// Twins is a StorePair with prompt(), step(), difference() and attention_difference().
template <class Twins>
class TwinTrace {
 public:
  TwinTrace(Twins* twins, RandomInput* input) : twins_(*twins), input_(input) {}

  void run(int32_t calls) {
    for (int32_t i = 0; i < calls; ++i) {
      const Status s = call();
      ASSERT_TRUE(twins_.is_expected(s)) << s.message();
      ASSERT_EQ(twins_.difference(), "") << "after call " << i;
      if (i % 8 != 7) continue;
      for (const bool live : {false, true}) {
        const std::vector<SequenceId> ids = some(live, 1.0);
        if (ids.empty()) continue;
        ASSERT_EQ(twins_.attention_difference(list(ids)), "") << "after call " << i;
      }
    }
  }

 private:
  struct Sequence {
    SequenceId id;
    bool live = false;
    int32_t tokens = 0;
  };

  static SequenceList list(const std::vector<SequenceId>& ids) {
    return {ids.data(), static_cast<int32_t>(ids.size())};
  }
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
  Status add() {
    Sequence s;
    const Status status = twins_.add(&s.id);
    if (status) sequences_.push_back(s);
    return status;
  }
  Status call() {
    const int32_t kind = input_->uniform(0, 99);
    if (sequences_.empty() || kind < 8) return add();
    const std::vector<SequenceId> ids = some(kind >= 36, 0.7);
    if (kind < 76 && ids.empty()) return Status::ok();
    if (kind < 26) {
      const int32_t tokens = input_->uniform(1, 180);
      const Status s = twins_.prompt(list(ids), tokens);
      if (s) grow(ids, tokens);
      return s;
    }
    if (kind < 36) {
      const Status status = twins_.end_prompt(list(ids));
      for (Sequence& s : sequences_) {
        s.live |= status && std::count(ids.begin(), ids.end(), s.id) > 0;
      }
      return status;
    }
    if (kind < 76) {
      const int32_t tokens = input_->uniform(1, kMaxStepTokens);
      const Status s = twins_.step(list(ids), tokens);
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

  Twins& twins_;
  RandomInput* input_;
  std::vector<Sequence> sequences_;
};

}  // namespace tierkv::testing
