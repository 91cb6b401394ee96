#include "tests/store/support/modelled_store.h"

namespace tierkv::testing {

Status ModelledStore::append_layers(const std::vector<ModelSequence*>& list, int32_t tokens) {
  const std::vector<SequenceId> names = ids(list);
  const auto count = static_cast<int32_t>(names.size());
  const int32_t heads = config_.layout.num_kv_heads;
  for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
    const CallValues values(input_, config_.layout, count, tokens);
    if (Status s = store_->append({{names.data(), count}, layer, tokens, values.k(), values.v()});
        !s) {
      return s;
    }
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t h = 0; h < heads; ++h) {
        std::vector<TokenValues> appended;
        for (int32_t t = 0; t < tokens; ++t) appended.push_back(values.token(i, t, h));
        RowModel& model = list[i]->rows[layer * heads + h];
        if (list[i]->live) {
          model.step(appended);
        } else {
          for (const TokenValues& x : appended) model.append_prompt(x);
        }
      }
    }
  }
  return Status::ok();
}

Status ModelledStore::prompt(const std::vector<ModelSequence*>& list, int32_t tokens, bool scored) {
  const std::vector<SequenceId> names = ids(list);
  const SequenceList sequences = {names.data(), static_cast<int32_t>(names.size())};
  if (Status s = store_->begin_prompt(sequences, tokens); !s) return s;
  if (Status s = append_layers(list, tokens); !s) return s;
  const int32_t heads = config_.layout.num_kv_heads;
  for (int32_t layer = 0; scored && layer < config_.layout.num_layers; ++layer) {
    const int64_t stride = config_.max_tokens + 3;
    std::vector<float> x = input_->scores(names.size() * heads * stride, config_.max_tokens / 3);
    if (Status s = store_->score_prompt({sequences, layer, x.data(), stride}); !s) return s;
    for (size_t i = 0; i < list.size(); ++i) {
      for (int32_t h = 0; h < heads; ++h) {
        const float* line = x.data() + (i * heads + h) * stride;
        RowModel& model = list[i]->rows[layer * heads + h];
        model.score_prompt({line, line + model.num_tokens()});
      }
    }
  }
  return Status::ok();
}

Status ModelledStore::end_prompt(const std::vector<ModelSequence*>& list) {
  const std::vector<SequenceId> names = ids(list);
  if (Status s = store_->end_prompt({names.data(), static_cast<int32_t>(names.size())}); !s) {
    return s;
  }
  for (ModelSequence* s : list) {
    for (RowModel& model : s->rows) model.end_prompt();
    s->live = true;
  }
  return Status::ok();
}

Status ModelledStore::observe(const std::vector<ModelSequence*>& list, int32_t back, bool called) {
  const std::vector<SequenceId> names = ids(list);
  const int32_t heads = config_.layout.num_kv_heads;
  const int64_t stride = config_.max_tokens;
  for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
    const std::vector<float> x =
        input_->scores(names.size() * heads * stride, config_.max_tokens / 3);
    const SequenceList sequences = {names.data(), static_cast<int32_t>(names.size())};
    const ScoreUpdate update = {sequences, layer, back, x.data(), stride};
    if (Status s = called ? store_->update_scores(update) : Status::ok(); !s) return s;
    for (size_t i = 0; i < list.size(); ++i) {
      for (int32_t h = 0; h < heads; ++h) {
        const int32_t within = layer * heads + h;
        RowModel& model = list[i]->rows[within];
        model.read_frozen(view(), row(*list[i], within));
        const float* line = x.data() + (i * heads + h) * stride;
        model.observe(model.num_tokens() - 1 - back, called ? line : nullptr);
      }
    }
  }
  return Status::ok();
}

Status ModelledStore::step(const std::vector<ModelSequence*>& list, int32_t tokens, bool observed) {
  const std::vector<SequenceId> names = ids(list);
  for (ModelSequence* s : list) {
    for (int32_t r = 0; r < rows(); ++r) s->rows[r].read_frozen(view(), row(*s, r));
  }
  if (Status s = store_->begin_step({names.data(), static_cast<int32_t>(names.size())}, tokens);
      !s) {
    return s;
  }
  if (Status s = append_layers(list, tokens); !s) return s;
  for (int32_t back = tokens - 1; back >= 0; --back) {
    if (Status s = observe(list, back, observed); !s) return s;
  }
  return Status::ok();
}

Status ModelledStore::fork(const ModelSequence& source, ModelSequence* copy) {
  const Result<SequenceId> id = store_->fork(source.id);
  if (!id) return id.status();
  *copy = source;
  copy->id = *id;
  return Status::ok();
}

Status ModelledStore::truncate(ModelSequence* s, int32_t tokens) {
  if (Status status = store_->truncate(s->id, tokens); !status) return status;
  for (int32_t r = 0; r < rows(); ++r) s->rows[r].truncate(tokens, view(), row(*s, r));
  return Status::ok();
}

Status ModelledStore::transfer(const ModelSequence& source, ModelSequence* copy) {
  const Result<std::vector<uint8_t>> bytes = store_->export_sequence(source.id);
  if (!bytes) return bytes.status();
  const Result<SequenceId> id = store_->import_sequence(bytes->data(), bytes->size());
  if (!id) return id.status();
  *copy = source;
  copy->id = *id;
  const Result<std::vector<uint8_t>> again = store_->export_sequence(*id);
  if (!again) return again.status();
  EXPECT_TRUE(*again == *bytes) << "an import exports other bytes";
  return Status::ok();
}

std::string ModelledStore::difference(const ModelSequence& s, bool values) const {
  for (int32_t r = 0; r < rows(); ++r) {
    std::string text = s.rows[r].difference(view(), row(s, r));
    if (text.empty() && values) text = s.rows[r].value_difference(view(), row(s, r));
    if (!text.empty()) return "row " + std::to_string(r) + " " + text;
  }
  return "";
}

}  // namespace tierkv::testing
