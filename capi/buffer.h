// SPDX-License-Identifier: Apache-2.0
// Bytes out through a caller's buffer.
#pragma once

#include <string>
#include <vector>

#include "capi/abi.h"

namespace tierkv::capi {

inline Status read_buffer(tkv_buffer* out, tkv_buffer* buffer) {
  if (Status s = read_struct(out, "buffer", buffer); !s) return s;
  return buffer->data == nullptr && buffer->capacity > 0 ? invalid("buffer: data is null")
                                                         : Status::ok();
}

// Says what is needed; null where that is more than there is.
inline uint8_t* room(size_t bytes, tkv_buffer* buffer, tkv_buffer* out) {
  buffer->size = bytes;
  write_struct(*buffer, out);
  return bytes <= buffer->capacity ? static_cast<uint8_t*>(buffer->data) : nullptr;
}

// kBufferTooSmall leaves the data alone and says what is needed.
inline Status fill(const std::vector<uint8_t>& bytes, tkv_buffer* out) {
  tkv_buffer b;
  if (Status s = read_buffer(out, &b); !s) return s;
  uint8_t* const to = room(bytes.size(), &b, out);
  if (to == nullptr && !bytes.empty()) {
    return Status(StatusCode::kBufferTooSmall,
                  "buffer: " + std::to_string(bytes.size()) + " bytes are needed");
  }
  std::copy(bytes.begin(), bytes.end(), to);
  return Status::ok();
}

}  // namespace tierkv::capi
