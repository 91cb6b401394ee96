// SPDX-License-Identifier: Apache-2.0
// Device memory of coded rows, and what it holds for all sequences: tables of rows, rotations,
// codebooks.
#pragma once

#include "store/rows/coded/device_coded_format.cuh"

namespace tierkv::store {

inline constexpr int32_t kCheapestOfBook = 128;

template <class Machine>
void DeviceCodedRows<Machine>::carve(Carving* at) {
  const CodedShape& shape = host_->shape();
  const int32_t entries = config_.max_sequences * layers();
  const int64_t rows = int64_t{per_slot_ ? config_.max_sequences : 1} * layers() * heads();
  DeviceRowTables& t = device_.tables;
  t.rows = static_cast<int32_t>(rows);
  t.per_slot = per_slot_;
  for (float** x : {&t.key_steps, &t.value_steps, &t.query_units}) *x = at->take<float>(rows);
  for (float** x : {&t.key_scales, &t.query_scales}) *x = at->take<float>(rows * head_dim());
  for (uint16_t** x : {&t.key_means, &t.query_means}) *x = at->take<uint16_t>(rows * head_dim());
  key_weights_ = at->take<float>(int64_t{layers()} * heads() * head_dim());
  t.key_weights = key_weights_;
  records_ =
      at->take<uint8_t>(int64_t{layers()} * heads() * (shape.row_byte(1) - shape.row_byte(0)));
  device_layers_ = at->take<DeviceLayer>(layers());
  device_.layers = device_layers_;
  books_ = at->take<DeviceCodebook>(2 * layers());
  book_tables_ = at->take<uint32_t>(int64_t{2 * layers()} << host_->format().max_length);
  book_words_ = at->take<uint32_t>(int64_t{2 * layers()} * kMaxSymbols);
  book_cheapest_ = at->take<uint16_t>(int64_t{2 * layers()} * kCheapestOfBook);
  turns_.clear();
  for (int32_t l = 0; l < layers(); ++l) {
    const RopeTable* rope = host_->rope(l);
    const bool is_known = l > 0 && rope == host_->rope(0);
    if (rope == nullptr || is_known) {
      turns_.push_back(is_known && rope != nullptr ? turns_[0] : nullptr);
      continue;
    }
    turns_.push_back(at->take<Turn>(static_cast<int64_t>(rope->place.size() + rope->block.size())));
  }
  // A step has few blocks of all layers, a prompt many of one.
  constexpr int32_t kStepBlocks = kSampleBlocks + 3;
  const int64_t cells =
      int64_t{config_.max_sequences} * most(layers() * kStepBlocks, shape.max_blocks + 1);
  cells_ = static_cast<int32_t>(std::min<int64_t>(cells, INT32_MAX / (4 * heads())));
  const int64_t cell_rows = int64_t{cells_} * heads();
  hints_ = at->take<uint32_t>(entries + 1);
  CodedCall& s = scratch_;
  s.entries = at->take<EntryDraft>(entries);
  s.rows = at->take<CodedRowState>(int64_t{entries} * heads());
  for (WeightedPlace*& places : s.places) places = at->take<WeightedPlace>(cell_rows);
  s.sums = at->take<LogMean>(cell_rows);
  s.left = at->take<int32_t>(1);
  s.ends = at->take<uint32_t>(cells_);
  s.list_begins = at->take<int32_t>(layers() + 1);
  s.lists = at->take<int32_t>(cells_);
  s.status = at->take<StatusCode>(2 * cell_rows);
  s.kept = at->take<uint8_t>(2 * cell_rows);
  const int64_t cell_bytes = int64_t{heads()} * kBlockTokens * (4 * head_dim() + 4);
  s.group_cells =
      static_cast<int32_t>(std::clamp<int64_t>(staging_bytes_ / cell_bytes, kSampleBlocks, cells_));
  const int64_t group_rows = int64_t{s.group_cells} * heads();
  s.staging = at->take<uint16_t>(2 * group_rows * kBlockTokens * head_dim());
  s.decided = at->take<uint8_t[4]>(group_rows * kBlockTokens);
  s.ranges = at->take<WeightedRange>(group_rows);
}

template <class Machine>
Status DeviceCodedRows<Machine>::bind(const DeviceStoreView& view, DeviceFault* fault,
                                      GpuStream stream) {
  machine_.set_stream(stream);
  device_.view = view;
  device_.shape = host_->shape();
  device_.fault = fault;
  device_.pool_bytes = int64_t{view.pages.allocator.shape.num_pages} * view.pages.page_bytes;
  states_ = DeviceLayerStates(config_.max_sequences, layers());
  for (int32_t l = 0; l < layers(); ++l) {
    per_slot_ |= !host_->is_raw_layer(l) && host_->needs_tokens(l);
  }
  Carving sizes{nullptr};
  carve(&sizes);
  memory_bytes_ = sizes.bytes;
  if (Status s = machine_.allocate(memory_bytes_, "coded rows", &memory_); !s) return s;
  if (Status s = machine_.clear(memory_, memory_bytes_); !s) return s;
  Carving memory{static_cast<uint8_t*>(memory_)};
  carve(&memory);
  scratch_.device = device_;
  if (Status s = upload_tables(); !s) return s;
  return bind_attention();
}

template <class Machine>
Status DeviceCodedRows<Machine>::upload_tables() {
  const int64_t record_bytes = device_.shape.row_byte(1) - device_.shape.row_byte(0);
  std::vector<float> weights;
  std::vector<uint8_t> records(static_cast<size_t>(layers() * heads() * record_bytes));
  for (int32_t l = 0; l < layers(); ++l) {
    for (int32_t h = 0; h < heads(); ++h) {
      const std::vector<float>& known = host_->key_weight(l, h);
      for (int32_t d = 0; d < head_dim(); ++d) weights.push_back(known.empty() ? 1.0f : known[d]);
      if (per_slot_ || host_->is_raw_layer(l)) continue;
      const Result<WeightedRow> row = host_->fit_row(l, h, {});
      if (!row) return row.status();
      put_record(*row, records.data() + (l * heads() + h) * record_bytes);
    }
  }
  if (Status s = upload(key_weights_, weights); !s) return s;
  if (Status s = upload(records_, records); !s) return s;
  if (!per_slot_) {
    const MakeRowTables make{device_, records_, record_bytes, 0, 1, 0, layers()};
    Status s = run(make, layers() * heads(), MakeRowTables::kThreads / kWarpLanes);
    if (!s) return s;
  }
  host_layers_.assign(layers(), DeviceLayer{});
  host_books_.assign(2 * layers(), DeviceCodebook{});
  for (int32_t l = 0; l < layers(); ++l) {
    const RopeTable* rope = host_->rope(l);
    DeviceLayer& layer = host_layers_[l];
    layer.is_raw = host_->is_raw_layer(l) ? 1 : 0;
    if (rope == nullptr) continue;
    layer.rope = {turns_[l], turns_[l] + rope->place.size(), rope->pairing, rope->pairs,
                  rope->blocks};
    if (l > 0 && turns_[l] == turns_[0]) continue;
    if (Status s = upload(turns_[l], rope->place); !s) return s;
    if (Status s = upload(turns_[l] + rope->place.size(), rope->block); !s) return s;
  }
  for (int32_t l = 0; l < layers(); ++l) {
    if (!has_books(l)) continue;
    if (Status s = upload_books(l); !s) return s;
  }
  return upload_layers();
}

template <class Machine>
Status DeviceCodedRows<Machine>::upload_layers() {
  return upload(device_layers_, host_layers_);
}

// upload_layers() follows.
template <class Machine>
Status DeviceCodedRows<Machine>::upload_books(int32_t layer) {
  for (const Component c : {Component::kKey, Component::kValue}) {
    const auto i = static_cast<int32_t>(c);
    const Codebook& book = host_->books(layer).family(c).books.front();
    const int64_t at = 2 * layer + i;
    DeviceCodebook on_device = device_codebook(book);
    uint32_t* const table = book_tables_ + (at << host_->format().max_length);
    uint32_t* const words = book_words_ + at * kMaxSymbols;
    uint16_t* const cheapest = book_cheapest_ + at * kCheapestOfBook;
    on_device.table = table, on_device.words = words, on_device.cheapest = cheapest;
    const std::vector<uint32_t> table_of_book = device_table(book), words_of = encoder_words(book);
    if (book.cheapest.size() > kCheapestOfBook || words_of.size() > kMaxSymbols) {
      return Status(StatusCode::kUnsupported, "a codebook of a layer is too large for a device");
    }
    if (Status s = upload(table, table_of_book); !s) return s;
    if (Status s = upload(words, words_of); !s) return s;
    if (Status s = upload(cheapest, book.cheapest); !s) return s;
    if (Status s = machine_.upload(books_ + at, &on_device, sizeof(on_device)); !s) return s;
    host_books_[at] = on_device;
    host_layers_[layer].books[i] = {books_ + at, book.max_length};
  }
  host_layers_[layer].is_ready = per_slot_ ? 0 : 1;
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::download_shared(RowFormat* host) {
  auto* const to = static_cast<CodedRows*>(host);
  // Books of a layer stay what they are once it has some.
  for (int32_t l = 0; l < layers(); ++l) {
    if (to->books(l).empty() != host_->books(l).empty()) to->set_books(l, host_->books(l));
  }
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::upload_shared(const RowFormat& host,
                                               const std::vector<HostLayer>& imported) {
  const auto& from = static_cast<const CodedRows&>(host);
  bool any_new = false;
  for (int32_t l = 0; l < layers(); ++l) {
    if (from.books(l).empty() || host_layers_[l].books[0].codebook != nullptr) continue;
    if (&from != host_) host_->set_books(l, from.books(l));
    if (Status s = upload_books(l); !s) return s;
    any_new = true;
  }
  if (any_new) {
    if (Status s = upload_layers(); !s) return s;
  }
  for (const HostLayer& layer : imported) {
    states_.import(layer.slot, layer.layer, from.is_fixed(layer));
  }
  if (!per_slot_) return Status::ok();
  const MakeRowTables make{device_, nullptr, 0, imported[0].slot, 1, 0, layers()};
  return run(make, int64_t{layers()} * heads(), MakeRowTables::kThreads / kWarpLanes);
}

}  // namespace tierkv::store
