// SPDX-License-Identifier: Apache-2.0
// Basis and global step of one component of a row in a format (docs/internals/architecture.md,
// "Quantisation").
#pragma once

#include "codec/policy/profile.h"
#include "tierkv/basis.h"

namespace tierkv::analysis {

Basis make_basis(const ComponentFormat& format, Component c, const RowProfile& row,
                 int32_t head_dim);
double make_step(const ComponentFormat& format, Component c, const RowProfile& row,
                 double sm_scale);

}  // namespace tierkv::analysis
