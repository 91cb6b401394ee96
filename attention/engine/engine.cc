// SPDX-License-Identifier: Apache-2.0
#include "attention/engine/engine.h"

#include <algorithm>
#include <string>

#include "codec/format/element.h"
#include "codec/format/errors.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxBlockTokens = 1024;

Result<PageShape> shape_of(const EngineConfig& c) {
  Result<PageShape> shape = page_shape(c.format, c.head_dim);
  if (!shape) return shape;
  if (shape->k_groups > 1 || shape->v_groups > 1 || c.format.k.basis != BasisKind::kNone ||
      c.format.v.basis != BasisKind::kNone) {
    return unsupported("format: blocks of an engine have no sub-groups and no basis");
  }
  shape->tokens = c.block_tokens;
  shape->records = false;
  return shape;
}

EngineStrides strides_of(EngineStrides given, int32_t heads, int32_t width) {
  if (given.token != 0 || given.head != 0) return given;
  return {int64_t{heads} * width, width};
}

bool has_raw(const TierFormat& f) {
  return f.k.is_raw() || f.v.is_raw();
}

Status validate_batch_sizes(const EngineConfig& c) {
  if (c.block_tokens < kTileTokens || c.block_tokens > kMaxBlockTokens ||
      c.block_tokens % kTileTokens != 0) {
    return unsupported("block_tokens " + std::to_string(c.block_tokens) +
                       "; blocks need a multiple of 16 tokens, at most 1024");
  }
  if (c.max_sequences < 1 || c.max_sequences > kMaxSequences) {
    return invalid("max_sequences must be 1 to 1048576");
  }
  if (c.max_queries < 1 || c.max_queries > kMaxQueryTokens) {
    return unsupported("max_queries " + std::to_string(c.max_queries) +
                       "; attention needs 1 to 8 queries of a sequence");
  }
  if (c.max_blocks < 1 || c.max_blocks > kMaxTableSlots) {
    return invalid("max_blocks must be 1 to 65536");
  }
  if (int64_t{c.max_sequences} * c.max_queries * c.num_q_heads > INT32_MAX / 256 ||
      int64_t{c.max_sequences} * c.num_kv_heads > INT32_MAX / (c.max_blocks + 3)) {
    return invalid("max_sequences has too many rows with this max_blocks");
  }
  return Status::ok();
}

}  // namespace

Status EngineConfig::validate() const {
  const Result<PageShape> shape = shape_of(*this);
  if (!shape) return shape.status();
  if (page_tile_bytes(*shape) > kMaxPageBytes / std::max(1, block_tokens / kTileTokens)) {
    return invalid("block_tokens makes a page above 1 MiB");
  }
  if (!is_raw_dtype(dtype)) {
    return unsupported(std::string("dtype ") + dtype_name(dtype) +
                       "; an engine's cache needs float16 or bfloat16");
  }
  if (num_kv_heads < 1 || num_q_heads < 1)
    return invalid("num_q_heads and num_kv_heads must be positive");
  if (Status s = validate_batch_sizes(*this); !s) return s;
  AttentionConfig attention = attention_config(*this, max_queries);
  return attention.validate();
}

