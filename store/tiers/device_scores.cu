// Scores of a prompt, running means of the generation phase, and the probabilities they are fed.

#include "store/tiers/device_rows.cuh"

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

constexpr int32_t kProbabilityCtas = 8;  // of a row
constexpr int32_t kMaxProbabilityHeads = 16;

// The query heads of a row, in the order in which lanes hold the dims of a token.
struct RowQueries {
  float q[kMaxProbabilityHeads][kLaneChunks][4][32];
  float lse[kMaxProbabilityHeads];
};

// Of query blockIdx.z of the row.
__device__ void load_queries(const DeviceProbabilities& x, const StoreView& s,
                             RowQueries* queries) {
  const int32_t warp = static_cast<int32_t>(threadIdx.x) / 32;
  const int32_t head_dim = s.layouts[kHighSide].head_dim();
  const auto entry = static_cast<int32_t>(blockIdx.x) / s.num_kv_heads;
  const auto query = static_cast<int32_t>(blockIdx.z);
  const int64_t line = int64_t{entry} * x.q_len + query;
  const int64_t first =
      (line * s.num_kv_heads + static_cast<int32_t>(blockIdx.x) % s.num_kv_heads) * x.group;
  for (int32_t g = warp; g < x.group; g += kWarps) {
    const int64_t head = first + g;
    LaneValues q;
    load_lane_values(static_cast<const uint16_t*>(x.q) + head * head_dim, x.dtype, head_dim, q);
#pragma unroll
    for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
      queries->q[g][i / 4][i % 4][lane_index()] = q[i / 4][i % 4] * x.sm_scale;
    }
    if (lane_index() == 0) queries->lse[g] = x.lse[head];
  }
}

// The largest probability that a head of the group gives the token, in every lane.
__device__ float token_probability(const RowQueries& queries, int32_t group, const PageRef& page,
                                   int32_t slot) {
  const int32_t head_dim = page.layout->head_dim();
  LaneSide side;
  LaneValues k;
  load_side(page, slot, Component::kKey, &side);
  dequantize_lane(page, Component::kKey, side, k);
  float largest = 0;
  for (int32_t g = 0; g < group; ++g) {
    float dot = 0;
#pragma unroll
    for (int32_t i = 0; i < 4 * kLaneChunks; ++i) {
      if (lane_dim(i / 4) >= head_dim) continue;
      dot += queries.q[g][i / 4][i % 4][lane_index()] * k[i / 4][i % 4];
    }
#pragma unroll
    for (int32_t lanes = 16; lanes > 0; lanes /= 2) dot += __shfl_xor_sync(kFullWarp, dot, lanes);
    largest = fmaxf(largest, expf(dot - queries.lse[g]));
  }
  return fminf(largest, 1.0f);
}

// The probabilities of this CTA's row and query, by position.
__device__ float* line_of(const DeviceProbabilities& x, int32_t query) {
  return x.values + (static_cast<int64_t>(query) * gridDim.x + blockIdx.x) * x.stride;
}

template <class Formats, int32_t kSide>
__device__ void find_side(const DeviceState& d, const DeviceProbabilities& x,
                          const DeviceRow& at_row, const RowQueries& queries) {
  const PageLayout layout = Formats::layout(d.s, kSide);
  const int32_t row = at_row.row, query = static_cast<int32_t>(blockIdx.z);
  const int32_t newest = d.s.infos[at_row.sequence].num_tokens - x.q_len + query;  // that it sees
  float* line = line_of(x, query);
  const int32_t warps = kWarps * kProbabilityCtas;
  const int32_t warp =
      static_cast<int32_t>(blockIdx.y) * kWarps + static_cast<int32_t>(threadIdx.x) / 32;
  for (int32_t i = warp; i < d.s.allocator.tokens[row].of[kSide]; i += warps) {
    const DeviceSlot at = device_slot(d, row, kSide, i, layout);
    const PageRef page = page_ref(d, layout, at);
    const int32_t position = position_at(d.s, kSide, {page.bytes, at.slot});
    if (position > newest) continue;
    const float p = token_probability(queries, x.group, page, at.slot);
    if (lane_index() == 0) line[position] = p;
  }
}

__global__ void __launch_bounds__(kThreads)
    clear_probabilities_kernel(const __grid_constant__ DeviceState d,
                               const __grid_constant__ DeviceProbabilities x) {
  const DeviceRow r = cta_row(d, x.layer);
  if (r.sequence == kPaddingSequence) return;
  float* line = line_of(x, static_cast<int32_t>(blockIdx.y));
  for (int32_t p = threadIdx.x; p < d.s.infos[r.sequence].num_tokens; p += kThreads) line[p] = 0;
}

template <class Formats>
__global__ void __launch_bounds__(kThreads)
    probabilities_kernel(const __grid_constant__ DeviceState d,
                         const __grid_constant__ DeviceProbabilities x) {
  __shared__ RowQueries queries;
  const DeviceRow r = cta_row(d, x.layer);
  if (r.sequence == kPaddingSequence || has_failed(d)) return;
  load_queries(x, d.s, &queries);
  __syncthreads();
  find_side<Formats, kHighSide>(d, x, r, queries);
  find_side<Formats, kLowSide>(d, x, r, queries);
  find_side<Formats, kWindowSide>(d, x, r, queries);
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
  if (p.group > kMaxProbabilityHeads) {
    return Status(StatusCode::kUnsupported, "probabilities of more than 16 q heads per kv_head");
  }
  const auto queries = static_cast<uint32_t>(p.q_len);
  const dim3 ctas(rows, kProbabilityCtas, queries);
  clear_probabilities_kernel<<<dim3(rows, queries), kThreads, 0, stream>>>(d, p);
  if (DefaultFormats::fit(d.s)) {
    probabilities_kernel<DefaultFormats><<<ctas, kThreads, 0, stream>>>(d, p);
  } else {
    probabilities_kernel<AnyFormats><<<ctas, kThreads, 0, stream>>>(d, p);
  }
  return launch_status("attend");
}

}  // namespace tierkv
