// The first kernel of a step: eight lanes plan a row, and what the rows take is added up.
//
// A row's plan is a chain of reads: where its tokens lie, which pages it has, the candidate's
// score, the pages' minima. Four rows in a warp and the visits of a lane in flight together make it
// one wave of the device, the length of that chain.

#include <algorithm>

#include "allocator/page_step.cuh"
#include "store/tiers/device_step.cuh"

namespace tierkv {
namespace {

constexpr int32_t kThreads = 128;
constexpr int32_t kRowLanes = 8;
static_assert(kPlanRows == kThreads / kRowLanes);

// Entries first .. of the batch.
struct StepRange {
  int32_t first;
  int32_t tokens;
};

struct LaneTeam {
  __device__ static int32_t rank() { return lane_index() % kRowLanes; }
  __device__ static int32_t size() { return kRowLanes; }
  __device__ static int32_t most(int32_t mine) { return __reduce_max_sync(kFullWarp, mine); }
  __device__ static RankedToken best(const RankedToken& mine) {
    return best_of_lanes<kRowLanes>(mine);
  }
};

__device__ PlacedToken placed(const PlannedRow& r, int32_t side, int32_t index) {
  const int32_t page = index / r.page_tokens.at(side);
  const bool is_held = page < (side == kHighSide  ? r.pages.of[kHighSide]
                               : side == kLowSide ? r.pages.of[kLowSide]
                                                  : r.pages.of[kWindowSide]);
  return {is_held ? r.s.page_id(r.row, side, page) : kNoPage, index};
}

__device__ PlannedMove no_move() {
  PlannedMove move = {};
  move.side = kNoSide;
  move.victim_position = kNoPosition;
  return move;
}
__device__ PlannedMove planned_move(const PlannedRow& r, const PlannedRound& round) {
  const StepAction& action = round.action;
  PlannedMove move = no_move();
  if (action.tier == Tier::kPruned) return move;
  move.side = side_of(action.tier);
  move.from = placed(r, kWindowSide, round.candidate.index);
  move.to = placed(r, move.side, action.slot);
  move.score = round.candidate.score;
  move.position = round.candidate.position;
  if (action.victim_position == kNoPosition) return move;
  move.victim_score = round.victim.score;
  move.victim_position = round.victim.position;
  move.demotes = action.tier == Tier::kHigh && action.victim_tier == Tier::kLow;
  if (move.demotes) move.down = placed(r, kLowSide, action.victim_slot);
  return move;
}

// The row's moves; what its sides gain. A step of more rounds than leave tokens ends in rounds
// without a move.
template <class Overlay>
__device__ RowGrowth plan_row_moves(const DeviceState& d, const PlannedRow& planned,
                                    const SequenceInfo& info, const StepRange& step,
                                    PlannedMove* moves) {
  const LaneTeam team;
  const SideCounts added = plan_row_step<Overlay>(
      planned, info, step.tokens, team, [&](int32_t i, const PlannedRound& round) {
        const PlannedMove move = planned_move(planned, round);
        if (team.rank() == 0) store_words(moves + i, move);
      });
  if (team.rank() == 0) {
#pragma unroll 1
    for (int32_t i = leaving_tokens(d.s.policy, info, step.tokens).count(); i < step.tokens; ++i) {
      store_words(moves + i, no_move());
    }
  }
  return {planned.row, planned.tokens, planned.pages, added};
}

// All that can be asked for at once is, before anything is waited for.
template <class Formats, class Overlay>
__global__ void __launch_bounds__(kThreads, 8)
    plan_step_kernel(const __grid_constant__ DeviceState d, const __grid_constant__ OpLaunch x,
                     const __grid_constant__ IdChunk ids, const StepRange step) {
  let_next_stage_start();
  const int32_t rows = d.s.rows_per_sequence();
  const int32_t entry = step.first + static_cast<int32_t>(blockIdx.y);
  const int32_t own =
      static_cast<int32_t>(blockIdx.x) * kPlanRows + static_cast<int32_t>(threadIdx.x) / kRowLanes;
  const int32_t within = min(own, rows - 1);  // beyond the last row: with it, writing the same
  const int32_t sequence = ids.slots[blockIdx.y];
  const BatchRow r = {entry * rows + within, entry, within, sequence, sequence * rows + within};
  const SequenceInfo info = load_words(d.s.infos + sequence);
  const auto failure =
      static_cast<StatusCode>(load_now(reinterpret_cast<const int32_t*>(&d.failure->status)));
  const auto state = static_cast<SequenceState>(
      load_now(reinterpret_cast<const int32_t*>(&x.a.sequences[sequence].state)));
  const PlannedRow planned = planned_row(d.s, page_tokens_of<Formats>(d.s), r.row, LaneTeam());
  RowPlan plan;
  if (step.tokens > d.max_tokens - info.num_tokens || failure != StatusCode::kOk) {
    fault_step(d.totals, r.batch_row, StatusCode::kOutOfRange);  // the row may be in any state
  } else {
    PlannedMove* moves = d.moves + static_cast<int64_t>(r.batch_row) * kMaxStepTokens;
    plan = survey_growth(x, d.totals, r, plan_row_moves<Overlay>(d, planned, info, step, moves),
                         state);
  }
  const bool leads = LaneTeam::rank() == 0 && own < rows;
  if (leads && within == 0) {
    enter_sequence(x, d.totals, r);
    d.batch[entry] = sequence;
    d.before[entry] = info;  // apply_step() moves it on while its rows still need what it was
  }
  const int32_t first_page = deal_pages<kThreads>(x, step_deal(d), step_group(d.s, entry, within),
                                                  leads ? plan.fresh_total : 0);
  if (leads) {
    store_words(d.growth + r.batch_row,
                PlannedGrowth{plan.tokens, r.row, first_page, fresh_sides(plan), 0});
  }
}

template <class Formats, class Overlay>
void launch_plan(const DeviceState& d, const StepCall& call, GpuStream stream) {
  const OpLaunch x = step_launch(d, call);
  for (int32_t first = 0; first < call.count; first += kIdChunk) {
    IdChunk ids = {};
    const int32_t here = std::min(kIdChunk, call.count - first);
    std::copy_n(call.slots + first, here, ids.slots);
    const dim3 ctas(static_cast<uint32_t>(step_groups(d.s)), static_cast<uint32_t>(here));
    plan_step_kernel<Formats, Overlay>
        <<<ctas, kThreads, 0, stream>>>(d, x, ids, StepRange{first, call.tokens});
  }
}

}  // namespace

int32_t step_groups(const StoreView& s) {
  return step_groups_of(s);
}

OpLaunch step_launch(const DeviceState& d, const StepCall& call) {
  OpLaunch x;
  x.a = d.s.allocator;
  x.op = PageOp::append({d.batch, call.count}, nullptr, d.report);
  return x;
}

size_t step_totals_bytes() {
  return sizeof(StepTotals);
}
Status clear_totals(const DeviceState& d, GpuStream stream) {
  return cuda_status(
      cudaMemcpyAsync(d.totals, &kNoTotals, sizeof(kNoTotals), cudaMemcpyHostToDevice, stream),
      "create");
}

Status plan_step(const DeviceState& d, const StepCall& call, GpuStream stream) {
  if (call.tokens > 1) {
    launch_plan<AnyFormats, StepOverlay>(d, call, stream);
  } else if (DefaultFormats::fit(d.s)) {
    launch_plan<DefaultFormats, NoOverlay>(d, call, stream);
  } else {
    launch_plan<AnyFormats, NoOverlay>(d, call, stream);
  }
  return launch_status("begin_step");
}

}  // namespace tierkv
