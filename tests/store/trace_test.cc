// Random lives of sequences against the models, the allocator's laws checked after every call, and
// nothing changed by a call that fails.
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>

#include "tests/store/support/modelled_store.h"
#include "tests/support/named_config.h"

namespace tierkv::testing {
namespace {

// Calls per config; TIERKV_TRACE_STEPS asks for more.
int64_t trace_steps() {
  const char* text = std::getenv("TIERKV_TRACE_STEPS");
  return text == nullptr ? 30000 : std::atoll(text);
}

class StoreTrace : public ::testing::TestWithParam<NamedConfig> {
 protected:
  StoreTrace() : world_(GetParam().config, &input_) {}

  std::vector<ModelSequence*> some(bool live) {
    std::vector<ModelSequence*> list;
    for (ModelSequence& s : open_) {
      if (s.live == live && input_.chance(0.7)) list.push_back(&s);
    }
    return list;
  }
  ModelSequence* any() {
    return open_.empty() ? nullptr
                         : &open_[input_.uniform(0, static_cast<int32_t>(open_.size()) - 1)];
  }

  // One call, named; "" where the state admits none.
  const char* call(Status* status);
  Status stale_call();
  Status misuse();

  RandomInput input_;
  ModelledStore world_;
  std::vector<ModelSequence> open_;
  std::vector<SequenceId> released_;
};

// Every call with an id that is not open any more.
Status StoreTrace::stale_call() {
  HostStore& store = world_.store();
  const SequenceId id = released_[input_.uniform(0, static_cast<int32_t>(released_.size()) - 1)];
  const float x = 0;
  switch (input_.uniform(0, 8)) {
    case 0:
      return store.release(id);
    case 1:
      return store.truncate(id, 0);
    case 2:
      return store.fork(id).status();
    case 3:
      return store.export_sequence(id).status();
    case 4:
      return store.begin_prompt({&id, 1}, 1);
    case 5:
      return store.begin_step({&id, 1}, 1);
    case 6:
      return store.end_prompt({&id, 1});
    case 7:
      return store.append({{&id, 1}, 0, 1, &x, &x});
    default:
      return store.num_tokens(id).status();
  }
}

// A call that the sequence's phase does not admit.
Status StoreTrace::misuse() {
  HostStore& store = world_.store();
  const ModelSequence& s = *any();
  const SequenceId twice[2] = {s.id, s.id};
  switch (input_.uniform(0, 4)) {
    case 0:
      return s.live ? store.begin_prompt({&s.id, 1}, 1) : store.begin_step({&s.id, 1}, 1);
    case 1:
      return s.live ? store.end_prompt({&s.id, 1}) : store.fork(s.id).status();
    case 2:
      return store.begin_step({twice, 2}, 1);
    case 3:
      return store.append({{&s.id, 1}, 0, 1, &s, &s});  // nothing was begun
    default:
      return store.truncate(s.id, s.rows[0].num_tokens() + 1);
  }
}

const char* StoreTrace::call(Status* status) {
  const int32_t dice = input_.uniform(0, 99);
  ModelSequence fresh;
  if (dice < 12) {
    *status = world_.add(&fresh);
    if (*status) open_.push_back(fresh);
    return "add";
  }
  if (dice < 15 && !released_.empty()) {
    *status = stale_call();
    EXPECT_EQ(status->code(), StatusCode::kStaleSequence) << status->message();
    return "stale";
  }
  ModelSequence* one = any();
  if (one == nullptr) return "";
  if (dice < 18) {
    *status = misuse();
    EXPECT_EQ(status->code(), StatusCode::kInvalidArgument) << status->message();
    return "misuse";
  }
  if (dice < 26) {
    const std::vector<ModelSequence*> list = some(false);
    if (list.empty()) return "";
    *status = world_.prompt(list, input_.uniform(1, 50), input_.chance(0.8));
    return "prompt";
  }
  if (dice < 32) {
    const std::vector<ModelSequence*> list = some(false);
    if (list.empty()) return "";
    *status = world_.end_prompt(list);
    return "end_prompt";
  }
  if (dice < 82) {
    const std::vector<ModelSequence*> list = some(true);
    if (list.empty()) return "";
    *status = world_.step(list, input_.chance(0.8) ? 1 : input_.uniform(2, 8), input_.chance(0.7));
    return "step";
  }
  if (dice < 89 && one->live) {
    *status = input_.chance(0.7) ? world_.fork(*one, &fresh) : world_.transfer(*one, &fresh);
    if (*status) open_.push_back(fresh);
    return "fork";
  }
  if (dice < 94) {
    const int32_t n = one->rows[0].num_tokens();
    *status = world_.truncate(
        one, input_.chance(0.7) ? input_.uniform(std::max(0, n - 9), n) : input_.uniform(0, n));
    return "truncate";
  }
  *status = world_.store().release(one->id);
  released_.push_back(one->id);
  open_.erase(open_.begin() + (one - open_.data()));
  return "release";
}

TEST_P(StoreTrace, FollowsTheModelsAndKeepsTheLaws) {
  ASSERT_NE(&world_.store(), nullptr);
  open_.reserve(GetParam().config.max_sequences + 1);
  InvariantChecker laws;
  std::map<std::string, int64_t> done;
  std::map<StatusCode, int64_t> failed;
  int64_t frozen = 0;
  std::vector<uint8_t> before;
  for (int64_t step = 0; step < trace_steps(); ++step) {
    read_state(world_.view(), &before);
    Status status;
    const std::string name = call(&status);
    if (name.empty()) continue;
    SCOPED_TRACE("call " + std::to_string(step) + " " + name + ": " + status.message());
    ++(status ? done[name] : failed[status.code()]);
    if (!status) {
      ASSERT_TRUE(state_of(world_.view()) == before) << "failed and changed something";
      const bool wrong_call = name == "stale" || name == "misuse";
      ASSERT_TRUE(wrong_call || status.code() == StatusCode::kOutOfPages ||
                  status.code() == StatusCode::kOutOfRange);
    }
    const Status law = laws.check(world_.view().allocator);
    ASSERT_TRUE(law.is_ok()) << law.message();
    const bool all = step % 16 == 0;
    for (size_t i = 0; i < open_.size(); ++i) {
      const bool values = all && step / 16 % open_.size() == i;
      ASSERT_EQ(world_.difference(open_[i], values), "") << "sequence " << i;
    }
    if (all) frozen += world_.store().stats()->pages_shared;
    if (HasFailure()) return;
  }
  for (const char* name : {"add", "prompt", "end_prompt", "step", "fork", "truncate", "release"}) {
    EXPECT_GT(done[name], 0) << name;  // a trace that never gets anywhere proves nothing
  }
  for (const StatusCode code : {StatusCode::kOutOfPages, StatusCode::kOutOfRange,
                                StatusCode::kStaleSequence, StatusCode::kInvalidArgument}) {
    EXPECT_GT(failed[code], 0) << status_name(code);
  }
  EXPECT_GT(frozen, 0);
}

INSTANTIATE_TEST_SUITE_P(Configs, StoreTrace,
                         ::testing::Values(NamedConfig{"pruning", small_config()},
                                           raw_window_and_sinks(),
                                           NamedConfig{"keeps_all", varied(keep_all)},
                                           NamedConfig{"no_low_tier", varied([](KvStoreConfig* c) {
                                                         c->policy.alpha_low = c->policy.alpha_high;
                                                         c->policy.sink_tokens = 20;
                                                         c->high_format = token_wise_tier(4, 4);
                                                         c->low_format = token_wise_tier(4, 4);
                                                         c->window_format = token_wise_tier(8, 8);
                                                         c->page_bytes = 2304;
                                                       })}),
                         config_name);

}  // namespace
}  // namespace tierkv::testing
