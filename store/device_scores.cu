// Scores of a prompt, running means of the generation phase, and the probabilities they are fed.

#include "store/device_rows.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 256;
constexpr int32_t kWarps = kThreads / 32;

// Rows of one layer: a CTA each.
__device__ DeviceRow cta_row(const DeviceState& d, int32_t layer) {
  return layer_row(d, layer, static_cast<int32_t>(blockIdx.x));
}

// The first `tokens` scores of every row, before any is taken over.
__global__ void __launch_bounds__(kThreads)
    check_scores_kernel(const __grid_constant__ DeviceState d,
                        const __grid_constant__ DeviceScores x, DeviceCall call) {
  const DeviceRow r = cta_row(d, x.layer);
  if (r.sequence == kPaddingSequence) return;
  const float* line = x.values + static_cast<int64_t>(blockIdx.x) * x.stride;
  const int32_t tokens = d.s.infos[r.sequence].num_tokens;
  const int32_t end = call == DeviceCall::kScorePrompt ? tokens : tokens - 1 - x.back;
  for (int32_t p = threadIdx.x; p < end; p += kThreads) {
    if (is_finite(line[p]) && line[p] >= 0) continue;
    const StatusCode code =
        is_finite(line[p]) ? StatusCode::kInvalidArgument : StatusCode::kNonFinite;
    report_failure(d, {code, call, x.layer, r.sequence});
  }
}

__global__ void __launch_bounds__(kThreads)
    score_prompt_kernel(const __grid_constant__ DeviceState d,
                        const __grid_constant__ DeviceScores x) {
  const DeviceRow r = cta_row(d, x.layer);
  if (r.sequence == kPaddingSequence || has_failed(d)) return;
  const float* line = x.values + static_cast<int64_t>(blockIdx.x) * x.stride;
  for (int32_t p = threadIdx.x; p < d.s.infos[r.sequence].num_tokens; p += kThreads) {
    const TokenPlace at = place_of(d.s, r.row, kWindowSide, p);
    *reinterpret_cast<float*>(at.page + d.s.layouts[kWindowSide].score_byte(at.slot)) = line[p];
  }
}

// One query over the tokens of one page, by a warp; the page's record with it.
__device__ void score_page(const DeviceState& d, int32_t side, int32_t page, int32_t used,
                           const CountSchedule& schedule, const ScoredQuery& query) {
  if (is_frozen(d.s.allocator, page)) return;
  uint8_t* bytes = d.s.page_bytes(page);
  RankedToken mine = no_token();
  for (int32_t slot = lane_index(); slot < used; slot += 32) {
    const TokenPlace at = {bytes, slot};
    const int32_t position = position_at(d.s, side, at);
    float score = score_at(d.s, side, at);
    if (position < query.position) {
      score = scored(schedule, score, position, query.position, query.probabilities[position]);
      *reinterpret_cast<float*>(bytes + d.s.layouts[side].score_byte(slot)) = score;
    }
    mine = better_victim(mine, {score, position, slot});
  }
  if (side == kWindowSide) return;
  const RankedToken best = best_of_warp(mine);
  if (lane_index() != 0) return;
  PageRecord& record = d.s.allocator.records[page];
  record.min_score = best.score;
  record.min_slot = best.index;
  record.min_position = best.position;
}

__global__ void __launch_bounds__(kThreads)
    update_scores_kernel(const __grid_constant__ DeviceState d,
                         const __grid_constant__ DeviceScores x) {
  const DeviceRow r = cta_row(d, x.layer);
  if (r.sequence == kPaddingSequence || has_failed(d)) return;
  const SequenceInfo info = d.s.infos[r.sequence];
  const CountSchedule schedule = {info.prompt_tokens, d.s.score_interval};
  const ScoredQuery query = {info.num_tokens - 1 - x.back,
                             x.values + static_cast<int64_t>(blockIdx.x) * x.stride};
  if (!schedule.is_counted(query.position)) return;
  const SideCounts tokens = d.s.allocator.tokens[r.row];
  int32_t item = static_cast<int32_t>(threadIdx.x) / 32;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t pages = pages_for(tokens.of[side], d.s.page_tokens(side));
    for (; item < pages; item += kWarps) {
      score_page(d, side, d.s.page_id(r.row, side, item),
                 d.s.page_used(side, item, tokens.of[side]), schedule, query);
    }
    item -= pages;
  }
}

