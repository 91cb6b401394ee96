// Tokens of one layer. A prompt's are looked at first, then blocks are made of them and of the raw
// tokens before them, then what is left is written to the raw pages; what a step brings is written
// at once: if one of its values is refused, the call that follows writes over it.

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/format/element.h"
#include "codec/gpu/channel_encode.cuh"
#include "store/channel/channel_device_state.h"
#include "store/tiers/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kCheckThreads = 256;
constexpr int32_t kChunk = 8;  // values that are read at once

// Of a row of the layer.
struct AppendRow {
  int32_t entry, head;
  int32_t sequence;  // kPaddingSequence: nothing is done
  int32_t row;
  SequenceInfo info;
  int32_t first;  // of the call's tokens

  __device__ int64_t element(const DeviceTokens& x, int32_t heads, int32_t head_dim,
                             int32_t position) const {
    const int64_t token = static_cast<int64_t>(entry) * x.tokens + (position - first);
    return (token * heads + head) * head_dim;
  }
};
__device__ AppendRow append_row(const ChannelDeviceState& d, const DeviceTokens& x, int32_t i) {
  const int32_t heads = d.s.num_kv_heads;
  AppendRow r{i / heads, i % heads, d.common.batch[i / heads], 0, {}, 0};
  if (has_failed(d.common)) r.sequence = kPaddingSequence;
  if (r.sequence == kPaddingSequence) return r;
  r.row = d.s.row_of(r.sequence, x.layer, r.head);
  r.info = d.s.infos[r.sequence];
  r.first = r.info.num_tokens - x.tokens;
  return r;
}

__device__ StatusCode status_of(float x) {
  if (!is_finite(x)) return StatusCode::kNonFinite;
  return x > kMaxHalf || x < -kMaxHalf ? StatusCode::kOutOfRange : StatusCode::kOk;
}

// kChunk values from element `at` on, a multiple of it, as fp16; 16-byte loads where `aligned`.
struct ChunkReader {
  const void* x;
  DType dtype;
  bool aligned;

  __device__ __forceinline__ uint4 load(int64_t at) const {
    if (aligned) return *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(x) + at);
    uint32_t words[kChunk / 2];
#pragma unroll
    for (int32_t i = 0; i < kChunk / 2; ++i) {
      words[i] = float_to_half(load_element(x, dtype, at + 2 * i)) |
                 static_cast<uint32_t>(float_to_half(load_element(x, dtype, at + 2 * i + 1))) << 16;
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};
__device__ ChunkReader reader_of(const DeviceTokens& tokens, Component c) {
  const void* x = c == Component::kKey ? tokens.k : tokens.v;
  return {x, tokens.dtype,
          tokens.dtype == DType::kFloat16 && reinterpret_cast<uintptr_t>(x) % 16 == 0};
}

__global__ void __launch_bounds__(kCheckThreads)
    check_kernel(const __grid_constant__ ChannelDeviceState d,
                 const __grid_constant__ DeviceTokens x) {
  if (has_failed(d.common)) return;
  const int64_t of_entry = static_cast<int64_t>(x.tokens) * d.s.num_kv_heads * d.s.head_dim();
  const int64_t count = x.count * of_entry, step = int64_t{gridDim.x} * kCheckThreads;
  for (int64_t i = int64_t{blockIdx.x} * kCheckThreads + threadIdx.x; i < count; i += step) {
    const StatusCode code =
        greater(status_of(load_element(x.k, x.dtype, i)), status_of(load_element(x.v, x.dtype, i)));
    if (code == StatusCode::kOk) continue;
    report_failure(d.common, {code, DeviceCall::kAppend, x.layer, d.common.batch[i / of_entry]});
  }
}

// The tokens of a block: raw ones before the call's.
struct PromptSource {
  const ChannelView& s;
  const DeviceTokens& x;
  const AppendRow& r;
  int32_t begin;  // position of the block

  template <int32_t kHeadDim>
  __device__ __forceinline__ bool stage(const ChannelLayout& l, Component c,
                                        ChannelShared<kHeadDim>& to) const {
    const ChunkReader reader = reader_of(x, c);
    constexpr int32_t kChunks = kHeadDim / kChunk;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < l.tokens * kChunks; i += kChannelThreads) {
      const int32_t t = i / kChunks, dim = i % kChunks * kChunk, position = begin + t;
      uint16_t* line = &to.x[t * ChannelShared<kHeadDim>::kLine + dim];
      if (position >= r.first) {
        const int64_t at = r.element(x, s.num_kv_heads, kHeadDim, position) + dim;
        *reinterpret_cast<uint4*>(line) = reader.load(at);
        continue;
      }
      const uint8_t* page = s.raw_page(r.row, r.info.prompt_tokens, position);
      for (int32_t j = 0; j < kChunk; ++j) {
        line[j] = *reinterpret_cast<const uint16_t*>(page + s.raw_value_byte(c, position, dim + j));
      }
    }
    return true;
  }
};

