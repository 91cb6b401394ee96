#include "tools/analysis/row_pages.h"

#include "tierkv/page.h"

namespace tierkv::analysis {
namespace {

int64_t pages_for(int64_t units, int64_t per_page) {
  return (units + per_page - 1) / per_page;
}

// Fixed-width tiers: tokens of each format fill pages of their own.
int64_t fixed_pages(const Scheme& scheme, const RowPlan& plan, int32_t head_dim) {
  std::vector<TierFormat> formats = {scheme.high};
  std::vector<int64_t> tokens = {plan.count[static_cast<int>(Tier::kHigh)]};
  const auto add = [&](const TierFormat& f, int64_t n) {
    for (size_t i = 0; i < formats.size(); ++i) {
      if (formats[i] != f) continue;
      tokens[i] += n;
      return;
    }
    formats.push_back(f);
    tokens.push_back(n);
  };
  if (plan.count[static_cast<int>(Tier::kWindow)] > 0)
    add(scheme.window, plan.count[static_cast<int>(Tier::kWindow)]);
  if (scheme.tiered) add(scheme.low, plan.count[static_cast<int>(Tier::kLow)]);
  const Result<PageChoice> choice = choose_page_size(formats, head_dim);
  if (!choice) return 0;
  int64_t pages = 0;
  for (size_t i = 0; i < formats.size(); ++i) pages += pages_for(tokens[i], choice->tokens[i]);
  return pages * choice->page_bytes;
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

int64_t row_page_bytes(const Scheme& scheme, const RowPlan& plan, int32_t head_dim,
                       int64_t body_bytes) {
  if (scheme.has_fixed_pages()) return fixed_pages(scheme, plan, head_dim);
  if (scheme.has_coded_pages()) return coded_pages(scheme, plan, head_dim, body_bytes);
  return 0;
}

}  // namespace tierkv::analysis
