// The prompt, and what its end and a step have in common: planning blocks before any page is taken.
#include <algorithm>
#include <string>

#include "store/coded/coded_fixed.h"
#include "store/coded/coded_host.h"
#include "store/coded/coded_values.h"
#include "store/tiers/host_store.h"

namespace tierkv {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

std::string row_name(int32_t layer, int32_t head) {
  return "layer " + std::to_string(layer) + ", kv_head " + std::to_string(head);
}

}  // namespace

RowBasis CodedHostStore::plan_basis(const CodingPlan& plan, size_t entry, int32_t within,
                                    Component c) const {
  const int32_t at = row(plan.ranges[entry].slot, within);
  const auto& means = plan.means[static_cast<size_t>(c)];
  if (means.empty()) return {view_.step(c, at), view_.means(c, at)};
  const size_t i = entry * rows() + within;
  return {plan.steps[static_cast<size_t>(c)][i], means[i].data()};
}

// The first blocks that the store codes make its codebooks.
Status CodedHostStore::plan_codebooks(CodingPlan* plan) const {
  plan->books = books_;
  const bool needed = std::any_of(plan->ranges.begin(), plan->ranges.end(),
                                  [](const BlockRange& r) { return r.count > 0; });
  if (books_.ready() || !needed) return Status::ok();
  std::vector<CodeHistogram> histograms;
  for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
    for (const Component c : kComponents) histograms.emplace_back(c, view_.head_dim);
  }
  std::vector<int16_t> codes(static_cast<size_t>(kBlockTokens) * view_.head_dim);
  for (size_t e = 0; e < plan->ranges.size(); ++e) {
    const BlockRange& range = plan->ranges[e];
    for (int32_t i = 0; i < rows() * range.count * 2; ++i) {
      const int32_t w = i / (2 * range.count), block = range.first_block + i / 2 % range.count;
      const Component c = kComponents[i % 2];
      const SequenceInfo& info = table_.info(range.slot);
      if (Status s = raw_block_codes(view_, row(range.slot, w), info, c, block,
                                     plan_basis(*plan, e, w, c), codes.data());
          !s) {
        return s.with_context(row_name(w / view_.num_kv_heads, w % view_.num_kv_heads));
      }
      histograms[2 * (w / view_.num_kv_heads) + i % 2].add(codes.data(), kBlockTokens);
    }
  }
  Result<CodedBooks> books = CodedBooks::of_histograms(config_, histograms);
  if (!books) return books.status();
  plan->books = std::move(*books);
  return Status::ok();
}

Status CodedHostStore::plan_blocks(CodingPlan* plan) const {
  if (Status s = plan_codebooks(plan); !s) return s;
  plan->rows.assign(plan->ranges.size() * rows(), {});
  std::vector<int16_t> codes(static_cast<size_t>(kBlockTokens) * view_.head_dim);
  for (size_t i = 0; i < plan->rows.size(); ++i) {
    const BlockRange& range = plan->ranges[i / rows()];
    const auto w = static_cast<int32_t>(i % rows());
    PendingBlocks& pending = plan->rows[i];
    const int32_t at = row(range.slot, w);
    const SequenceInfo& info = table_.info(range.slot);
    for (int32_t b = range.first_block; b < range.first_block + range.count; ++b) {
      const bool fixed = becomes_fixed(view_, at, info, b);
      for (const Component c : kComponents) {
        const RowBasis basis = plan_basis(*plan, i / rows(), w, c);
        if (Status s = raw_block_codes(view_, at, info, c, b, basis, codes.data()); !s) {
          return s.with_context(row_name(w / view_.num_kv_heads, w % view_.num_kv_heads));
        }
        const size_t before = pending.bytes.size();
        if (fixed) {
          encode_fixed(view_, at, info, c, b, basis.mean, &pending.bytes);
        } else {
          plan->books.encode(codes.data(), view_.head_dim, w / view_.num_kv_heads, c,
                             &pending.bytes);
        }
        pending.units.push_back(
            static_cast<uint32_t>((pending.bytes.size() - before) / kBlockAlignment));
      }
    }
  }
  return Status::ok();
}

