// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/row_pages.h"

#include <algorithm>

#include "tierkv/page.h"

namespace tierkv::analysis {
namespace {

int64_t pages_for(int64_t units, int64_t per_page) {
  return (units + per_page - 1) / per_page;
}

// Fixed-width tiers: tokens of each format fill pages of their own.
int64_t fixed_pages(const Scheme& scheme, const RowPlan& plan, int32_t head_dim) {
  const std::vector<TierFormat> formats = page_formats(scheme);
  const Result<PageChoice> choice = choose_page_size(formats, head_dim, page_sizing(scheme));
  if (!choice) return 0;
  std::vector<int64_t> tokens(formats.size(), 0);
  const auto add = [&](const TierFormat& f, Tier tier) {
    const int64_t n = plan.count[static_cast<int>(tier)];
    if (n > 0) tokens[std::find(formats.begin(), formats.end(), f) - formats.begin()] += n;
  };
  int64_t raw_bytes = 0;
  if (scheme.classes.empty()) {
    add(scheme.window, Tier::kWindow);
  } else {
    const int64_t raw = plan.count[static_cast<int>(Tier::kWindow)];
    raw_bytes = pages_for(raw, kTileTokens) * kTileTokens * 4 * head_dim;
  }
  add(scheme.high, Tier::kHigh);
  if (scheme.tiered) add(scheme.low, Tier::kLow);
  int64_t pages = 0;
  for (size_t i = 0; i < formats.size(); ++i) pages += pages_for(tokens[i], choice->tokens[i]);
  return pages * choice->page_bytes + raw_bytes;
}

// Coded rows: blocks follow one another through payload pages; the raw window has pages of the same
// size.
int64_t coded_pages(const Scheme& scheme, const RowPlan& plan, int32_t head_dim,
                    int64_t body_bytes) {
  PageSizing sizing;
  sizing.min_tokens = kTileTokens;
  const Result<PageChoice> choice = choose_page_size({scheme.window}, head_dim, sizing);
  if (!choice) return 0;
  const int64_t window = plan.count[static_cast<int>(Tier::kWindow)];
  return (pages_for(body_bytes, choice->page_bytes) + pages_for(window, choice->tokens[0])) *
         choice->page_bytes;
}

}  // namespace

std::vector<TierFormat> page_formats(const Scheme& scheme) {
  std::vector<TierFormat> formats = {scheme.high};
  const auto add = [&](const TierFormat& f) {
    if (std::find(formats.begin(), formats.end(), f) == formats.end()) formats.push_back(f);
  };
  for (const HeadClass& c : scheme.classes) {
    add(c.high);
    add(c.low);
  }
  if (!scheme.classes.empty()) return formats;
  if (scheme.policy.window_tokens + scheme.policy.sink_tokens > 0) add(scheme.window);
  if (scheme.tiered) add(scheme.low);
  return formats;
}

PageSizing page_sizing(const Scheme& scheme) {
  PageSizing sizing;
  sizing.records = scheme.classes.empty();
  return sizing;
}

int64_t row_page_bytes(const Scheme& scheme, const RowPlan& plan, int32_t head_dim,
                       int64_t body_bytes) {
  if (scheme.has_fixed_pages()) return fixed_pages(scheme, plan, head_dim);
  if (scheme.has_coded_pages()) return coded_pages(scheme, plan, head_dim, body_bytes);
  return 0;
}

}  // namespace tierkv::analysis
