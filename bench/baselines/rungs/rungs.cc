// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/rungs/rungs.h"

#include <algorithm>
#include <string>

#include "attention/core/workspace.h"
#include "bench/baselines/rungs/diffkv_layout.h"
#include "bench/baselines/rungs/rung_kernel.h"
#include "bench/baselines/rungs/rung_params.h"

namespace tierkv {
namespace {

size_t rounded(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}
Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

PageLayout layout_of(const AttentionConfig& config, int32_t tier) {
  return *tier_layout(config, tier);
}

bool has_rung_format(const PageLayout& page) {
  const int32_t format = pair_format(page.k_tile.type, page.v_tile.type);
  return format == pair_format(kRawCodes, kRawCodes) || format == pair_format(kCodes8, kCodes4) ||
         format == pair_format(kCodes4, kCodes4) || format == pair_format(kCodes4, kCodes2);
}

}  // namespace

const char* rung_name(Rung rung) {
  switch (rung) {
    case Rung::kDiffkv:
      return "diffkv";
    case Rung::kQueryAsA:
      return "query_as_a";
    case Rung::kKvAsA:
      return "kv_as_a";
    case Rung::kSyncLoads:
      return "sync_loads";
    case Rung::kCtaRounds:
      return "cta_rounds";
    case Rung::kSecondMerge:
      return "second_merge";
    case Rung::kFixedSplit:
      return "fixed_split";
  }
  return "unknown";
}

int32_t choose_splits(int32_t rows, int32_t row_ctas, int32_t resident_ctas) {
  constexpr double kEnough = 0.96;  // of the best
  const auto fill = [&](int32_t splits) {
    const double waves = static_cast<double>(rows) * row_ctas * splits / resident_ctas;
    return waves /
           static_cast<double>(static_cast<int64_t>(waves) + (waves > static_cast<int64_t>(waves)));
  };
  double best = 0;
  for (int32_t s = 1; s <= kRungMaxSplits; ++s) best = std::max(best, fill(s));
  int32_t splits = 1;
  while (fill(splits) < kEnough * best) ++splits;
  return splits;
}

RungWorkspace rung_workspace(const AttentionConfig& config, const RungGrid& grid, int32_t count) {
  const size_t heads = static_cast<size_t>(count) * config.num_q_heads;
  RungWorkspace w;
  w.states = rounded(heads * 4);
  w.parts = w.states + rounded(heads * grid.splits * sizeof(SoftmaxState));
  w.bytes = w.parts + heads * grid.splits * kRungHeadDim * 4;
  return w;
}

size_t rung_workspace_bytes(const AttentionConfig& config, const RungGrid& grid, int32_t count) {
  return rung_workspace(config, grid, count).bytes;
}

Status validate_rung_config(Rung rung, const AttentionConfig& config, int32_t count) {
  if (Status s = config.validate(); !s) return s;
  if (config.head_dim != kRungHeadDim) return unsupported("rungs have head_dim 128 only");
  if (config.group_size() > kRungMaxGroup) return unsupported("rungs have groups of up to 8");
  if (config.dtype != DType::kFloat16) return unsupported("rungs have fp16 only");
  if (config.q_len != 1) return unsupported("rungs have one query per sequence only");
  if (count < 1 || count > INT32_MAX / config.num_q_heads / kRungMaxSplits) {
    return invalid("count is out of range");
  }
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const Result<PageLayout> page = tier_layout(config, t);
    if (!page) return page.status();
    if (page->k_groups > 1 || page->v_groups > 1) return unsupported("rungs have no sub-groups");
    if (rung != Rung::kDiffkv) {
      if (!has_rung_format(*page)) return unsupported("rungs have raw, K8V4, K4V4 and K4V2 tiers");
      continue;
    }
    if (!has_diffkv_layout(*page)) {
      return unsupported("DiffKV's layout has no keys of 2 bits and no pages of over 512 tokens");
    }
  }
  return Status::ok();
}

Status validate_rung_call(const AttentionConfig& config, const RungGrid& grid,
                          const AttendCall& call, const AttentionWorkspace& workspace) {
  if (Status s = call.pages.validate(); !s) return s;
  if (call.pages.page_bytes != config.page_bytes) return invalid("page_bytes differ");
  if (call.layer < 0 || call.layer >= config.num_layers) return invalid("layer is out of range");
  if (call.table.slots == nullptr || call.table.tokens == nullptr) return invalid("table is null");
  if (call.q == nullptr || call.out == nullptr) return invalid("q or out is null");
  if (call.sinks != nullptr) return unsupported("sinks");
  if (grid.device_shared_bytes < 1) return invalid("grid is not one of rung_grid()");
  if (grid.splits < 1 || grid.splits > kRungMaxSplits) return invalid("splits is out of range");
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const int32_t side = config.tiers[t].side;
    if (side >= call.table.shape.num_sides ||
        call.table.shape.tokens_per_page[side] != layout_of(config, t).tokens) {
      return invalid("a tier's pages are not those of the table");
    }
  }
  const size_t bytes = rung_workspace_bytes(config, grid, call.batch.count);
  if (workspace.memory == nullptr || workspace.bytes < bytes) {
    return invalid("the workspace is too small");
  }
  return Status::ok();
}

RungShape rung_shape(const AttentionConfig& config, int32_t device_shared_bytes) {
  RungShape shape;
  shape.group = config.group_size();
  shape.device_shared_bytes = device_shared_bytes;
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const PageLayout page = layout_of(config, t);
    shape.tile_bytes = std::max(shape.tile_bytes, tile_read_bytes(page));
    shape.page_bytes = std::max(shape.page_bytes, page.scores);
  }
  return shape;
}

RungParams rung_params(const AttentionConfig& config, const RungGrid& grid, const AttendCall& call,
                       void* memory, const RungKernel& kernel) {
  RungParams p;
  p.slot_bytes = kernel.slot_bytes;
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const SideView side = call.table.side(config.tiers[t].side);
    p.rows.tiers[t] = tier_source(layout_of(config, t), side, p.slot_bytes);
    p.rows.tiers[t].chunk_tiles = smaller(kernel.chunk_tiles, p.rows.tiers[t].chunk_tiles);
    p.rows.row_stride = static_cast<int32_t>(side.row_stride);
    p.rows.token_stride = static_cast<int32_t>(side.token_stride);
  }
  p.rows.sequences = call.batch.sequences;
  p.rows.num_rows = call.batch.count * config.num_kv_heads;
  p.rows.num_kv_heads = config.num_kv_heads;
  p.rows.num_tiers = config.num_tiers;
  p.rows.num_table_sequences = call.table.shape.num_sequences;
  p.rows.rows_per_sequence = call.table.shape.rows_per_sequence;
  p.layer = call.layer;
  p.pool = call.pages.base;
  p.page_bytes = call.pages.page_bytes;
  p.num_pages = call.pages.num_pages;
  p.group = config.group_size();
  p.q = call.q;
  p.out = call.out;
  p.lse = call.lse;
  p.scale_log2 = static_cast<float>(config.sm_scale * 1.4426950408889634);
  p.splits = grid.splits;
  const RungWorkspace at = rung_workspace(config, grid, call.batch.count);
  auto* bytes = static_cast<char*>(memory);
  p.arrivals = reinterpret_cast<int32_t*>(bytes);
  p.part_states = reinterpret_cast<SoftmaxState*>(bytes + at.states);
  p.parts = reinterpret_cast<float*>(bytes + at.parts);
  return p;
}

}  // namespace tierkv
