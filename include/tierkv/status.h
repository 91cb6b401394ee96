// SPDX-License-Identifier: Apache-2.0
// Errors are values. Every fallible function of the library returns a Status or a Result<T>;
// nothing in the library exits, aborts or prints, or throws anything but std::bad_alloc. A failed
// call has written nothing unless its declaration says otherwise.
//
// Device code reports with StatusCode alone, one per row, in an array that the caller reads later.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "tierkv/export.h"

namespace tierkv {

enum class StatusCode : int32_t {
  kOk = 0,
  kInvalidArgument = 1,  // null or misaligned pointer, negative size, inconsistent configuration
  kUnsupported = 2,      // a combination the library names and refuses
  kNonFinite = 3,        // NaN or infinity in the input
  kOutOfRange = 4,  // beyond fp16 where an fp16 scale or zero point is needed, or beyond a table
  kOutOfPages = 5,  // the page pool cannot serve the demand; nothing was allocated
  kCorrupt = 6,     // compressed bytes, a page table or a file that contradicts itself
  kBufferTooSmall = 7,  // an output or workspace smaller than its *_bytes() function says
  kStaleSequence = 8,   // a sequence id that was released
  kNotFound = 9,        // a named thing that is not there
  kIo = 10,             // the operating system refused a read or a write
  kCuda = 11,           // a CUDA runtime call failed
  kVersion = 12,        // a format version this build does not know
  kOutOfMemory = 13,    // no host or device memory left
};

// "invalid_argument" for kInvalidArgument and so on; never null.
TKV_API const char* status_name(StatusCode code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}
  static Status ok() { return {}; }

  bool is_ok() const { return code_ == StatusCode::kOk; }
  explicit operator bool() const { return is_ok(); }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // The same failure, with "where: " before its message.
  Status with_context(const std::string& where) const {
    return is_ok() ? *this : Status(code_, where + ": " + message_);
  }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

// A value or the reason why there is none. value() may only be called when is_ok().
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {}

  bool is_ok() const { return value_.has_value(); }
  explicit operator bool() const { return is_ok(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }
  T& operator*() { return *value_; }
  const T& operator*() const { return *value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace tierkv
