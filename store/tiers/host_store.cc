#include "store/tiers/host_store.h"

#include <cstring>
#include <string>
#include <utility>

#include "codec/format/quantize.h"
#include "store/channel/channel_host.h"
#include "store/coded/coded_host.h"
#include "store/tiers/host_basis.h"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

// std::aligned_alloc wants a multiple of the alignment.
void* allocate_aligned(size_t alignment, size_t bytes) {
  return std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}

float element(const void* x, DType dtype, int64_t i) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(x)[i];
  const uint16_t bits = static_cast<const uint16_t*>(x)[i];
  return dtype == DType::kFloat16 ? half_to_float(bits) : bfloat16_to_float(bits);
}

}  // namespace

Status check_values(const void* x, DType dtype, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float value = element(x, dtype, i);
    if (!is_finite(value)) {
      return Status(StatusCode::kNonFinite, "value " + std::to_string(i) + " is not finite");
    }
    if (value > kMaxHalf || value < -kMaxHalf) {
      return Status(StatusCode::kOutOfRange, "value " + std::to_string(i) + " is beyond 65504");
    }
  }
  return Status::ok();
}

Status check_scores(const float* x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    if (!is_finite(x[i])) {
      return Status(StatusCode::kNonFinite, "score " + std::to_string(i) + " is not finite");
    }
    if (x[i] < 0) return invalid("score " + std::to_string(i) + " is negative");
  }
  return Status::ok();
}

Result<std::unique_ptr<KvStore>> KvStore::create(const KvStoreConfig& config) {
  if (config.channel.enabled) {
    Result<std::unique_ptr<ChannelHostStore>> channel = ChannelHostStore::make(config);
    if (!channel) return channel.status();
    return std::unique_ptr<KvStore>(std::move(*channel));
  }
  if (config.coded.enabled) {
    Result<std::unique_ptr<CodedHostStore>> coded = CodedHostStore::make(config);
    if (!coded) return coded.status();
    return std::unique_ptr<KvStore>(std::move(*coded));
  }
  if (config.basis != nullptr) {
    Result<std::unique_ptr<HostBasisStore>> store = HostBasisStore::make(config);
    if (!store) return store.status();
    return std::unique_ptr<KvStore>(std::move(*store));
  }
  Result<std::unique_ptr<HostStore>> store = HostStore::make(config);
  if (!store) return store.status();
  return std::unique_ptr<KvStore>(std::move(*store));
}

Result<std::unique_ptr<HostStore>> HostStore::make(const KvStoreConfig& config) {
  const Result<StoreShape> shape = store_shape(config);
  if (!shape) return shape.status();
  std::unique_ptr<HostStore> store(new HostStore(config));
  if (Status s = store->allocate(*shape); !s) return s;
  return store;
}

Status HostStore::allocate(const StoreShape& shape) {
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
  view_ = store_view(config_, shape);
  view_.allocator = *allocator;
  view_.pages = {static_cast<uint8_t*>(pool_.get()), allocator->records, shape.page_bytes,
                 config_.num_pages};
  view_.infos = table_.infos();
  return initialize_host(view_.allocator);
}

Result<SequenceId> HostStore::add_sequence() {
  const Result<int32_t> slot = table_.free_slot();
  if (!slot) return slot.status();
  OpReport report;
  if (Status s = run(PageOp::open({&*slot, 1}, &report)); !s) return s;
  return table_.claim(*slot, SequencePhase::kPrompt, SequenceInfo{});
}

Status HostStore::append(const AppendCall& call) {
  const Result<Slots> slots = table_.admit_append(call);
  if (!slots) return slots.status();
  const CacheLayout& layout = config_.layout;
  const int64_t values =
      int64_t{call.sequences.count} * call.tokens * layout.num_kv_heads * layout.head_dim;
  if (Status s = check_values(call.k, layout.dtype, values); !s) return s.with_context("k");
  if (Status s = check_values(call.v, layout.dtype, values); !s) return s.with_context("v");
  const int32_t heads = config_.layout.num_kv_heads, dim = config_.layout.head_dim;
  const int64_t stride = int64_t{heads} * dim, bytes = dtype_bytes(config_.layout.dtype);
  for (int64_t entry = 0; entry < call.sequences.count; ++entry) {
    const int32_t slot = (*slots)[entry];
    const SequenceInfo& info = table_.info(slot);
    for (int32_t h = 0; h < heads; ++h) {
      const int64_t offset = (entry * call.tokens * stride + int64_t{h} * dim) * bytes;
      const AppendedTokens tokens = {static_cast<const uint8_t*>(call.k) + offset,
                                     static_cast<const uint8_t*>(call.v) + offset,
                                     stride,
                                     config_.layout.dtype,
                                     info.num_tokens - call.tokens,
                                     call.tokens};
      const int32_t at = view_.row_of(slot, call.layer, h);
      if (table_.phase(slot) == SequencePhase::kPrompt) {
        append_prompt_row(view_, at, tokens);
      } else {
        append_step_row(view_, at, info, tokens);
      }
    }
    table_.set_layer_tokens(slot, call.layer, info.num_tokens);
  }
  return Status::ok();
}

Status HostStore::release(SequenceId sequence) {
  const Result<int32_t> slot = table_.slot_of(sequence);
  if (!slot) return slot.status();
  OpReport report;
  if (Status s = run(PageOp::release({&*slot, 1}, &report)); !s) return s;
  table_.release(*slot);
  return Status::ok();
}

Result<int32_t> HostStore::num_tokens(SequenceId sequence) {
  const Result<int32_t> slot = table_.slot_of(sequence);
  if (!slot) return slot;
  return table_.info(*slot).num_tokens;
}

Result<StoreStats> HostStore::stats() {
  StoreStats stats;
  stats.sequences = table_.open_count();
  stats.pages = config_.num_pages;
  stats.pages_free =
      static_cast<int32_t>(view_.allocator.ring.cursors->end - view_.allocator.ring.cursors->start);
  stats.page_bytes = view_.pages.page_bytes;
  for (int32_t page = 0; page < config_.num_pages; ++page) {
    stats.pages_shared += is_frozen(view_.allocator, page);
  }
  for (int32_t slot = 0; slot < config_.max_sequences; ++slot) {
    if (table_.phase(slot) == SequencePhase::kFree) continue;
    for (int32_t w = 0; w < view_.rows_per_sequence(); ++w) {
      count_row(view_, view_.allocator.tokens[row(slot, w)], table_.info(slot).num_tokens, &stats);
    }
  }
  return stats;
}

}  // namespace tierkv
