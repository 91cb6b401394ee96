// What a codebook's handle holds.
#pragma once

#include "codec/codebook.h"
#include "tierkv/tierkv_c.h"

struct tkv_codebook {
  tierkv::Codebook book;
};
