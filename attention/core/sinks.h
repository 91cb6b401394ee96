// SPDX-License-Identifier: Apache-2.0
// Learned sinks added to finished results (apply_sinks() of tierkv/attention.h): what host and
// device share. A sink is a part of the softmax without a value: merge_row() with it joins them.
#pragma once

#include "attention/core/merge.h"
#include "tierkv/attention.h"

namespace tierkv {

Status validate_sinks(const SinkCall& call);

}  // namespace tierkv