int64_t EngineConfig::page_bytes() const {
  const Result<PageShape> shape = shape_of(*this);
  if (!shape || block_tokens < kTileTokens || block_tokens % kTileTokens != 0 ||
      block_tokens > kMaxBlockTokens) {
    return 0;
  }
  const int64_t bytes = int64_t{block_tokens / kTileTokens} * page_tile_bytes(*shape);
  return (bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
}

AttentionConfig attention_config(const EngineConfig& config, int32_t queries) {
  AttentionConfig a;
  a.num_q_heads = config.num_q_heads;
  a.num_kv_heads = config.num_kv_heads;
  a.head_dim = config.head_dim;
  a.q_len = queries;
  // Coordinates are fp16, as the codes' parameters are; raw pages are of the engine's type.
  a.dtype = has_raw(config.format) ? config.dtype : DType::kFloat16;
  a.sm_scale = config.sm_scale;
  a.page_bytes = config.page_bytes();
  a.page_records = false;
  a.num_tiers = 1;
  a.tiers[0] = {0, config.format};
  a.sliding_window_tokens = config.sliding_window_tokens;
  return a;
}

Result<BlockCache> block_cache(const EngineConfig& config, const EngineLayer& layer) {
  if (Status s = config.validate(); !s) return s;
  BlockCache c;
  c.base = static_cast<uint8_t*>(layer.blocks);
  c.block_stride = layer.block_stride == 0 ? config.block_bytes() : layer.block_stride;
  c.num_blocks = layer.num_blocks;
  c.num_kv_heads = config.num_kv_heads;
  c.page_bytes = static_cast<int32_t>(config.page_bytes());
  c.layout = page_layout(*shape_of(config));
  c.rule[0] = config.format.k.step_rule;
  c.rule[1] = config.format.v.step_rule;
  c.raw_dtype = config.dtype;
  if (config.rotate) c.rotation = hadamard_rotation(config.head_dim);
  c.key_reflection = layer.key_reflection;
  if (c.block_stride % c.page_bytes != 0) {
    return invalid("block_stride is not a multiple of page_bytes()");
  }
  if (Status s = c.validate(); !s) return s;
  return c;
}

Status engine_key_reflections(const EngineConfig& config, const float* key_mean, float* out) {
  if (Status s = config.validate(); !s) return s;
  if (key_mean == nullptr || out == nullptr) return invalid("key_mean or out is null");
  const Rotation rotation = config.rotate ? hadamard_rotation(config.head_dim) : Rotation{};
  return key_reflections(rotation, key_mean, config.num_kv_heads, config.head_dim, out);
}

Result<SlotEncode> slot_encode(const EngineConfig& config, const EngineLayer& layer,
                               const EngineTokens& tokens) {
  const Result<BlockCache> cache = block_cache(config, layer);
  if (!cache) return cache.status();
  SlotEncode e = {tokens, *cache, config.dtype};
  e.k_strides = strides_of(tokens.k_strides, config.num_kv_heads, config.head_dim);
  e.v_strides = strides_of(tokens.v_strides, config.num_kv_heads, config.head_dim);
  return e;
}

Result<BlockDecode> block_decode(const EngineConfig& config, const EngineLayer& layer,
                                 const EngineRanges& ranges) {
  const Result<BlockCache> cache = block_cache(config, layer);
  if (!cache) return cache.status();
  return BlockDecode{ranges, *cache, config.dtype};
}

Status engine_encode_host(const EngineConfig& config, const EngineLayer& layer,
                          const EngineTokens& tokens) {
  const Result<SlotEncode> e = slot_encode(config, layer, tokens);
  return e ? encode_slots_host(*e) : e.status();
}

Status engine_decode_host(const EngineConfig& config, const EngineLayer& layer,
                          const EngineRanges& ranges) {
  const Result<BlockDecode> d = block_decode(config, layer, ranges);
  return d ? decode_blocks_host(*d) : d.status();
}

EngineWorkspace engine_workspace(const EngineConfig& config, const EngineGrid& grid) {
  EngineWorkspace w{};
  WorkspaceCarving carving;
  size_t attention = 0;  // fewer queries may have wider rows
  for (int32_t queries = 1; queries <= config.max_queries; ++queries) {
    attention =
        std::max(attention, attention_workspace_bytes(attention_config(config, queries),
                                                      grid.of[queries - 1], config.max_sequences));
  }
  const auto rows = static_cast<size_t>(config.max_sequences) * config.num_kv_heads;
  const size_t vectors =
      static_cast<size_t>(config.max_sequences) * config.max_queries * config.num_q_heads;
  w.attention = carving.take(attention);
  w.tokens = carving.take(rows * sizeof(SideCounts));
  w.slots = carving.take(rows * table_shape(config, {}).row_stride() * sizeof(int32_t));
  w.q = carving.take(vectors * config.head_dim * sizeof(uint16_t));
  w.out = carving.take(vectors * config.head_dim * sizeof(uint16_t));
  w.lse = carving.take(vectors * sizeof(float));
  w.bytes = carving.bytes;
  return w;
}

size_t engine_workspace_bytes(const EngineConfig& config, const EngineGrid& grid) {
  return engine_workspace(config, grid).bytes;
}

PageTableShape table_shape(const EngineConfig& config, const EngineBatch& batch) {
  PageTableShape shape;
  shape.num_sequences = batch.count;
  shape.rows_per_sequence = config.num_kv_heads;
  shape.num_sides = 1;
  shape.table_slots[0] = config.max_blocks;
  shape.tokens_per_page[0] = config.block_tokens;
  return shape;
}

PageView page_view(const EngineConfig& config, const EngineLayer& layer) {
  const int64_t pages =
      (layer.block_stride == 0 ? config.block_bytes() : layer.block_stride) / config.page_bytes();
  return {static_cast<uint8_t*>(layer.blocks), config.page_bytes(),
          static_cast<int32_t>((layer.num_blocks - 1) * pages + config.num_kv_heads)};
}

Result<BlockRows> block_rows(const EngineConfig& config, const EngineBatch& batch) {
  if (Status s = config.validate(); !s) return s;
  if (batch.count < 1 || batch.count > config.max_sequences) {
    return invalid("count of sequences must be 1 to max_sequences");
  }
  if (batch.queries < 1 || batch.queries > config.max_queries) {
    return invalid("queries must be 1 to max_queries");
  }
  if (batch.block_table == nullptr || batch.seq_lens == nullptr) {
    return invalid("block_table or seq_lens is null");
  }
  if (batch.num_sequences < 1 || batch.table_columns < 1 ||
      (batch.table_stride != 0 && batch.table_stride < batch.table_columns)) {
    return invalid("the block table has no sequences, no columns or a stride below its columns");
  }
  if (batch.sequences == nullptr && batch.count > batch.num_sequences) {
    return invalid("the batch is longer than the block table and names no sequences");
  }
  const int64_t stride = batch.block_stride == 0 ? config.block_bytes() : batch.block_stride;
  if (stride < config.block_bytes() || stride % config.page_bytes() != 0) {
    return invalid("block_stride is below a block or no multiple of its pages");
  }
  const int64_t pages = stride / config.page_bytes();
  if (batch.num_blocks < 1 || batch.num_blocks > INT32_MAX / pages) {
    return invalid("num_blocks is not positive or makes more than 2^31 - 1 pages");
  }
  BlockRows rows;
  rows.batch = batch;
  if (batch.table_stride == 0) rows.batch.table_stride = batch.table_columns;
  rows.num_kv_heads = config.num_kv_heads;
  rows.block_tokens = config.block_tokens;
  rows.block_pages = static_cast<int32_t>(pages);
  rows.max_blocks = config.max_blocks;
  rows.row_stride = table_shape(config, batch).row_stride();
  return rows;
}

Result<EngineQueries> engine_queries(const EngineConfig& config, const EngineAttend& call) {
  const Result<BlockRows> rows = block_rows(config, call.batch);
  if (!rows) return rows.status();
  const Result<BlockCache> cache = block_cache(config, call.layer);
  if (!cache) return cache.status();
  if (cache->block_stride != rows->block_pages * config.page_bytes() ||
      call.layer.num_blocks != call.batch.num_blocks) {
    return invalid("the layer's blocks are not those of the batch");
  }
  if (call.q == nullptr || call.out == nullptr) return invalid("q or out is null");
  if (call.num_tokens < 1) return invalid("num_tokens must be positive");
  EngineQueries q;
  q.rotation = q.out_rotation = cache->rotation;
  q.key_reflection = cache->key_reflection;
  q.rows = *rows;
  q.num_q_heads = config.num_q_heads;
  q.head_dim = config.head_dim;
  q.num_tokens = call.num_tokens;
  q.dtype = config.dtype;
  q.packed_dtype = attention_config(config, 1).dtype;
  q.q = call.q;
  q.out = call.out;
  q.lse = call.lse;
  q.q_strides = strides_of(call.q_strides, config.num_q_heads, config.head_dim);
  q.out_strides = strides_of(call.out_strides, config.num_q_heads, config.head_dim);
  q.lse_strides = strides_of(call.lse_strides, config.num_q_heads, 1);
  q.errors = call.errors;
  return q;
}

}  // namespace tierkv
