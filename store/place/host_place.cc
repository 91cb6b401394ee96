// SPDX-License-Identifier: Apache-2.0
#include "store/place/host_place.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

#include "codec/format/element.h"

namespace tierkv::store {

HostPlace::Memory HostPlace::allocate(size_t alignment, int64_t bytes) {
  const auto size = static_cast<size_t>(round_up(bytes, static_cast<int64_t>(alignment)));
  return Memory(std::aligned_alloc(alignment, size), std::free);
}

Result<std::unique_ptr<HostPlace>> HostPlace::make(const StoreConfig& config,
                                                   std::unique_ptr<RowFormat> format) {
  const Result<StoreLayout> layout = store_layout(config, *format);
  if (!layout) return layout.status();
  auto place = std::make_unique<HostPlace>();
  const size_t bytes = allocator_bytes(layout->allocator).total;
  place->allocator_memory_ = allocate(kAllocatorAlignment, static_cast<int64_t>(bytes));
  place->page_memory_ = allocate(kPageAlignment, layout->page_bytes * layout->allocator.num_pages);
  place->slot_memory_ = allocate(kPageAlignment, layout->slot_bytes * config.max_sequences);
  auto* const pages = static_cast<uint8_t*>(place->page_memory_.get());
  if (Status s = place->bind(config, *layout, std::move(format), pages); !s) return s;
  if (Status s = initialize_host(place->pages_.allocator); !s) return s;
  return place;
}

Status HostPlace::bind(const StoreConfig& config, const StoreLayout& layout,
                       std::unique_ptr<RowFormat> format, uint8_t* pages) {
  config_ = config;
  layout_ = layout;
  if (allocator_memory_ == nullptr || pages == nullptr || slot_memory_ == nullptr) {
    return Status(StatusCode::kOutOfMemory,
                  "no host memory for memory_bytes: " + std::to_string(config.memory_bytes));
  }
  const Result<PageAllocator> a = make_page_allocator(layout.allocator, allocator_memory_.get(),
                                                      allocator_bytes(layout.allocator).total);
  if (!a) return a.status();
  pages_ = {*a, pages, layout.page_bytes, format->sizes().rows_per_layer};
  format->bind(pages_);
  format_ = std::move(format);
  return Status::ok();
}

Result<std::unique_ptr<HostPlace>> HostPlace::make_mirror(const StoreConfig& config,
                                                          const StoreLayout& layout,
                                                          std::unique_ptr<RowFormat> format,
                                                          const Memory& slot, uint8_t* pages) {
  StoreConfig one = config;
  StoreLayout of_one = layout;
  one.max_sequences = of_one.allocator.table.num_sequences = of_one.allocator.num_pages = 1;
  of_one.layer_bytes -= of_one.raw_bytes;
  of_one.slot_bytes = of_one.layer_bytes * config.layout.num_layers;
  of_one.raw_bytes = 0;
  auto place = std::make_unique<HostPlace>();
  const auto bytes = static_cast<int64_t>(allocator_bytes(of_one.allocator).total);
  place->allocator_memory_ = allocate(kAllocatorAlignment, bytes);
  place->slot_memory_ = slot;
  if (Status s = place->bind(one, of_one, std::move(format), pages); !s) return s;
  return place;
}

Status HostPlace::clear() {
  return initialize_host(pages_.allocator);
}

uint8_t* HostPlace::slot_bytes(int32_t slot) const {
  return static_cast<uint8_t*>(slot_memory_.get()) + slot * layout_.slot_bytes;
}

HostLayer HostPlace::layer_of(const LayerMove& move) const {
  uint8_t* at = slot_bytes(move.slot) + move.layer * layout_.layer_bytes;
  return {move.slot, move.layer, move.from, at, at + layout_.raw_bytes, move.generation};
}

uint8_t* HostPlace::raw_row(const LayerMove& move, int32_t kv_head) const {
  return layer_of(move).raw + int64_t{kv_head} * layout_.raw.row_bytes;
}

Status HostPlace::open(int32_t slot) {
  OpReport report;
  if (Status s = run(PageOp::open({&slot, 1}, &report)); !s) return s;
  std::memset(slot_bytes(slot), 0, static_cast<size_t>(layout_.slot_bytes));
  return Status::ok();
}

Status HostPlace::release(int32_t slot) {
  OpReport report;
  return run(PageOp::release({&slot, 1}, &report));
}

Status HostPlace::note_replay(const LayerMoves&, int32_t) {
  return Status(StatusCode::kUnsupported, "note_replay: a store in host memory has no captures");
}

Status HostPlace::compress(const LayerMoves& moves, int32_t /*tokens*/) {
  return compress_works(moves, {});
}

RawTokens HostPlace::tokens_of(const LayerMove& move, const Chunk& chunk, RowOfCall row) const {
  return raw_tokens(layout_.raw, raw_row(move, row.kv_head), move.from.tokens, chunk, row);
}

Status HostPlace::compress_works(const LayerMoves& moves, const Chunk& chunk) {
  const int32_t heads = config_.layout.num_kv_heads;
  std::vector<BodyWork> works;
  std::vector<HostLayer> layers;
  for (size_t i = 0; i < moves.size(); ++i) {
    if (!moves[i].moves_body()) continue;
    const HostLayer& layer = layers.emplace_back(layer_of(moves[i]));
    BodyWork& work = works.emplace_back(BodyWork{layer, moves[i].to.body_end, {}});
    for (int32_t h = 0; h < heads; ++h) {
      work.tokens.push_back(tokens_of(moves[i], chunk, {static_cast<int32_t>(i), h, heads}));
    }
  }
  if (works.empty()) return Status::ok();
  Result<std::unique_ptr<BodyPlan>> plan = format_->plan(works);
  if (!plan) return plan.status();
  if (Status s = take_pages(layers, (*plan)->layers); !s) return s;
  for (size_t i = 0; i < layers.size(); ++i) {
    for (const PageRange& range : format_->place(layers[i], **plan, i)) {
      std::copy_n(range.from, range.bytes, range.to);
    }
  }
  format_->finish(**plan);
  return Status::ok();
}

Status HostPlace::append(const LayerAppend& call, const LayerMoves& moves) {
  const CacheLayout& shape = config_.layout;
  const int32_t heads = shape.num_kv_heads;
  Chunk chunk = chunk_of(call, shape.dtype);
  // check() takes one sequence after the other; the worst fault of the call remains.
  const auto worst_of = [&](const auto& check) {
    Status worst;
    for (size_t i = 0; i < moves.size(); ++i) {
      const Status s = check(RowOfCall{static_cast<int32_t>(i), 0, heads}, moves[i].from.tokens);
      if (worse_of(worst.code(), s.code()) == worst.code()) continue;
      worst = s.with_context(name_of(moves[i].id()));
    }
    return worst;
  };
  Status fault = worst_of([&](const RowOfCall& rows, int32_t first) {
    return check_values(chunk, shape.head_dim, rows, first);
  });
  if (!fault) return fault;
  fault = worst_of([&](const RowOfCall& rows, int32_t first) {
    return check_significances(chunk, rows, first);
  });
  if (!fault) return fault;
  std::vector<float> found;
  if (call.q != nullptr) {
    if (Status s = find_significance(call, moves, &found); !s) return s;
    chunk.significance = found.data(), chunk.stride = call.tokens;
  }
  if (Status s = compress_works(moves, chunk); !s) return s;
  for (size_t i = 0; i < moves.size(); ++i) {
    for (int32_t h = 0; h < heads; ++h) {
      const RawTokens tokens = tokens_of(moves[i], chunk, {static_cast<int32_t>(i), h, heads});
      write_chunk(layout_, raw_row(moves[i], h), tokens, moves[i].to);
    }
  }
  return Status::ok();
}

void HostPlace::read_row(const LayerMove& move, int32_t kv_head, Positions range, float* k,
                         float* v, uint8_t* pruned) const {
  const int64_t dim = config_.layout.head_dim;
  uint16_t token[kMaxHeadDim];
  const auto [sinks, body, ring] = parts_of(layout_.laws, move.from, range);
  for (const Positions& part : {sinks, ring}) {
    for (int32_t p = part.first; p < part.end; ++p) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        read_raw(layout_, raw_row(move, kv_head), c, p, token);
        std::transform(token, token + dim, (c == Component::kKey ? k : v) + (p - range.first) * dim,
                       half_to_float);
      }
    }
  }
  if (pruned != nullptr) std::fill(pruned, pruned + range.count(), uint8_t{0});
  if (body.count() <= 0) return;
  const int32_t at = body.first - range.first;
  format_->read(layer_of(move), kv_head, body.first, body.end, k + at * dim, v + at * dim,
                pruned == nullptr ? nullptr : pruned + at);
}

