// SPDX-License-Identifier: Apache-2.0
// What `--details` adds to the JSON of `analyze` and `sweep`, for python/tierkv/report.py. Matrices
// are [layers][kv_heads]; counts are [[what, count], ...] in rising order.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "codec/policy/profile.h"
#include "tools/analysis/detail.h"
#include "tools/analysis/survey.h"

namespace tierkv::analysis {

nlohmann::ordered_json detail_json(const PresetDetail& detail);
nlohmann::ordered_json survey_json(const Survey& survey);
// Sensitivities and head scales; null where they were not measured.
nlohmann::ordered_json profile_json(const Profile& profile);

}  // namespace tierkv::analysis