Status CodedHostStore::begin_prompt(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table_.admit_begin_prompt(sequences, tokens);
  if (!slots) return slots.status();
  if (Status s = check_coded_prompt(tokens); !s) return s;
  std::vector<SideCounts> pages(slots->size()), target(slots->size() * rows());
  for (size_t i = 0; i < slots->size(); ++i) {
    const int32_t held = table_.info((*slots)[i]).num_tokens;
    pages[i].of[kRawSide] = pages_for(held + tokens, kBlockTokens) - pages_for(held, kBlockTokens);
    for (int32_t r = 0; r < rows(); ++r) target[i * rows() + r].of[kRawSide] = held + tokens;
  }
  const PageAllocator& a = view_.allocator;
  OpReport report;
  if (Status s = run_page_op(a, PageOp::reserve(batch(*slots), pages.data(), &report)); !s) {
    return s;
  }
  if (Status s = run_page_op(a, PageOp::keep(batch(*slots), target.data(), &report)); !s) return s;
  for (const int32_t slot : *slots) {
    table_.set_info(slot, {table_.info(slot).num_tokens + tokens, 0, kInPrompt, 0});
  }
  return Status::ok();
}

Status CodedHostStore::score_prompt(const PromptScores& scores) {
  if (!view_.fixed.format.any()) return no_coded_scores();
  const Result<Slots> slots = table_.admit_scores(scores);
  if (!slots) return slots.status();
  const int32_t heads = view_.num_kv_heads;
  const auto line = [&](size_t i) {
    return scores.significance + static_cast<int64_t>(i) * scores.stride;
  };
  for (size_t i = 0; i < slots->size() * heads; ++i) {
    if (Status s = check_scores(line(i), table_.info((*slots)[i / heads]).num_tokens); !s) return s;
  }
  for (size_t i = 0; i < slots->size() * heads; ++i) {
    const int32_t slot = (*slots)[i / heads];
    const int32_t at = view_.row_of(slot, scores.layer, static_cast<int32_t>(i % heads));
    const SequenceInfo& info = table_.info(slot);
    for (int32_t p = 0; p < info.num_tokens; ++p) set_raw_score(view_, at, info, p, line(i)[p]);
  }
  return Status::ok();
}

std::vector<float> CodedHostStore::new_means(int32_t row, Component c) const {
  const CodedConfig& coded = config_.coded;
  const SequenceInfo& info = table_.info(row / rows());
  if (coded.means == MeanSource::kPrompt) return prompt_means(view_, row, info, c);
  std::vector<float> means(view_.head_dim);
  if (coded.means == MeanSource::kNone) return means;
  const std::vector<float>& given = c == Component::kKey ? coded.key_means : coded.value_means;
  for (int32_t d = 0; d < view_.head_dim; ++d) {
    means[d] = half_to_float(float_to_half(given[int64_t{row % rows()} * view_.head_dim + d]));
  }
  return means;
}

float CodedHostStore::new_step(int32_t row, Component c, const float* mean) const {
  const CodedConfig& coded = config_.coded;
  const bool key = c == Component::kKey;
  if (coded.steps == StepSource::kGiven) {
    return (key ? coded.key_steps : coded.value_steps)[row % rows()];
  }
  return relative_step(prompt_range(view_, row, table_.info(row / rows()), c, mean),
                       key ? coded.key_relative : coded.value_relative);
}

// The tokens that stay raw must be what a step can code one day.
Status CodedHostStore::check_raw_rest(const CodingPlan& plan) const {
  std::vector<uint16_t> x(view_.head_dim);
  for (size_t i = 0; i < plan.ranges.size() * rows(); ++i) {
    const BlockRange& range = plan.ranges[i / rows()];
    const SequenceInfo& info = table_.info(range.slot);
    const auto w = static_cast<int32_t>(i % rows());
    for (const Component c : kComponents) {
      const RowBasis basis = plan_basis(plan, i / rows(), w, c);
      for (int32_t p = range.count * kBlockTokens; p < info.num_tokens; ++p) {
        get_raw_token(view_, row(range.slot, w), info, c, p, x.data());
        for (int32_t d = 0; d < view_.head_dim; ++d) {
          if (check_centred(centred(x[d], basis.mean[d]), basis.step) == StatusCode::kOk) continue;
          return Status(StatusCode::kOutOfRange, "a value without its mean, or its code")
              .with_context(row_name(w / view_.num_kv_heads, w % view_.num_kv_heads));
        }
      }
    }
  }
  return Status::ok();
}

