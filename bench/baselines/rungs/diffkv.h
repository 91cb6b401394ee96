// SPDX-License-Identifier: Apache-2.0
// The rewriting of pages for rung 1.
#pragma once

#include "bench/baselines/rungs/rung_kernel.h"
#include "codec/format/page_layout.h"

namespace tierkv {

struct TranscodeParams {
  PageLayout layouts[kAttentionTiers];
  uint8_t* to = nullptr;  // a pool like RungParams::pool
};
// params as diffkv_rung()'s kernel wants them; shared_bytes: what a page's segments take.
Status launch_transcode(const RungParams& params, const TranscodeParams& pages,
                        int32_t shared_bytes, GpuStream stream);

}  // namespace tierkv
