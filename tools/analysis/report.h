// SPDX-License-Identifier: Apache-2.0
// What `tierkv analyze` and `tierkv sweep` print: JSON (schemas tierkv.analyze/1, tierkv.sweep/1),
// CSV, Markdown and a table for people.
#pragma once

#include <string>
#include <vector>

#include "tools/analysis/analyze.h"
#include "tools/analysis/survey.h"
#include "tools/analysis/sweep.h"

namespace tierkv::analysis {

// What the errors mean, for --help.
std::string metric_help();

// What `--details` adds to JSON besides AnalyzeResult::detail and the profile.
struct Details {
  std::vector<Survey> surveys;  // of the dumps, one a shape
};

// profile, details: null for none. A result with a detail has it under `detail`.
std::string to_json(const std::vector<datasets::DumpInfo>& files,
                    const std::vector<AnalyzeResult>& results, const Profile* profile,
                    const Details* details = nullptr);
// The same fields and `pareto` (see pareto_front()); and what was skipped, with its reason.
std::string to_json(const SweepResult& sweep, const Profile* profile,
                    const Details* details = nullptr);

// What tables for people show of a total, behind the preset's name.
const std::vector<std::string>& table_columns();
std::vector<std::string> table_cells(const AnalyzeResult& total);
std::string table_legend();  // what the columns mean, a sentence each
std::string to_csv(const std::vector<AnalyzeResult>& results);
// Totals only, one table per file: least ranking_error() first; a star marks presets that no other
// beats in both memory and that error.
std::string to_table(const std::vector<AnalyzeResult>& results);
// The same as Markdown, with presets that no other beats in bold.
std::string to_markdown(const std::vector<AnalyzeResult>& results);

}  // namespace tierkv::analysis