// Raw tokens that stay: their means come off, and they move to where their blocks are kept.
void CodedHostStore::finish_prompt_row(int32_t row, const SequenceInfo& before,
                                       const SequenceInfo& after) {
  const int32_t first = after.window_first, count = after.num_tokens - first;
  std::vector<uint16_t> x(static_cast<size_t>(count) * view_.head_dim);
  for (const Component c : kComponents) {
    const float* mean = view_.means(c, row);
    for (int32_t i = 0; i < count; ++i) {
      get_raw_token(view_, row, before, c, first + i, &x[int64_t{i} * view_.head_dim]);
    }
    for (size_t i = 0; i < x.size(); ++i) x[i] = centred(x[i], mean[i % view_.head_dim]);
    for (int32_t i = 0; i < count; ++i) {
      put_raw_token(view_, row, after, c, first + i, &x[int64_t{i} * view_.head_dim]);
    }
  }
}

Status CodedHostStore::end_prompt(SequenceList sequences) {
  const Result<Slots> slots = table_.admit_end_prompt(sequences);
  if (!slots) return slots.status();
  CodingPlan plan;
  for (const int32_t slot : *slots) {
    const SequenceInfo& info = table_.info(slot);
    if (Status s = check_coded_prompt_end(config_.coded, info.num_tokens); !s) return s;
    const int32_t coded = coded_tokens_after_prompt(info.num_tokens, view_.window_tokens);
    plan.ranges.push_back({slot, 0, coded / kBlockTokens});
    for (int32_t w = 0; w < rows(); ++w) {
      for (const Component c : kComponents) {
        std::vector<float> means = new_means(row(slot, w), c);
        plan.steps[static_cast<size_t>(c)].push_back(new_step(row(slot, w), c, means.data()));
        plan.means[static_cast<size_t>(c)].push_back(std::move(means));
      }
    }
  }
  if (Status s = check_raw_rest(plan); !s) return s;
  if (Status s = plan_blocks(&plan); !s) return s;

  std::vector<SideCounts> pages(slots->size()), target(plan.rows.size());
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const int32_t end = end_of_blocks(view_, 0, plan.rows[i]);
    int32_t& most = pages[i / rows()].of[kCodedSide];
    most = std::max(most, pages_for(end, view_.page_units()));
    target[i].of[kCodedSide] = end;
    const int32_t tokens = table_.info((*slots)[i / rows()]).num_tokens;
    target[i].of[kRawSide] =
        CodedView::raw_tokens(coded_info_after_prompt(tokens, view_.window_tokens));
  }
  const PageAllocator& a = view_.allocator;
  OpReport report;
  if (Status s = run_page_op(a, PageOp::reserve(batch(*slots), pages.data(), &report)); !s) {
    return s;
  }
  for (size_t i = 0; i < plan.rows.size(); ++i) {
    const int32_t slot = (*slots)[i / rows()], at = row(slot, static_cast<int32_t>(i % rows()));
    const SequenceInfo before = table_.info(slot);
    for (const Component c : kComponents) {
      const std::vector<float>& mean = plan.means[static_cast<size_t>(c)][i];
      std::copy(mean.begin(), mean.end(), view_.means(c, at));
      view_.step(c, at) = plan.steps[static_cast<size_t>(c)][i];
    }
    write_blocks(view_, at, 0, 0, plan.rows[i]);
    finish_prompt_row(at, before, coded_info_after_prompt(before.num_tokens, view_.window_tokens));
  }
  if (Status s = run_page_op(a, PageOp::keep(batch(*slots), target.data(), &report)); !s) return s;
  books_ = std::move(plan.books);
  for (const int32_t slot : *slots) {
    table_.set_info(slot,
                    coded_info_after_prompt(table_.info(slot).num_tokens, view_.window_tokens));
    table_.set_phase(slot, SequencePhase::kLive);
  }
  return Status::ok();
}

}  // namespace tierkv
