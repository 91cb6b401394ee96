// Random lives of sequences in the device back end and the host's: the same statuses and the same
// bytes after every call.
#include <gtest/gtest.h>

#include <iterator>
#include <map>

#include "tests/gpu/store/store_twins.cuh"
#include "tests/gpu/store/trace_steps.h"
#include "tests/support/named_config.h"

namespace tierkv::testing {
namespace {

class StoreTwins : public ::testing::TestWithParam<NamedConfig> {
 protected:
  StoreTwins() : twins_(GetParam().config, &input_) {}
  std::vector<SequenceId> some(bool live) {
    std::vector<SequenceId> list;
    for (const auto& [slot, s] : open_) {
      if (s.live == live && input_.chance(0.7)) list.push_back(s.id);
    }
    return list;
  }
  Status call(std::string* name);
  // Prompts of full length until the pages are gone, then room again.
  void exhaust();
  Status prompt(const std::vector<SequenceId>& ids);
  Status step(const std::vector<SequenceId>& ids);

  struct Sequence {
    SequenceId id;
    bool live;
  };
  RandomInput input_;
  Twins twins_;
  std::map<int32_t, Sequence> open_;
};

Status StoreTwins::prompt(const std::vector<SequenceId>& ids) {
  const SequenceList l = {ids.data(), static_cast<int32_t>(ids.size())};
  const int32_t tokens = input_.uniform(1, 60);
  if (Status s = twins_.begin_prompt(l, tokens); !s) return s;
  if (Status s = twins_.append_all(l, tokens); !s) return s;
  for (int32_t layer = 0; layer < twins_.config().layout.num_layers; ++layer) {
    if (Status s = twins_.score_prompt(l, layer); !s) return s;
  }
  return Status::ok();
}

Status StoreTwins::step(const std::vector<SequenceId>& ids) {
  const SequenceList l = {ids.data(), static_cast<int32_t>(ids.size())};
  const int32_t tokens = input_.chance(0.8) ? 1 : input_.uniform(2, 8);
  if (Status s = twins_.begin_step(l, tokens); !s) return s;
  if (Status s = twins_.append_all(l, tokens); !s) return s;
  for (int32_t back = tokens - 1; back >= 0; --back) {
    for (int32_t layer = 0; layer < twins_.config().layout.num_layers; ++layer) {
      if (Status s = twins_.update_scores(l, layer, back); !s) return s;
    }
  }
  return Status::ok();
}

Status StoreTwins::call(std::string* name) {
  const int32_t dice = input_.uniform(0, 99);
  SequenceId id;
  if (dice < 12) {
    *name = "add";
    const Status s = twins_.add(&id);
    if (s) open_[id.slot] = {id, false};
    return s;
  }
  if (dice < 30) {
    const std::vector<SequenceId> ids = some(false);
    if (ids.empty()) return Status::ok();
    if (dice < 22) {
      *name = "prompt";
      return prompt(ids);
    }
    *name = "end_prompt";
    const Status s = twins_.end_prompt({ids.data(), static_cast<int32_t>(ids.size())});
    for (const SequenceId& one : ids) open_[one.slot].live |= s.is_ok();
    return s;
  }
  if (dice < 82) {
    const std::vector<SequenceId> ids = some(true);
    if (ids.empty()) return Status::ok();
    *name = "step";
    return step(ids);
  }
  if (open_.empty()) return Status::ok();
  auto one = open_.begin();
  std::advance(one, input_.uniform(0, static_cast<int32_t>(open_.size()) - 1));
  if (dice < 90) {
    if (!one->second.live) return Status::ok();
    *name = "fork";
    if (static_cast<int32_t>(open_.size()) == twins_.config().max_sequences) {
      const auto other = one == open_.begin() ? std::next(one) : open_.begin();
      if (Status s = twins_.release(other->second.id); !s) return s;
      open_.erase(other);
    }
    const Status s = input_.chance(0.6) ? twins_.fork(one->second.id, &id)
                                        : twins_.transfer(one->second.id, &id);
    if (s) open_[id.slot] = {id, true};
    return s;
  }
  if (dice < 95) {
    *name = "truncate";
    const int32_t n = *twins_.host().num_tokens(one->second.id);
    return twins_.truncate(one->second.id,
                           input_.chance(0.5) ? std::max(0, n - 3) : input_.uniform(0, n));
  }
  *name = "release";
  const Status s = twins_.release(one->second.id);
  open_.erase(one);
  return s;
}

void StoreTwins::exhaust() {
  for (const auto& [slot, s] : open_) ASSERT_TRUE(twins_.release(s.id));
  std::vector<SequenceId> ids(twins_.config().max_sequences);
  const int32_t tokens = twins_.config().max_tokens;
  Status status;
  size_t fed = 0;
  for (; status && fed < ids.size(); ++fed) {
    ASSERT_TRUE(twins_.add(&ids[fed]));
    const SequenceList one = {&ids[fed], 1};
    Status begun = twins_.begin_prompt(one, tokens);
    std::swap(status, begun);
    if (status) {
      ASSERT_TRUE(twins_.append_all(one, tokens));
    }
    ASSERT_EQ(twins_.difference(), "");
  }
  ASSERT_EQ(status.code(), StatusCode::kOutOfPages);
  ASSERT_GT(fed, 1u);
  ASSERT_TRUE(twins_.release(ids[0]));
  const SequenceList last = {&ids[fed - 1], 1};
  ASSERT_TRUE(twins_.begin_prompt(last, tokens));
  ASSERT_TRUE(twins_.append_all(last, tokens));
  ASSERT_EQ(twins_.difference(), "");
}

TEST_P(StoreTwins, StayTheSameByteForByte) {
  std::map<std::string, int32_t> done;
  for (int32_t step = 0; step < trace_steps(400); ++step) {
    std::string name;
    const Status status = call(&name);
    if (name.empty()) continue;
    SCOPED_TRACE("call " + std::to_string(step) + " " + name + ": " + status.message());
    done[name] += status.is_ok();
    ASSERT_EQ(twins_.difference(), "");
    if (HasFailure()) return;
  }
  exhaust();
  if (trace_steps(400) < 400) return;
  for (const char* name : {"add", "prompt", "end_prompt", "step", "fork", "truncate", "release"}) {
    EXPECT_GT(done[name], 0) << name;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Configs, StoreTwins,
    ::testing::Values(NamedConfig{"pruning", small_config()}, raw_window_and_sinks(),
                      NamedConfig{"keeps_all_float32", varied([](KvStoreConfig* c) {
                                    keep_all(c);
                                    c->layout.head_dim = 96;
                                    c->page_bytes = 3072;
                                  })},
                      NamedConfig{"head_dim_128", varied([](KvStoreConfig* c) {
                                    c->layout.head_dim = 128;
                                    c->page_bytes = 0;
                                    c->num_pages = 36;
                                    c->max_tokens = 400;
                                  })},
                      NamedConfig{"head_dim_256_groups", varied([](KvStoreConfig* c) {
                                    c->layout.head_dim = 256;
                                    c->high_format.k.group = 64;
                                    c->low_format.v.group = 32;
                                    c->page_bytes = 8192;
                                  })}),
    config_name);

}  // namespace
}  // namespace tierkv::testing
