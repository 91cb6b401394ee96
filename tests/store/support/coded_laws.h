// What holds in every coded store, whatever its rows hold.
#pragma once

#include <string>

#include "store/coded/coded_shape.h"

namespace tierkv::testing {

// The laws of store/CODED.md; "" or the one that is broken.
std::string broken_law(const CodedView& s);

}  // namespace tierkv::testing
