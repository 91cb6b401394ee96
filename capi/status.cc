// SPDX-License-Identifier: Apache-2.0
#include "capi/abi.h"

#include <string_view>

namespace tierkv {

#define TKV_TEXT_(x) #x
#define TKV_TEXT(x) TKV_TEXT_(x)
constexpr const char* kVersion =
    TKV_TEXT(TKV_VERSION_MAJOR) "." TKV_TEXT(TKV_VERSION_MINOR) "." TKV_TEXT(TKV_VERSION_PATCH);
static_assert(std::string_view(kVersion) == TIERKV_PROJECT_VERSION);

static_assert(TKV_OK == static_cast<int>(StatusCode::kOk));
static_assert(TKV_INVALID_ARGUMENT == static_cast<int>(StatusCode::kInvalidArgument));
static_assert(TKV_UNSUPPORTED == static_cast<int>(StatusCode::kUnsupported));
static_assert(TKV_NON_FINITE == static_cast<int>(StatusCode::kNonFinite));
static_assert(TKV_OUT_OF_RANGE == static_cast<int>(StatusCode::kOutOfRange));
static_assert(TKV_OUT_OF_PAGES == static_cast<int>(StatusCode::kOutOfPages));
static_assert(TKV_CORRUPT == static_cast<int>(StatusCode::kCorrupt));
static_assert(TKV_BUFFER_TOO_SMALL == static_cast<int>(StatusCode::kBufferTooSmall));
static_assert(TKV_STALE_SEQUENCE == static_cast<int>(StatusCode::kStaleSequence));
static_assert(TKV_NOT_FOUND == static_cast<int>(StatusCode::kNotFound));
static_assert(TKV_IO == static_cast<int>(StatusCode::kIo));
static_assert(TKV_CUDA == static_cast<int>(StatusCode::kCuda));
static_assert(TKV_VERSION == static_cast<int>(StatusCode::kVersion));
static_assert(TKV_OUT_OF_MEMORY == static_cast<int>(StatusCode::kOutOfMemory));

}  // namespace tierkv

extern "C" {

const char* tkv_version(void) {
  return tierkv::kVersion;
}

const char* tkv_status_string(tkv_status status) {
  if (status == TKV_INTERNAL) return "internal";
  if (status < TKV_OK || status > TKV_OUT_OF_MEMORY) return "unknown";
  return tierkv::status_name(static_cast<tierkv::StatusCode>(status));
}

}  // extern "C"