// Grid: rows of the layer, blocks of a row.
template <class Encoder>
__global__ void __launch_bounds__(kChannelThreads)
    prompt_kernel(const __grid_constant__ ChannelDeviceState d,
                  const __grid_constant__ DeviceTokens x) {
  __shared__ ChannelShared<Encoder::kHeadDim> shared;
  const AppendRow r = append_row(d, x, static_cast<int32_t>(blockIdx.x));
  if (r.sequence == kPaddingSequence) return;
  const int32_t begin = r.info.prompt_tokens + static_cast<int32_t>(blockIdx.y) * d.s.layout.tokens;
  if (begin >= r.info.window_first) return;
  const PromptSource source{d.s, x, r, begin};
  (void)Encoder::encode(d.s.layout, source, d.s.block(r.row, begin / d.s.layout.tokens), shared);
}

// The pages of blocks that this append has made go behind those of the raw tokens that stay.
__device__ void rotate_pages(const ChannelDeviceState& d, const AppendRow& r) {
  const int32_t blocks = (r.info.window_first - r.info.prompt_tokens) / d.s.layout.tokens;
  if (r.info.window_origin != kInPrompt || blocks == 0) return;
  if (threadIdx.x == 0) {
    rotate_left(d.s.page_ids(r.row, kResidualSide), d.s.allocator.pages[r.row].of[kResidualSide],
                d.s.pages_of_blocks(blocks));
  }
  __syncthreads();
}

// A CTA for a row of the layer. Where a token opens a tile the rest of it is set to zero.
__global__ void __launch_bounds__(kThreads)
    append_kernel(const __grid_constant__ ChannelDeviceState d,
                  const __grid_constant__ DeviceTokens x) {
  const AppendRow r = append_row(d, x, static_cast<int32_t>(blockIdx.x));
  // Other CTAs may find a failure meanwhile: this one goes on as a whole or not at all.
  if (__syncthreads_or(r.sequence == kPaddingSequence) != 0) return;
  rotate_pages(d, r);
  const int32_t head_dim = d.s.head_dim(), end = r.info.num_tokens;
  const int32_t begin = max(r.first, r.info.window_first);
  const int32_t last_tile = end / kTileTokens * kTileTokens;
  const int32_t stop = last_tile >= begin && last_tile < end ? last_tile + kTileTokens : end;
  const int32_t values = (stop - begin) * head_dim;
  auto code = StatusCode::kOk;
  for (int32_t i = threadIdx.x; i < 2 * values; i += kThreads) {
    const Component c = i < values ? Component::kKey : Component::kValue;
    const int32_t j = i < values ? i : i - values;
    const int32_t position = begin + j / head_dim, dim = j % head_dim;
    float value = 0.0f;
    if (position < end) {
      const int64_t at = r.element(x, d.s.num_kv_heads, head_dim, position) + dim;
      value = load_element(c == Component::kKey ? x.k : x.v, x.dtype, at);
      code = greater(code, status_of(value));
    }
    uint8_t* page = d.s.raw_page(r.row, r.info.window_first, position);
    *reinterpret_cast<uint16_t*>(page + d.s.raw_value_byte(c, position, dim)) =
        float_to_half(value);
  }
  if (code != StatusCode::kOk) {
    report_failure(d.common, {code, DeviceCall::kAppend, x.layer, r.sequence});
  }
}

// The layer has its tokens unless one of its values was refused.
__global__ void __launch_bounds__(kThreads)
    finish_append_kernel(const __grid_constant__ ChannelDeviceState d, int32_t layer,
                         int32_t num_rows) {
  const auto i = static_cast<int32_t>(blockIdx.x * kThreads + threadIdx.x);
  if (i >= num_rows || has_failed(d.common)) return;
  const int32_t sequence = d.common.batch[i / d.s.num_kv_heads];
  if (sequence == kPaddingSequence) return;
  const int32_t row = d.s.row_of(sequence, layer, i % d.s.num_kv_heads);
  d.common.appended[row] = d.s.infos[sequence].num_tokens;
}

}  // namespace

Status append_channel_tokens(const ChannelDeviceState& d, const ChannelAppendCall& call,
                             GpuStream stream) {
  const DeviceTokens& x = call.tokens;
  const int32_t rows = x.count * d.s.num_kv_heads;
  if (call.prompt) {
    const Result<DeviceLimits> limits = device_limits();
    if (!limits) return limits.status();
    const int64_t values = int64_t{rows} * x.tokens * d.s.head_dim();
    const uint32_t ctas =
        std::min(ctas_for(values, kCheckThreads), static_cast<uint32_t>(limits->sms) * 8);
    check_kernel<<<ctas, kCheckThreads, 0, stream>>>(d, x);
  }
  if (call.most_blocks > 0) {
    const dim3 grid(static_cast<uint32_t>(rows), static_cast<uint32_t>(call.most_blocks));
    with_channel_encoder(d.s.layout, [&](auto encoder) {
      prompt_kernel<decltype(encoder)><<<grid, kChannelThreads, 0, stream>>>(d, x);
    });
  }
  append_kernel<<<rows, kThreads, 0, stream>>>(d, x);
  finish_append_kernel<<<ctas_for(rows, kThreads), kThreads, 0, stream>>>(d, x.layer, rows);
  return launch_status("append");
}

}  // namespace tierkv
