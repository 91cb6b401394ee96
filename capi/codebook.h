// SPDX-License-Identifier: Apache-2.0
// What a codebook's handle holds.
#pragma once

#include "codec/format/codebook.h"
#include "tierkv/tierkv_c.h"

struct tkv_codebook {
  tierkv::Codebook book;
};
