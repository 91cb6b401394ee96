// SPDX-License-Identifier: Apache-2.0
#include "attention/channel/channel_pages.h"

#include "attention/channel/channel_launch.cuh"
#include "gpu/constants.h"

namespace tierkv {
namespace {

Status validate(const ChannelPagesCall& call, const void* workspace) {
  const auto is_aligned = [](const void* p) {
    return p != nullptr && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  };
  if (!is_aligned(call.q) || !is_aligned(call.out) || !is_aligned(workspace)) {
    return Status(StatusCode::kInvalidArgument, "q, out or workspace is null or misaligned");
  }
  const int64_t rows = int64_t{call.num_sequences} * call.ctas.columns.num_kv_heads;
  if (rows < 0 || rows > INT32_MAX / kMostChannelSplits || call.plan.num_items < rows ||
      call.plan.num_items > call.ctas.most_items(static_cast<int32_t>(rows))) {
    return Status(StatusCode::kInvalidArgument, "the plan's items are too few or too many");
  }
  if (call.status == nullptr || call.plan.parts == nullptr || !is_aligned(call.plan.items)) {
    return Status(StatusCode::kInvalidArgument, "status or plan is null or misaligned");
  }
  if (call.dtype == DType::kFloat16 || call.dtype == DType::kBFloat16) return Status::ok();
  return Status(StatusCode::kUnsupported, "dtype of q and out");
}

}  // namespace

Status attend_channel_pages(const ChannelPages& pages, const ChannelPagesCall& call,
                            void* workspace, GpuStream stream) {
  const ChannelCtas& ctas = call.ctas;
  if (Status s = validate_channel_group(ctas.columns.group); !s) return s;
  if (Status s = pages.validate(); !s) return s;
  if (Status s = validate(call, workspace); !s) return s;
  if (call.num_sequences == 0) return Status::ok();
  ChannelLaunch<ChannelPages> p{};
  p.cache = pages;
  p.ctas = ctas;
  p.plan = call.plan;
  p.num_rows = call.num_sequences * ctas.columns.num_kv_heads;
  p.is_bfloat16 = call.dtype == DType::kBFloat16;
  p.q = call.q;
  p.out = call.out;
  p.lse = call.lse;
  p.sinks = call.sinks;
  p.status = call.status;
  p.scale_log2 = call.sm_scale * kLog2E;
  p.parts = static_cast<float*>(workspace);
  const int64_t parts = int64_t{2} * (call.plan.num_items - p.num_rows);
  p.states = reinterpret_cast<SoftmaxState*>(p.parts +
                                             parts * ctas.all_columns() * pages.layout.head_dim());
  return launch_channel(p, call.plan.num_items, call.plan.num_items > p.num_rows, stream);
}

}  // namespace tierkv
