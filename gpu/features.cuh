// SPDX-License-Identifier: Apache-2.0
// What the architecture that a kernel is compiled for has. Everything that depends on the
// architecture is in this folder, a file for each concern with its fallback; sm_80 is the least.
#pragma once

// Copies in bulk by the copy engine, and programmatic dependent launch: sm_90 and up.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define TKV_BULK_COPY 1
#else
#define TKV_BULK_COPY 0
#endif

// Products of warpgroups: sm_90a alone, neither plain sm_90 nor PTX of it.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TKV_HAS_WGMMA 1
#else
#define TKV_HAS_WGMMA 0
#endif
