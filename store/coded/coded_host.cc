#include "store/coded/coded_host.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "store/coded/coded_fixed.h"
#include "store/coded/coded_values.h"
#include "store/tiers/host_store.h"

namespace tierkv {
namespace {

void* allocate_aligned(size_t alignment, size_t bytes) {
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

}  // namespace

Result<std::unique_ptr<CodedHostStore>> CodedHostStore::make(const KvStoreConfig& config) {
  const Result<CodedShape> shape = coded_shape(config);
  if (!shape) return shape.status();
  std::unique_ptr<CodedHostStore> store(new CodedHostStore(config));
  if (Status s = store->allocate(*shape); !s) return s;
  return store;
}

Status CodedHostStore::allocate(const CodedShape& shape) {
  const size_t pool_bytes = static_cast<size_t>(shape.page_bytes) * config_.num_pages;
  const size_t bytes = allocator_bytes(shape.allocator).total;
  pool_.reset(allocate_aligned(kPageAlignment, pool_bytes));
  allocator_memory_.reset(allocate_aligned(kAllocatorAlignment, bytes));
  if (pool_ == nullptr || allocator_memory_ == nullptr) {
    return Status(StatusCode::kOutOfMemory,
                  "no memory for a pool of " + std::to_string(pool_bytes + bytes) + " bytes");
  }
  const Result<PageAllocator> allocator =
      make_page_allocator(shape.allocator, allocator_memory_.get(), bytes);
  if (!allocator) return allocator.status();
  const auto num_rows = static_cast<size_t>(shape.allocator.table.num_rows());
  key_blocks_.resize(num_rows * shape.max_blocks);
  value_blocks_.resize(key_blocks_.size());
  key_means_.resize(num_rows * config_.layout.head_dim);
  value_means_.resize(key_means_.size());
  key_steps_.resize(num_rows);
  value_steps_.resize(num_rows);
  view_ = coded_view(config_, shape);
  view_.allocator = *allocator;
  view_.pages = {static_cast<uint8_t*>(pool_.get()), allocator->records, shape.page_bytes,
                 config_.num_pages};
  view_.infos = table_.infos();
  view_.keys = key_blocks_.data();
  view_.values = value_blocks_.data();
  view_.key_means = key_means_.data();
  view_.value_means = value_means_.data();
  view_.key_steps = key_steps_.data();
  view_.value_steps = value_steps_.data();
  books_ = CodedBooks::of_config(config_);
  return initialize_host(view_.allocator);
}

Result<SequenceId> CodedHostStore::add_sequence() {
  const Result<int32_t> slot = table_.free_slot();
  if (!slot) return slot.status();
  OpReport report;
  if (Status s = run_page_op(view_.allocator, PageOp::open({&*slot, 1}, &report)); !s) return s;
  return table_.claim(*slot, SequencePhase::kPrompt, SequenceInfo{});
}

Status CodedHostStore::release(SequenceId sequence) {
  const Result<int32_t> slot = table_.slot_of(sequence);
  if (!slot) return slot.status();
  OpReport report;
  if (Status s = run_page_op(view_.allocator, PageOp::release({&*slot, 1}, &report)); !s) return s;
  table_.release(*slot);
  return Status::ok();
}

// Past the prompt a value must have a code once its mean is off. In a prompt end_prompt() looks.
Status CodedHostStore::check_append(const AppendCall& call, const Slots& slots) const {
  const CacheLayout& layout = config_.layout;
  const int64_t stride = int64_t{layout.num_kv_heads} * layout.head_dim;
  const int64_t values = call.sequences.count * call.tokens * stride;
  if (Status s = check_values(call.k, layout.dtype, values); !s) return s.with_context("k");
  if (Status s = check_values(call.v, layout.dtype, values); !s) return s.with_context("v");
  if (table_.phase(slots.front()) == SequencePhase::kPrompt) return Status::ok();
  for (const Component c : {Component::kKey, Component::kValue}) {
    const void* x = c == Component::kKey ? call.k : call.v;
    for (int64_t i = 0; i < call.sequences.count * layout.num_kv_heads; ++i) {
      const int64_t entry = i / layout.num_kv_heads, head = i % layout.num_kv_heads;
      const int32_t at = view_.row_of(slots[entry], call.layer, static_cast<int32_t>(head));
      const CodedTokens tokens = {x,      entry * call.tokens * stride + head * layout.head_dim,
                                  stride, layout.dtype,
                                  0,      call.tokens};
      const std::vector<uint16_t> halves = half_values(tokens, layout.head_dim);
      for (size_t j = 0; j < halves.size(); ++j) {
        const uint16_t y = centred(halves[j], view_.means(c, at)[j % layout.head_dim]);
        if (check_centred(y, view_.step(c, at)) != StatusCode::kOk) {
          return Status(StatusCode::kOutOfRange, "a value without its mean, or its code")
              .with_context(c == Component::kKey ? "k" : "v");
        }
      }
    }
  }
  return Status::ok();
}

void CodedHostStore::append_row(int32_t row, const SequenceInfo& info, Component c,
                                const CodedTokens& tokens) {
  std::vector<uint16_t> values = half_values(tokens, view_.head_dim);
  const bool prompt = info.window_origin == kInPrompt;
  for (size_t i = 0; i < values.size() && !prompt; ++i) {
    values[i] = centred(values[i], view_.means(c, row)[i % view_.head_dim]);
  }
  for (int32_t t = 0; t < tokens.count; ++t) {
    const int32_t position = tokens.first_position + t;
    put_raw_token(view_, row, info, c, position, values.data() + int64_t{t} * view_.head_dim);
    if (prompt && view_.fixed.format.any()) set_raw_score(view_, row, info, position, 0.0f);
  }
}

Status CodedHostStore::append(const AppendCall& call) {
  const Result<Slots> slots = table_.admit_append(call);
  if (!slots) return slots.status();
  if (Status s = check_append(call, *slots); !s) return s;
  const CacheLayout& layout = config_.layout;
  const int64_t stride = int64_t{layout.num_kv_heads} * layout.head_dim;
  for (int64_t entry = 0; entry < call.sequences.count; ++entry) {
    const int32_t slot = (*slots)[entry];
    const SequenceInfo& info = table_.info(slot);
    for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
      const int32_t at = view_.row_of(slot, call.layer, h);
      const int64_t first = entry * call.tokens * stride + int64_t{h} * layout.head_dim;
      CodedTokens tokens = {call.k,     first, stride, layout.dtype, info.num_tokens - call.tokens,
                            call.tokens};
      append_row(at, info, Component::kKey, tokens);
      tokens.x = call.v;
      append_row(at, info, Component::kValue, tokens);
    }
    table_.set_layer_tokens(slot, call.layer, info.num_tokens);
  }
  return Status::ok();
}

Status CodedHostStore::update_scores(const ScoreUpdate&) {
  return no_coded_scores();
}

Result<int32_t> CodedHostStore::num_tokens(SequenceId sequence) {
  const Result<int32_t> slot = table_.slot_of(sequence);
  if (!slot) return slot;
  return table_.info(*slot).num_tokens;
}

Result<StoreStats> CodedHostStore::stats() {
  int64_t fixed = 0;
  for (int32_t slot = 0; slot < config_.max_sequences; ++slot) {
    if (table_.phase(slot) == SequencePhase::kFree) continue;
    const int32_t blocks = table_.info(slot).window_first / kBlockTokens;
    for (int32_t w = 0; w < rows(); ++w) fixed += fixed_blocks(view_, row(slot, w), blocks);
  }
  return count_stats(fixed);
}

StoreStats CodedHostStore::count_stats(int64_t fixed) const {
  StoreStats stats;
  stats.sequences = table_.open_count();
  stats.pages = config_.num_pages;
  stats.pages_free = static_cast<int32_t>(free_pages(view_.allocator));
  stats.page_bytes = view_.pages.page_bytes;
  for (int32_t page = 0; page < config_.num_pages; ++page) {
    stats.pages_shared += is_frozen(view_.allocator, page);
  }
  const int64_t token_bytes = int64_t{view_.head_dim} * 4;
  // Where there is but one kind of blocks they are the high tier.
  const Tier coded = view_.fixed.format.any() ? Tier::kLow : Tier::kHigh;
  stats.nominal_bytes = stats.sequences > 0 ? books_.stored_bytes() : 0;
  for (int32_t slot = 0; slot < config_.max_sequences; ++slot) {
    if (table_.phase(slot) == SequencePhase::kFree) continue;
    const SequenceInfo& info = table_.info(slot);
    const int32_t blocks = info.window_first / kBlockTokens;
    const bool live = table_.phase(slot) == SequencePhase::kLive;
    const bool own_means = live && config_.coded.means == MeanSource::kPrompt,
               own_steps = live && config_.coded.steps == StepSource::kPrompt;
    for (int32_t w = 0; w < rows(); ++w) {
      stats.tokens[static_cast<int32_t>(coded)] += info.window_first;
      stats.tokens[static_cast<int32_t>(Tier::kWindow)] += info.num_tokens - info.window_first;
      stats.raw_bytes += info.num_tokens * token_bytes;
      stats.nominal_bytes += (info.num_tokens - info.window_first) * token_bytes;
      stats.nominal_bytes += own_means ? token_bytes : 0;
      stats.nominal_bytes += own_steps ? 2 * sizeof(float) : 0;
      for (const Component c : {Component::kKey, Component::kValue}) {
        const CodedBlockRef* refs = view_.blocks(c, row(slot, w));
        for (int32_t b = 0; b < blocks; ++b) {
          stats.nominal_bytes += int64_t{refs[b].units} * kBlockAlignment + sizeof(CodedBlockRef);
        }
      }
    }
  }
  stats.tokens[static_cast<int32_t>(Tier::kHigh)] += fixed * kBlockTokens;
  stats.tokens[static_cast<int32_t>(coded)] -= fixed * kBlockTokens;
  return stats;
}

}  // namespace tierkv
