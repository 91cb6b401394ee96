// What `tierkv analyze` prints: JSON (schema tierkv.analyze/1), CSV and a table for people.
#pragma once

#include <string>
#include <vector>

#include "tools/analysis/analyze.h"

namespace tierkv::analysis {

std::string to_json(const std::vector<datasets::DumpInfo>& files,
                    const std::vector<AnalyzeResult>& results);
std::string to_csv(const std::vector<AnalyzeResult>& results);
// Totals only, one table per file: smallest cache first; a star marks presets that no other beats
// in both memory and online attention error.
std::string to_table(const std::vector<AnalyzeResult>& results);

}  // namespace tierkv::analysis
