#include "codec/gpu/pages/block_cache.cuh"

#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

uint32_t ctas_of(int64_t warps) {
  return static_cast<uint32_t>((warps + kBlockWarps - 1) / kBlockWarps);
}

constexpr int32_t kMaxRanges = 65535;  // of a grid's second dimension

}  // namespace

Status encode_slots(const SlotEncode& e, GpuStream stream) {
  if (Status s = e.validate(); !s) return s;
  if (e.count == 0) return Status::ok();
  encode_slots_kernel<<<ctas_of(e.count * e.cache.num_kv_heads), kBlockThreads, 0, stream>>>(e);
  return cuda_status(cudaGetLastError(), "encoding of slots");
}

Status decode_blocks(const BlockDecode& d, GpuStream stream) {
  if (Status s = d.validate(); !s) return s;
  if (d.count == 0 || d.max_tokens == 0) return Status::ok();
  if (d.count > kMaxRanges) {
    return Status(StatusCode::kInvalidArgument, "a call decodes at most 65535 ranges");
  }
  const dim3 grid(ctas_of(int64_t{d.max_tokens} * d.cache.num_kv_heads),
                  static_cast<uint32_t>(d.count));
  const size_t row_bytes = d.cache.layout.head_dim() * sizeof(uint16_t);
  decode_blocks_kernel<<<grid, kBlockThreads, kBlockWarps * row_bytes, stream>>>(d);
  return cuda_status(cudaGetLastError(), "decoding of blocks");
}

}  // namespace tierkv
