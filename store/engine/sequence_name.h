// SPDX-License-Identifier: Apache-2.0
// How messages name a sequence.
#pragma once

#include <string>

#include "tierkv/sequence.h"

namespace tierkv::store {

// The number that C and Python know, then the fields that C++ knows.
inline std::string name_of(SequenceId id) {
  return "sequence " + std::to_string(number_of(id)) + " (slot " + std::to_string(id.slot) +
         ", generation " + std::to_string(id.generation) + ")";
}

}  // namespace tierkv::store
