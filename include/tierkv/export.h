// SPDX-License-Identifier: Apache-2.0
// TKV_API marks what libtierkv.so exports; everything else is hidden.
#pragma once

#if defined(__GNUC__)
#define TKV_API __attribute__((visibility("default")))
#else
#define TKV_API
#endif
