// How long the random traces run.
#pragma once

#include <cstdint>
#include <cstdlib>

namespace tierkv::testing {

// Operations of a trace; TIERKV_GPU_TRACE_STEPS asks for another number (fewer under a sanitizer).
inline int32_t trace_steps(int32_t usual) {
  const char* text = std::getenv("TIERKV_GPU_TRACE_STEPS");
  return text == nullptr ? usual : std::atoi(text);
}

}  // namespace tierkv::testing
