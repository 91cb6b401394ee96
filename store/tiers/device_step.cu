// The second kernel of a step: a warp per row takes the pages of its plan and carries it out. Rows
// differ in their work, so each is a CTA of its own.

#include "store/tiers/device_step.cuh"

namespace tierkv {
namespace {

// Orders floats as unsigned numbers; -0 is equal to +0.
__device__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(__fadd_rn(x, 0.0f));
  return bits ^ (static_cast<int32_t>(bits) < 0 ? ~0u : 1u << 31);
}
constexpr uint32_t kNoOrder = ~0u;

// The lane's part in the search of a page with `used` tokens for its victim but for the one in slot
// `but`. Scores are compared, positions are asked for where they may count; find_least() waits for
// them. Indices are slots.
__device__ __forceinline__ RankedToken ask_least(const uint8_t* page, const PageLayout& layout,
                                                 int32_t used, int32_t but) {
  const auto* scores = reinterpret_cast<const float*>(page + layout.scores);
  const auto* positions = reinterpret_cast<const int32_t*>(page + layout.positions);
  uint32_t least = kNoOrder;
#pragma unroll
  for (int32_t base = 0; base < layout.tokens; base += 32) {
    const int32_t slot = base + lane_index();
    if (slot < used && slot != but) least = min(least, ordered(scores[slot]));
  }
  least = __reduce_min_sync(kFullWarp, least);
  RankedToken mine = {0.0f, INT32_MAX, kNoSlot};
#pragma unroll
  for (int32_t base = 0; base < layout.tokens; base += 32) {
    const int32_t slot = base + lane_index();
    if (slot >= used || slot == but || ordered(scores[slot]) != least) continue;
    if (mine.index != kNoSlot && positions[mine.index] < positions[slot]) continue;
    mine.score = scores[slot];
    mine.index = slot;
  }
  if (mine.index != kNoSlot) mine.position = positions[mine.index];
  return mine;
}
__device__ __forceinline__ RankedToken find_least(const RankedToken& mine) {
  const int32_t first = __reduce_min_sync(kFullWarp, mine.position);
  const uint32_t owner = __ballot_sync(kFullWarp, mine.index != kNoSlot && mine.position == first);
  if (owner == 0) return no_token();
  const int32_t lane = __ffs(static_cast<int32_t>(owner)) - 1;
  return {__shfl_sync(kFullWarp, mine.score, lane), first,
          __shfl_sync(kFullWarp, mine.index, lane)};
}

__device__ RankedToken recorded_least(const DeviceState& d, int32_t page) {
  const PageRecord record = load_record(d.s.allocator, page);
  return {record.min_score, record.min_position, record.min_slot};
}

// A token's page and slot, the page that the step took in place of kNoPage.
__device__ DeviceSlot slot_of(const PlacedToken& token, int32_t new_page,
                              const PageLayout& layout) {
  const uint32_t slot = static_cast<uint32_t>(token.index) % static_cast<uint32_t>(layout.tokens);
  return {token.page == kNoPage ? new_page : token.page, static_cast<int32_t>(slot)};
}

__device__ __forceinline__ void load_codes(const PageRef& page, int32_t slot, LaneToken* token) {
  load_side(page, slot, Component::kKey, &token->k);
  load_side(page, slot, Component::kValue, &token->v);
}
__device__ __forceinline__ void convert_token(const PageRef& from, const PageRef& to,
                                              LaneToken* token) {
  convert_side(from, to, Component::kKey, &token->k);
  convert_side(from, to, Component::kValue, &token->v);
}

// One number for each of the two tiers of a row. (Never indexed: it stays in registers.)
struct TierPair {
  int32_t high, low;
  __device__ int32_t of(int32_t side) const { return side == kHighSide ? high : low; }
};
// A row in the step.
struct StepRow {
  TierPair tokens;     // after it
  TierPair new_pages;  // kNoPage: none
};

// A candidate enters `kSide`, where a victim may leave it for the low tier. Everything is asked for
// before anything is waited for: both tokens, and what the pages' minima will follow from.
template <class Formats, int32_t kSide>
__device__ __forceinline__ void enter(const DeviceState& d, const StepRow& r,
                                      const PlannedMove& move) {
  const PageLayout window = Formats::layout(d.s, kWindowSide), layout = Formats::layout(d.s, kSide);
  const PageLayout low = Formats::layout(d.s, kLowSide);
  const bool has_victim = move.victim_position != kNoPosition;
  const bool demotes = kSide == kHighSide && move.demotes;
  const DeviceSlot from = slot_of(move.from, kNoPage, window);
  const DeviceSlot to = slot_of(move.to, r.new_pages.of(kSide), layout);
  DeviceSlot down = {0, 0};
  if (demotes) down = slot_of(move.down, r.new_pages.low, low);
  const PageRef from_page = page_ref(d, window, from), to_page = page_ref(d, layout, to);
  const PageRef down_page = page_ref(d, low, down);

  LaneToken candidate, victim;
  RankedToken least = no_token(), least_down = no_token();
  load_codes(from_page, from.slot, &candidate);
  if (demotes) load_codes(to_page, to.slot, &victim);
  if (demotes) least_down = recorded_least(d, down.page);
  if (has_victim) {
    const int32_t used = r.tokens.of(kSide) - (move.to.index - to.slot);
    least = ask_least(to_page.bytes, layout, min(used, layout.tokens), to.slot);
  } else {
    least = recorded_least(d, to.page);
  }

  if (demotes) {
    convert_token(to_page, down_page, &victim);
    victim.score = move.victim_score;
    victim.position = move.victim_position;
    open_token_slot(down_page, down.slot);
    store_lane_token(down_page, down.slot, victim);
    write_minimum(d, down.page,
                  better_victim(least_down, {victim.score, victim.position, down.slot}));
  }
  convert_token(from_page, to_page, &candidate);
  candidate.score = move.score;
  candidate.position = move.position;
  if (!has_victim) open_token_slot(to_page, to.slot);
  store_lane_token(to_page, to.slot, candidate);
  if (has_victim) least = find_least(least);
  write_minimum(d, to.page, better_victim(least, {move.score, move.position, to.slot}));
}

__device__ void rescan(const DeviceState& d, const StepRow& r, int32_t side,
                       const PlacedToken& token) {
  const int32_t page = token.index / d.s.page_tokens(side);
  rescan_device_page(d, side, token.page == kNoPage ? r.new_pages.of(side) : token.page,
                     d.s.page_used(side, page, r.tokens.of(side)));
}

template <class Formats>
__device__ __forceinline__ void apply_move(const DeviceState& d, const StepRow& r,
                                           const PlannedMove& move) {
  if (move.side == kHighSide) enter<Formats, kHighSide>(d, r, move);
  if (move.side == kLowSide) enter<Formats, kLowSide>(d, r, move);
}

// A step of several rounds.
template <class Formats>
__device__ void apply_moves(const DeviceState& d, const StepRow& r, const PlannedMove* moves,
                            int32_t tokens) {
  for (int32_t i = 0; i < tokens; ++i) apply_move<Formats>(d, r, load_words(moves + i));
  // While the rounds went on, pages had slots whose tokens were yet to come.
  for (int32_t i = 0; i < tokens; ++i) {
    const PlannedMove move = load_words(moves + i);
    if (move.side == kNoSide) continue;
    rescan(d, r, move.side, move.to);
    if (move.demotes) rescan(d, r, kLowSide, move.down);
  }
}

template <class Formats, bool kOneRound>
__global__ void __launch_bounds__(32, Formats::kMinWarps)
    apply_step_kernel(const __grid_constant__ DeviceState d, const __grid_constant__ OpLaunch x,
                      int32_t tokens) {
  const auto within = static_cast<int32_t>(blockIdx.x), entry = static_cast<int32_t>(blockIdx.y);
  const int32_t i = entry * d.s.rows_per_sequence() + within;
  const PlannedMove* moves = d.moves + static_cast<int64_t>(i) * kMaxStepTokens;
  wait_for_stage();
  const StepTotals totals = load_words(d.totals);
  const PlannedGrowth growth = load_words(d.growth + i);
  const PlannedMove first = load_words(moves);
  const OpReport report = decide_step(totals);
  if (i + lane_index() == 0) finish_step(x, d.totals, report);
  if (report.status != StatusCode::kOk) {
    if (i + lane_index() == 0) {
      report_failure(d, {report.status, DeviceCall::kBeginStep, -1, -1});
    }
    return;
  }
  const NewPages fresh = take_pages(x, step_deal(d), step_group(d.s, entry, within), growth);
  const StepRow row = {{growth.tokens.of[kHighSide], growth.tokens.of[kLowSide]},
                       {fresh.of[kHighSide], fresh.of[kLowSide]}};
  if constexpr (kOneRound) {
    apply_move<Formats>(d, row, first);
  } else {
    apply_moves<Formats>(d, row, moves, tokens);
  }
  if (within == 0 && lane_index() == 0) {
    d.s.infos[d.batch[entry]] = info_after_step(d.s.policy, d.before[entry], tokens);
  }
}

template <class Formats, bool kOneRound>
Status launch_apply(const DeviceState& d, const StepCall& call, GpuStream stream) {
  OpLaunch x = step_launch(d, call);
  cudaError_t error = overlapping_launches(&x.overlaps);
  if (error != cudaSuccess) return cuda_status(error, "begin_step");
  cudaLaunchAttribute overlap{};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim =
      dim3(static_cast<uint32_t>(d.s.rows_per_sequence()), static_cast<uint32_t>(call.count));
  config.blockDim = 32;
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = x.overlaps ? 1 : 0;
  error = cudaLaunchKernelEx(&config, apply_step_kernel<Formats, kOneRound>, d, x, call.tokens);
  return cuda_status(error, "begin_step");
}

}  // namespace

Status apply_step(const DeviceState& d, const StepCall& call, GpuStream stream) {
  if (call.tokens > 1) return launch_apply<AnyFormats, false>(d, call, stream);
  return DefaultFormats::fit(d.s) ? launch_apply<DefaultFormats, true>(d, call, stream)
                                  : launch_apply<AnyFormats, true>(d, call, stream);
}

}  // namespace tierkv
