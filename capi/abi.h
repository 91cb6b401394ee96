// SPDX-License-Identifier: Apache-2.0
// The boundary between C and C++: structs of any version in and out, no exception across.
#pragma once

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <thread>

#include "tierkv/status.h"
#include "tierkv/tierkv_c.h"

namespace tierkv::capi {

inline Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, what);
}

// Copies a caller's struct of any version: fields that it lacks are zero. kUnsupported where it has
// fields this build does not know and that are not zero.
template <class T>
Status read_struct(const T* in, const char* name, T* out) {
  if (in == nullptr) return invalid(std::string(name) + " is null");
  const size_t size = in->struct_size;
  if (size < sizeof(size_t) || size > (size_t{1} << 20)) {
    return invalid(std::string(name) + ": struct_size is not set");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(in);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    return Status(StatusCode::kUnsupported,
                  std::string(name) + ": made for a newer version of the library");
  }
  std::memset(static_cast<void*>(out), 0, sizeof(T));
  std::memcpy(static_cast<void*>(out), bytes, std::min(size, sizeof(T)));
  return Status::ok();
}

// Writes the fields that the caller's version has; call after read_struct() has accepted it.
template <class T>
void write_struct(const T& value, T* out) {
  constexpr size_t kHeader = sizeof(size_t);
  const size_t size = std::min(out->struct_size, sizeof(T));
  std::memcpy(reinterpret_cast<char*>(out) + kHeader,
              reinterpret_cast<const char*>(&value) + kHeader, size - kHeader);
}

inline void set_message(tkv_error* error, const char* text) {
  constexpr size_t kHeader = offsetof(tkv_error, message);
  if (error == nullptr || error->struct_size <= kHeader) return;
  const size_t room = std::min(error->struct_size, sizeof(tkv_error)) - kHeader - 1;
  size_t n = std::min(std::strlen(text), room);
  // Never cut inside a UTF-8 sequence. text[n] is what comes first behind the cut.
  while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xc0u) == 0x80u) --n;
  std::memcpy(error->message, text, n);
  error->message[n] = 0;
}

// Runs body(), which returns a Status, and turns what comes out of it into a status and a message.
template <class Body>
tkv_status guarded(tkv_error* error, const Body& body) {
  set_message(error, "");
  try {
    const Status s = body();
    set_message(error, s.message().c_str());
    return static_cast<tkv_status>(s.code());
  } catch (const std::bad_alloc&) {
    set_message(error, "out of memory");
    return TKV_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    set_message(error, e.what());
    return TKV_INTERNAL;
  } catch (...) {
    set_message(error, "an exception that is no std::exception");
    return TKV_INTERNAL;
  }
}

// A boolean of a struct: 0 or 1.
inline Status read_flag(int32_t given, const char* name, bool* out) {
  if (given != 0 && given != 1) return invalid(std::string(name) + " must be 0 or 1");
  *out = given == 1;
  return Status::ok();
}

inline Status read_threads(int32_t given, int32_t* threads) {
  if (given < 0 || given > 1024) return invalid("threads must be 0 to 1024");
  *threads =
      given > 0 ? given : static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  return Status::ok();
}

}  // namespace tierkv::capi
