// SPDX-License-Identifier: Apache-2.0
// Structs of the C ABI with their size set.
#pragma once

#include "tierkv/tierkv_c.h"
#include "tierkv/tierkv_dumps_c.h"
#include "tierkv/tierkv_engine_c.h"
#include "tierkv/tierkv_kv_c.h"

namespace tierkv::test {

template <class T>
T make() {
  T s{};
  s.struct_size = sizeof(T);
  return s;
}

}  // namespace tierkv::test
