// The figures of a report, each an SVG picture. None decides what to leave out: the page does.
#pragma once

#include <string>
#include <vector>

#include "tools/analysis/survey.h"
#include "tools/analysis/sweep.h"

namespace tierkv::report {

using ResultList = std::vector<const analysis::AnalyzeResult*>;

// The family of a preset ("step", "kivi", ...), which has a colour and a marker of its own.
int family_of(const std::string& preset);

// Memory against online attention error, the line through the presets that no other beats, and
// names at those. `numbers` [results]: what the table calls them.
std::string rate_distortion(const ResultList& results, const std::vector<int>& numbers,
                            const std::vector<bool>& front);

// Share of high, low and pruned tokens per layer and head of presets that have tiers.
std::string tier_shares(const ResultList& results);

// Significance, value norms and key norms of tokens: DiffKV Figure 2.
std::string score_distributions(const analysis::Survey& survey);
// Significance along one row: DiffKV Figure 3.
std::string significance_trace(const analysis::SignificanceTrace& trace);
// Tokens that hold most of the attention, per layer (DiffKV Figure 4) and per head (Figure 5).
std::string critical_by_layer(const analysis::Survey& survey);
std::string critical_by_head(const analysis::Survey& survey);

// Histograms of the codes of keys and values: KVComp Figure 3.
std::string code_histograms(const ResultList& results);
// Relative error of keys and values along the sequence.
std::string error_by_position(const ResultList& results);

}  // namespace tierkv::report
