// One self-contained HTML page with everything that a comparison of presets has to show: no
// scripts, no fonts, no references to anything outside. It is well-formed XML too.
#pragma once

#include <string>
#include <vector>

#include "tools/analysis/survey.h"
#include "tools/analysis/sweep.h"

namespace tierkv::report {

struct ReportInput {
  std::string version;                           // of the command
  const analysis::SweepResult* sweep = nullptr;  // with AnalyzeOptions::details
  std::vector<analysis::Survey> surveys;         // of sweep->files
};

std::string html_page(const ReportInput& input);

}  // namespace tierkv::report
