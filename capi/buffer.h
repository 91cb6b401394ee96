// SPDX-License-Identifier: Apache-2.0
// Bytes out through a caller's buffer.
#pragma once

#include <string>
#include <vector>

#include "capi/abi.h"

namespace tierkv::capi {

// kBufferTooSmall leaves the data alone and says what is needed.
inline Status fill(const std::vector<uint8_t>& bytes, tkv_buffer* out) {
  tkv_buffer b;
  if (Status s = read_struct(out, "buffer", &b); !s) return s;
  if (b.data == nullptr && b.capacity > 0) return invalid("buffer: data is null");
  b.size = bytes.size();
  write_struct(b, out);
  if (bytes.size() > b.capacity) {
    return Status(StatusCode::kBufferTooSmall,
                  "buffer: " + std::to_string(bytes.size()) + " bytes are needed");
  }
  std::memcpy(b.data, bytes.data(), bytes.size());
  return Status::ok();
}

}  // namespace tierkv::capi
