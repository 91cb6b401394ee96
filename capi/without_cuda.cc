// SPDX-License-Identifier: Apache-2.0
// The GPU entry points of a build without CUDA, in place of those of the .cu files: each refuses by
// name, and what no operation runs in needs no bytes.
#include "tierkv/allocator.h"
#include "tierkv/attention.h"
#include "tierkv/engine.h"
#include "tierkv/kv_store.h"
#include "tierkv/significance.h"

namespace tierkv {
namespace {

Status refusal(const char* function) {
  return Status(StatusCode::kUnsupported,
                std::string(function) + ": this library was built without CUDA");
}

}  // namespace

Status initialize_device(const PageAllocator&, GpuStream) {
  return refusal("initialize_device");
}
Status run_page_op_device(const PageAllocator&, const PageOp&, const DeviceWorkspace&, GpuStream) {
  return refusal("run_page_op_device");
}

size_t page_op_workspace_bytes(const AllocatorShape&, int32_t) {
  return 0;
}

Result<AttentionGrid> attention_grid(const AttentionConfig&) {
  return refusal("attention_grid");
}
Status plan_attention(const AttentionConfig&, const AttentionGrid&, const PageTableView&,
                      const AttentionBatch&, const AttentionWorkspace&, GpuStream) {
  return refusal("plan_attention");
}
Status attend(const AttentionConfig&, const AttentionGrid&, const AttendCall&,
              const AttentionWorkspace&, GpuStream) {
  return refusal("attend");
}
Status merge_attention(const MergeCall&, GpuStream) {
  return refusal("merge_attention");
}
Status apply_sinks(const SinkCall&, GpuStream) {
  return refusal("apply_sinks");
}

Result<EngineGrid> engine_grid(const EngineConfig&) {
  return refusal("engine_grid");
}
Status engine_encode(const EngineConfig&, const EngineLayer&, const EngineTokens&, GpuStream) {
  return refusal("engine_encode");
}
Status engine_plan(const EngineConfig&, const EngineGrid&, const EngineBatch&,
                   const AttentionWorkspace&, GpuStream) {
  return refusal("engine_plan");
}
Status engine_attend(const EngineConfig&, const EngineGrid&, const EngineAttend&,
                     const AttentionWorkspace&, GpuStream) {
  return refusal("engine_attend");
}
Status engine_decode(const EngineConfig&, const EngineLayer&, const EngineRanges&, GpuStream) {
  return refusal("engine_decode");
}

Status prompt_significance(const SignificanceCall&, const float*, float*, GpuStream) {
  return refusal("prompt_significance");
}
Status prompt_lse(const SignificanceCall&, float*, GpuStream) {
  return refusal("prompt_lse");
}

Result<std::unique_ptr<KvStore>> KvStore::create_device(const StoreConfig&, GpuStream) {
  return refusal("create_device");
}

}  // namespace tierkv
