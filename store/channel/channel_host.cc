#include "store/channel/channel_host.h"

#include <algorithm>

#include "store/shared/double_attention.h"
#include "store/shared/host_pages.h"
#include "store/shared/tierless_config.h"
#include "store/tiers/host_store.h"

namespace tierkv {
namespace {

constexpr const char* kThisCache = "a channel-wise cache";

}  // namespace

Result<std::unique_ptr<ChannelHostStore>> ChannelHostStore::make(const KvStoreConfig& config) {
  const Result<ChannelShape> shape = channel_shape(config);
  if (!shape) return shape.status();
  Result<HostPool> pool = HostPool::make(shape->allocator, shape->page_bytes);
  if (!pool) return pool.status();
  std::unique_ptr<ChannelHostStore> store(new ChannelHostStore(config, std::move(*pool)));
  store->view_ = channel_view(config, *shape);
  store->view_.allocator = store->pool_.allocator();
  store->view_.pages = store->pool_.pages();
  store->view_.infos = store->table_.infos();
  return store;
}

Result<SequenceId> ChannelHostStore::add_sequence() {
  const Result<int32_t> slot = table_.free_slot();
  if (!slot) return slot.status();
  OpReport report;
  if (Status s = run_page_op(view_.allocator, PageOp::open({&*slot, 1}, &report)); !s) return s;
  return table_.claim(*slot, SequencePhase::kPrompt, SequenceInfo{});
}

Status ChannelHostStore::release(SequenceId sequence) {
  const Result<int32_t> slot = table_.slot_of(sequence);
  if (!slot) return slot.status();
  OpReport report;
  if (Status s = run_page_op(view_.allocator, PageOp::release({&*slot, 1}, &report)); !s) return s;
  table_.release(*slot);
  return Status::ok();
}

// In a prompt the blocks that its tokens fill are made first, from what lies in the raw pages and
// from the call; then the pages of what is left of the raw tokens move to the front.
void ChannelHostStore::append_row(int32_t row, const SequenceInfo& info, const ChannelTokens& keys,
                                  const ChannelTokens& values) {
  const int32_t block = view_.layout.tokens;
  if (info.window_origin == kInPrompt && info.window_first > info.prompt_tokens) {
    encode_blocks({{&view_, row, info.prompt_tokens}, {&keys, &values}}, info.prompt_tokens / block,
                  info.window_first / block);
    rotate_left(view_.page_ids(row, kResidualSide), view_.allocator.pages[row].of[kResidualSide],
                view_.pages_of_blocks((info.window_first - info.prompt_tokens) / block));
  }
  const RawSide raw = {&view_, row, info.window_first};
  for (int32_t p = std::max(keys.first_position, info.window_first); p < info.num_tokens; ++p) {
    raw.put(Component::kKey, p, token_as_half(keys, p, view_.head_dim()).data());
    raw.put(Component::kValue, p, token_as_half(values, p, view_.head_dim()).data());
  }
}

Status ChannelHostStore::append(const AppendCall& call) {
  const Result<Slots> slots = table_.admit_append(call);
  if (!slots) return slots.status();
  const CacheLayout& layout = config_.layout;
  const int64_t stride = int64_t{layout.num_kv_heads} * layout.head_dim;
  const int64_t count = call.sequences.count * call.tokens * stride;
  if (Status s = check_values(call.k, layout.dtype, count); !s) return s.with_context("k");
  if (Status s = check_values(call.v, layout.dtype, count); !s) return s.with_context("v");
  for (int64_t entry = 0; entry < call.sequences.count; ++entry) {
    const int32_t slot = (*slots)[entry];
    const SequenceInfo& info = table_.info(slot);
    for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
      const int64_t first = entry * call.tokens * stride + int64_t{h} * layout.head_dim;
      const ChannelTokens keys = {
          call.k, first, stride, layout.dtype, info.num_tokens - call.tokens, call.tokens};
      ChannelTokens values = keys;
      values.x = call.v;
      append_row(view_.row_of(slot, call.layer, h), info, keys, values);
    }
    table_.set_layer_tokens(slot, call.layer, info.num_tokens);
  }
  return Status::ok();
}

Status ChannelHostStore::score_prompt(const PromptScores&) {
  return no_scores(kThisCache);
}
Status ChannelHostStore::update_scores(const ScoreUpdate&) {
  return no_scores(kThisCache);
}

Result<int32_t> ChannelHostStore::num_tokens(SequenceId sequence) {
  const Result<int32_t> slot = table_.slot_of(sequence);
  if (!slot) return slot;
  return table_.info(*slot).num_tokens;
}

Result<StoreStats> ChannelHostStore::stats() {
  StoreStats stats;
  stats.sequences = table_.open_count();
  pool_.count_pages(&stats);
  const int64_t token_bytes = int64_t{view_.head_dim()} * 4;
  for (int32_t slot = 0; slot < config_.max_sequences; ++slot) {
    if (table_.phase(slot) == SequencePhase::kFree) continue;
    const SequenceInfo& info = table_.info(slot);
    const int64_t raw = ChannelView::raw_tokens(info), blocks = view_.blocks_of(info);
    stats.tokens[static_cast<int32_t>(Tier::kHigh)] += rows() * int64_t{info.window_first};
    stats.tokens[static_cast<int32_t>(Tier::kWindow)] += rows() * raw;
    stats.raw_bytes += rows() * info.num_tokens * token_bytes;
    stats.nominal_bytes += rows() * (raw * token_bytes + blocks * view_.layout.bytes);
  }
  return stats;
}

Status ChannelHostStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table_.admit_attend(request);
  if (!slots) return slots.status();
  if (Status s = validate_channel_request(request); !s) return s;
  return attend_in_double(
      config_, request, *slots,
      [&](int32_t slot, int32_t kv_head, std::vector<double>* k, std::vector<double>* v) {
        const int32_t at = view_.row_of(slot, request.layer, kv_head);
        for (int32_t p = 0; p < table_.info(slot).num_tokens; ++p) {
          for (int32_t d = 0; d < view_.head_dim(); ++d) {
            k->push_back(stored_value(view_, at, Component::kKey, p, d));
            v->push_back(stored_value(view_, at, Component::kValue, p, d));
          }
        }
        return Status::ok();
      });
}

}  // namespace tierkv
