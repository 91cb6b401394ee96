#include "store/channel/channel_shape.h"

#include <string>
#include <utility>

#include "store/shared/tierless_config.h"

namespace tierkv {
namespace {

Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}
Status out_of_range(std::string why) {
  return Status(StatusCode::kOutOfRange, std::move(why));
}

TierFormat block_format(const ChannelConfig& c) {
  TierFormat format = token_wise_tier(c.k_bits, c.v_bits);
  format.k.unit = Unit::kChannel;
  format.k.group = c.block_tokens;
  return format;
}

// A page holds a block, or two where one has no room for a raw tile of keys and one of values.
void choose_page(ChannelShape* shape) {
  const int32_t raw_tiles = kTileTokens * 4 * shape->layout.head_dim();
  shape->blocks_per_page = shape->layout.bytes < raw_tiles ? 2 : 1;
  shape->page_bytes = int64_t{shape->layout.bytes} * shape->blocks_per_page;
  shape->raw_page_tokens = kTileTokens;
  while (shape->raw_page_tokens < shape->layout.tokens &&
         shape->raw_page_tokens / kTileTokens * 2 * raw_tiles <= shape->page_bytes) {
    shape->raw_page_tokens *= 2;
  }
}

Status fill_allocator(const KvStoreConfig& c, ChannelShape* shape) {
  const int64_t rows = int64_t{c.layout.num_layers} * c.layout.num_kv_heads;
  if (rows > INT32_MAX) return out_of_range("layout: more than 2^31 - 1 rows");
  if (int64_t{c.num_pages} * shape->blocks_per_page > INT32_MAX) {
    return out_of_range("num_pages: more than 2^31 - 1 blocks");
  }
  const int32_t most_raw = c.policy.window_tokens + shape->layout.tokens - 1;
  PageTableShape& table = shape->allocator.table;
  table.num_sequences = c.max_sequences;
  table.rows_per_sequence = static_cast<int32_t>(rows);
  table.num_sides = kResidualSide + 1;
  table.tokens_per_page[0] = table.tokens_per_page[1] = shape->blocks_per_page;
  table.tokens_per_page[kResidualSide] = shape->raw_page_tokens;
  table.table_slots[0] =
      larger_of(1, pages_for(c.max_tokens / shape->layout.tokens, shape->blocks_per_page));
  table.table_slots[1] = pages_for(smaller_of(c.max_tokens, most_raw), shape->raw_page_tokens);
  shape->allocator.num_pages = c.num_pages;
  return shape->allocator.validate().with_context("capacity");
}

}  // namespace

Result<ChannelShape> channel_shape(const KvStoreConfig& c) {
  if (Status s = c.layout.validate(); !s) return s.with_context("layout");
  if (Status s = c.policy.validate(); !s) return s.with_context("policy");
  if (Status s = validate_tierless(c, "a channel-wise cache"); !s) return s;
  if (Status s = validate_tierless_counts(c); !s) return s;
  if (c.coded.enabled) return unsupported("channel: with coded pages");
  if (c.basis != nullptr) return unsupported("basis: a channel-wise cache has none");
  const Result<ChannelLayout> layout =
      make_channel_layout(block_format(c.channel), c.layout.head_dim);
  if (!layout) return layout.status().with_context("channel");
  ChannelShape shape;
  shape.layout = *layout;
  choose_page(&shape);
  if (c.page_bytes != 0 && c.page_bytes != shape.page_bytes) {
    return unsupported("page_bytes: pages of these blocks have " +
                       std::to_string(shape.page_bytes) + " bytes");
  }
  if (Status s = fill_allocator(c, &shape); !s) return s;
  return shape;
}

Status check_channel_prompt(const KvStoreConfig& config, int32_t tokens) {
  const int32_t block = config.channel.block_tokens;
  if (tokens / block < kMaxChannelPromptBlocks) return Status::ok();
  return out_of_range("tokens: a channel-wise store takes less than " +
                      std::to_string(kMaxChannelPromptBlocks * block) +
                      " at once; bring a longer prompt in pieces");
}

Status validate_channel_request(const AttendRequest& request) {
  if (request.count_query) return unsupported("count_query: a channel-wise store keeps no scores");
  return Status::ok();
}

std::string to_json(const ChannelConfig& c) {
  return std::string("{\"enabled\":") + (c.enabled ? "true" : "false") +
         ",\"k_bits\":" + std::to_string(c.k_bits) + ",\"v_bits\":" + std::to_string(c.v_bits) +
         ",\"block_tokens\":" + std::to_string(c.block_tokens) + "}";
}

ChannelView channel_view(const KvStoreConfig& config, const ChannelShape& shape) {
  ChannelView view;
  view.layout = shape.layout;
  view.blocks_per_page = shape.blocks_per_page;
  view.raw_page_tokens = shape.raw_page_tokens;
  view.window_tokens = config.policy.window_tokens;
  view.num_kv_heads = config.layout.num_kv_heads;
  return view;
}

}  // namespace tierkv