// The largest probability that a head of the group gives the token in `at`, in every lane.
__device__ float token_probability(const DeviceProbabilities& x, const DeviceSlot& at,
                                   int64_t line) {
  const int32_t head_dim = at.page.layout->head_dim();
  LaneSide side;
  LaneValues k;
  load_side(at.page, at.slot, Component::kKey, &side);
  dequantize_lane(at.page, Component::kKey, side, k);
  float largest = 0;
  for (int32_t g = 0; g < x.group; ++g) {
    LaneValues q;
    const int64_t head = line * x.group + g;
    load_lane_values(static_cast<const uint16_t*>(x.q) + head * head_dim, DType::kFloat16, head_dim,
                     q);
    float dot = 0;
#pragma unroll
    for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
      const bool used = lane_dim(i / 4) < head_dim;
      dot += used ? q[i / 4][i % 4] * k[i / 4][i % 4] : 0.0f;
    }
#pragma unroll
    for (int32_t lanes = 16; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(kAllLanes, dot, lanes);
    largest = fmaxf(largest, expf(dot * x.sm_scale - x.lse[head]));
  }
  return fminf(largest, 1.0f);
}

__global__ void __launch_bounds__(kThreads)
    probabilities_kernel(const __grid_constant__ DeviceState d,
                         const __grid_constant__ DeviceProbabilities x) {
  const DeviceRow r = cta_row(d, x.layer);
  if (r.sequence == kPaddingSequence || has_failed(d)) return;
  const int64_t line_index = blockIdx.x;
  float* line = x.values + line_index * x.stride;
  for (int32_t p = threadIdx.x; p < d.s.infos[r.sequence].num_tokens; p += kThreads) line[p] = 0;
  __syncthreads();
  const SideCounts tokens = d.s.allocator.tokens[r.row];
  int32_t item = static_cast<int32_t>(threadIdx.x) / 32;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (; item < tokens.of[side]; item += kWarps) {
      const DeviceSlot at = device_slot(d, r.row, side, item);
      const float p = token_probability(x, at, line_index);
      if (lane_index() == 0) line[position_at(d.s, side, {at.page.bytes, at.slot})] = p;
    }
    item -= tokens.of[side];
  }
}

}  // namespace

Status score_prompt(const DeviceState& d, const DeviceScores& scores, GpuStream stream) {
  const auto rows = static_cast<uint32_t>(scores.count * d.s.num_kv_heads);
  check_scores_kernel<<<rows, kThreads, 0, stream>>>(d, scores, DeviceCall::kScorePrompt);
  score_prompt_kernel<<<rows, kThreads, 0, stream>>>(d, scores);
  return launch_status("score_prompt");
}

Status update_scores(const DeviceState& d, const DeviceScores& scores, GpuStream stream) {
  const auto rows = static_cast<uint32_t>(scores.count * d.s.num_kv_heads);
  check_scores_kernel<<<rows, kThreads, 0, stream>>>(d, scores, DeviceCall::kUpdateScores);
  update_scores_kernel<<<rows, kThreads, 0, stream>>>(d, scores);
  return launch_status("update_scores");
}

Status find_probabilities(const DeviceState& d, const DeviceProbabilities& p, GpuStream stream) {
  const auto rows = static_cast<uint32_t>(p.count * d.s.num_kv_heads);
  probabilities_kernel<<<rows, kThreads, 0, stream>>>(d, p);
  return launch_status("attend");
}

}  // namespace tierkv