Status HostPlace::decode(const LayerRange& range, const LayerMove& move) {
  const CacheLayout& shape = config_.layout;
  const int32_t count = range.end - range.first, dim = shape.head_dim;
  std::vector<float> k(int64_t{count} * dim), v(k.size());
  for (int32_t h = 0; h < shape.num_kv_heads; ++h) {
    read_row(move, h, {range.first, range.end}, k.data(), v.data(), nullptr);
    for (int64_t i = 0; i < int64_t{count} * dim; ++i) {
      const int64_t at = (i / dim * shape.num_kv_heads + h) * dim + i % dim;
      store_element(range.k, range.dtype, at, k[i]);
      store_element(range.v, range.dtype, at, v[i]);
    }
  }
  return Status::ok();
}

Status HostPlace::add_usage(const LayerMoves& layers, StoreUsage* usage) const {
  const PageAllocator& a = pages_.allocator;
  usage->pages = a.shape.num_pages;
  usage->pages_free = a.ring.cursors->end - a.ring.cursors->start;
  usage->most_pages = most_pages_;
  usage->page_bytes = pages_.page_bytes;
  usage->slot_bytes = layout_.slot_bytes;
  for (int32_t page = 0; page < a.shape.num_pages; ++page)
    usage->pages_shared += is_frozen(a, page);
  for (const LayerMove& move : layers) {
    usage->nominal_bytes += format_->nominal_bytes(layer_of(move));
  }
  return Status::ok();
}

}  // namespace tierkv::store
