// The coded format of a device place, over a machine that has the memory and runs the kernels:
// CUDA's in device_coded_rows.cu, an emulated one in tests.
//
// Machine:
//   sms(), shared_bytes()             of the device; shared_bytes: the most of a CTA
//   allocate(bytes, what, &memory)    device memory, in the stream's order; free(memory)
//   upload(to, from, bytes)           `from` may change afterwards
//   download(to, from, bytes)         waits
//   clear(memory, bytes)
//   launch(body, {x, y} CTAs, shared bytes, threads)    body(shared memory) by all threads
#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/coded/weighted_tables.h"
#include "codec/format/element.h"
#include "store/rows/coded/coded_rows.h"
#include "store/rows/coded/device_coded_rows.h"
#include "store/rows/coded/device_encode.cuh"
#include "store/rows/coded/device_layer_states.h"
#include "store/rows/coded/device_places.cuh"
#include "store/rows/coded/device_read.cuh"
#include "store/rows/coded/device_row_tables.cuh"
#include "store/rows/coded/device_tokens.cuh"

namespace tierkv::store {

struct MachineGrid {
  int32_t x = 1, y = 1;
};

// A run of device memory to be carved.
struct Carving {
  uint8_t* base;
  int64_t bytes = 0;
  template <class T>
  T* take(int64_t count) {
    T* at = base == nullptr ? nullptr : reinterpret_cast<T*>(base + bytes);
    bytes += round_up(count * static_cast<int64_t>(sizeof(T)), 256);
    return at;
  }
};

template <class Machine>
class DeviceCodedRows : public DeviceRowFormat {
 public:
  // Staging memory, unless the store's longest call takes less.
  static constexpr int64_t kStagingBytes = int64_t{64} << 20;

  DeviceCodedRows(const StoreConfig& config, CodedRows* host, Machine machine)
      : config_(config), host_(host), machine_(std::move(machine)) {}
  ~DeviceCodedRows() override {
    for (void* memory : {memory_, saved_}) machine_.free(memory);
  }

  Status bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream stream) override;
  int64_t workspace_bytes() const override { return memory_bytes_; }
  void released(int32_t slot) override { states_.open(slot); }
  Status open(int32_t slot) override {
    states_.open(slot);
    return Status::ok();
  }
  bool may_rewrite(const DeviceWorks& works) const override;
  Status require_capturable(const DeviceWorks& works) const override;
  int64_t most_pages(const DeviceWorks& works) const override;
  Status plan(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status write(const DeviceWorks& works, const PageCopy* copies) override;
  Status read(const LayerMove& at, Positions range, DType dtype, void* k, void* v) override;
  Status restore(const LayerMove& move, Positions range) override;
  Status cut_counts(const DeviceWorks& works, const DeviceRowCounts& counts) override;
  Status cut(const DeviceWorks& works, const PageCopy* copies) override;
  void forked(int32_t from, int32_t to) override {
    states_.fork(from, to);
    if (per_slot_) copies_.push_back(to);
  }
  Status download_shared(RowFormat* host) override;
  Status upload_shared(const RowFormat& host) override;

  // For tests: fewer bytes of staging memory, before bind().
  void set_staging_bytes(int64_t bytes) { staging_bytes_ = bytes; }

 protected:
  // What plan() and write() of a call share on the host.
  struct HostPlan {
    std::vector<uint32_t> hints;   // [entries]; empty: all are 0
    std::vector<int32_t> fits;     // entries whose means and steps come from their tokens
    std::vector<int32_t> samples;  // entries whose tokens make a layer's codebooks
    int32_t saved = 0;             // entries that rewrite
  };

  int32_t layers() const { return config_.layout.num_layers; }
  int32_t heads() const { return config_.layout.num_kv_heads; }
  int32_t head_dim() const { return config_.layout.head_dim; }
  bool has_books(int32_t layer) const { return !host_->books(layer).empty(); }
  MachineGrid grid_of(int64_t items, int32_t per_cta) const {
    const int64_t ctas = (items + per_cta - 1) / per_cta;
    return {static_cast<int32_t>(std::clamp<int64_t>(ctas, 1, 8 * machine_.sms())), 1};
  }
  template <class T>
  Status upload(void* to, const std::vector<T>& from) {
    return machine_.upload(to, from.data(), static_cast<int64_t>(from.size() * sizeof(T)));
  }
  int32_t saved_bytes() const {
    return most(device_.shape.most_block_bytes(), device_.shape.raw_block_bytes(kBlockTokens));
  }
  template <class Body>
  Status run(const Body& body, int64_t items, int32_t per_cta) {
    return machine_.launch(body, grid_of(items, per_cta), 0, Body::kThreads);
  }

  void carve(Carving* at);
  Status upload_tables();
  Status upload_books(int32_t layer);
  Status upload_layers();
  // What the host finds of a call; changes nothing.
  HostPlan host_plan(const DeviceWorks& works) const;
  int32_t most_blocks(const DeviceWorks& works, const HostPlan& host) const;
  Status prepare(const DeviceWorks& works, const HostPlan& host);
  Status sample(const DeviceWorks& works, int32_t entry, bool makes_books);
  Status make_books(int32_t layer, const std::vector<WeightedRow>& rows,
                    const std::vector<CodedRows::BlockTokens>& tokens);
  Result<CodedCall> call_of(const DeviceWorks& works, int32_t blocks) const;
  template <class Each>
  Status for_groups(const CodedCall& call, const Each& each);
  bool is_one_group(const CodedCall& call) const {
    return int64_t{call.layer_cells()} * call.works.num_layers <= call.group_cells;
  }
  Status load_group(const CodedCall& call, const CellGroup& group);
  Status encode_group(const CodedCall& call, const CellGroup& group, bool writes);
  Status read_to(const ReadTarget& to);
  Status save(CodedCall* call);
  void note(const DeviceWorks& works);
  // Of kv_head 0 of a (slot, layer).
  const CodedBlockRef* directory(int32_t slot, int32_t layer, Component c) const {
    return device_.refs(slot, layer, 0, c);
  }
  template <int32_t kPer>
  Status encode_group_of(const CodedCall& call, const CellGroup& group, bool writes);

  StoreConfig config_;
  CodedRows* host_;
  Machine machine_;
  CodedDevice device_;
  DeviceLayerStates states_;
  bool per_slot_ = false;
  int64_t staging_bytes_ = kStagingBytes;

  void* memory_ = nullptr;
  int64_t memory_bytes_ = 0;
  void* saved_ = nullptr;  // of the call between plan() and write()
  int32_t cells_ = 0;      // that a call may have
  // In memory_.
  CodedCall scratch_;
  DeviceLayer* device_layers_ = nullptr;
  float* key_weights_ = nullptr;
  uint8_t* records_ = nullptr;  // [layers, heads]
  uint32_t* hints_ = nullptr;
  DeviceCodebook* books_ = nullptr;  // [layers, 2]
  uint32_t* book_tables_ = nullptr;
  uint32_t* book_words_ = nullptr;
  uint16_t* book_cheapest_ = nullptr;
  std::vector<Turn*> turns_;  // of each rotation: places, then blocks
  std::vector<DeviceLayer> host_layers_;
  std::vector<DeviceCodebook> host_books_;  // [layers, 2]: what books_ holds
  HostPlan planned_;
  std::vector<int32_t> copies_;  // slots that became copies; their row tables are not made yet
};

inline constexpr int32_t kCheapestOfBook = 128;

// As MakeRowTables takes it.
inline void put_record(const WeightedRow& row, uint8_t* record) {
  CodedRowState state;
  state.key_step = row.key_step, state.value_step = row.value_step;
  std::memcpy(record, &state, sizeof(state));
  if (row.key_mean.empty()) return;
  std::memcpy(record + sizeof(state), row.key_mean.data(), 2 * row.key_mean.size());
}

// ---- memory ----

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
  s.ends = at->take<uint32_t>(cells_);
  s.status = at->take<StatusCode>(2 * cell_rows);
  const int64_t cell_bytes = int64_t{heads()} * kBlockTokens * (4 * head_dim() + 4);
  s.group_cells =
      static_cast<int32_t>(std::clamp<int64_t>(staging_bytes_ / cell_bytes, kSampleBlocks, cells_));
  const int64_t group_rows = int64_t{s.group_cells} * heads();
  s.staging = at->take<uint16_t>(2 * group_rows * kBlockTokens * head_dim());
  s.decided = at->take<uint8_t[4]>(group_rows * kBlockTokens);
  s.ranges = at->take<WeightedRange>(group_rows);
}

template <class Machine>
Status DeviceCodedRows<Machine>::bind(const DeviceStoreView& view, DeviceFault* fault, GpuStream) {
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
  return upload_tables();
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
    host_layers_[layer].families[i] = {books_ + at, nullptr, 1, book.max_length};
  }
  host_layers_[layer].is_ready = per_slot_ ? 0 : 1;
  return Status::ok();
}

// ---- what the host finds ----

// The entries of a call in their order: the first that fixes a layer brings its codebooks.
template <class Machine>
typename DeviceCodedRows<Machine>::HostPlan DeviceCodedRows<Machine>::host_plan(
    const DeviceWorks& works) const {
  HostPlan plan;
  if (works.moves == nullptr) return plan;
  std::vector<uint8_t> has(layers());
  for (int32_t l = 0; l < layers(); ++l) has[l] = has_books(l) ? 1 : 0;
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (move.to.body_end <= move.from.body_end) continue;
    const int32_t layer = move.layer;
    DeviceLayerStates states = states_;
    states.settle(move);
    uint32_t hint = 0;
    if (!host_->is_raw_layer(layer) && !states.is_fixed(move)) {
      const bool is_ready = has[layer] != 0 && !host_->needs_tokens(layer);
      if (is_ready || move.to.body_end >= kSampleBlocks * kBlockTokens) {
        hint = kFixesEntry;
        if (move.from.body_end > 0) hint |= kRewritesEntry;
        if (has[layer] == 0) {
          plan.samples.push_back(e);
        } else if (per_slot_) {
          plan.fits.push_back(e);
        }
        has[layer] = 1;
      }
    }
    if (states.may_share(move.slot, layer) && move.from.body_end % kBlockTokens != 0) {
      hint |= kRewritesEntry;
    }
    if ((hint & kRewritesEntry) != 0) hint |= static_cast<uint32_t>(plan.saved++) << 8;
    if (hint != 0 && plan.hints.empty()) plan.hints.resize(works.entries());
    if (hint != 0) plan.hints[e] = hint;
  }
  return plan;
}

template <class Machine>
bool DeviceCodedRows<Machine>::may_rewrite(const DeviceWorks& works) const {
  return host_plan(works).saved > 0;
}

template <class Machine>
Status DeviceCodedRows<Machine>::require_capturable(const DeviceWorks& works) const {
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (host_->is_raw_layer(move.layer)) continue;
    DeviceLayerStates states = states_;
    states.settle(move);
    const bool is_ready = host_layers_[move.layer].is_ready != 0 && move.from.body_end == 0;
    if (states.is_fixed(move) || is_ready) continue;
    return Status(StatusCode::kInvalidArgument,
                  "sequence " + std::to_string(move.slot) + ", layer " +
                      std::to_string(move.layer) +
                      ": a step cannot be captured before its codebooks and steps are fixed");
  }
  return Status::ok();
}

// No page but the last has room left for a largest block.
template <class Machine>
int64_t DeviceCodedRows<Machine>::most_pages(const DeviceWorks& works) const {
  const HostPlan host = host_plan(works);
  const CodedShape& shape = device_.shape;
  const int64_t bytes = most(shape.most_block_bytes(), shape.raw_block_bytes(kBlockTokens));
  const int64_t full = int64_t{shape.page_units} * kUnitBytes - bytes + kUnitBytes;
  int64_t pages = 0;
  for (int32_t e = 0; e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (move.to.body_end <= move.from.body_end) continue;
    const bool all = !host.hints.empty() && (host.hints[e] & kFixesEntry) != 0;
    const int32_t first = all ? 0 : move.from.body_end / kBlockTokens;
    const int64_t blocks = int64_t{block_count(move.to.body_end) - first} * 2 * heads();
    pages += std::min(blocks, blocks * bytes / full + 1) + 1;
  }
  return pages;
}

// Cells of an entry.
template <class Machine>
int32_t DeviceCodedRows<Machine>::most_blocks(const DeviceWorks& works,
                                              const HostPlan& host) const {
  const int32_t unit = device_.view.laws.unit_tokens;
  int32_t blocks = (works.most_leaving + 2 * kBlockTokens - unit - 1) / kBlockTokens;
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    const bool all = !host.hints.empty() && (host.hints[e] & kFixesEntry) != 0;
    const int32_t first = all ? 0 : move.from.body_end / kBlockTokens;
    if (e == 0) blocks = 1;
    if (move.to.body_end > move.from.body_end) {
      blocks = most(blocks, block_count(move.to.body_end) - first);
    }
  }
  return most(1, blocks);
}

template <class Machine>
Result<CodedCall> DeviceCodedRows<Machine>::call_of(const DeviceWorks& works,
                                                    int32_t blocks) const {
  CodedCall call = scratch_;
  call.works = works;
  call.works.moves = nullptr;
  call.blocks = blocks;
  if (int64_t{works.entries()} * blocks > cells_) {
    return Status(StatusCode::kInvalidArgument, "coded rows: a call of too many blocks");
  }
  return call;
}

// ---- plan and write ----

// each(group), the cells of a group in staging memory.
template <class Machine>
template <class Each>
Status DeviceCodedRows<Machine>::for_groups(const CodedCall& call, const Each& each) {
  const int32_t cells = call.layer_cells(), all = call.works.num_layers;
  const int32_t layers_at_once = std::max(1, call.group_cells / cells);
  for (int32_t l = 0; l < all; l += layers_at_once) {
    const int32_t layers = std::min(layers_at_once, all - l);
    for (int32_t first = 0; first < cells; first += call.group_cells) {
      Status s = each(CellGroup{l, layers, first, std::min(call.group_cells, cells - first)});
      if (!s) return s;
    }
  }
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::load_group(const CodedCall& call, const CellGroup& group) {
  const int64_t rows = int64_t{group.layers} * group.cells * heads();
  if (Status s = run(GatherTokens{call, group}, rows, 1); !s) return s;
  Status s = run(DecideExponents{call, group}, rows, DecideExponents::kThreads / kWarpLanes);
  if (!s || device_.view.laws.unit_tokens == kBlockTokens) return s;
  const DecodeOldBlocks decode{call, group, kMaxWeightedBlockBytes};
  const int64_t ctas = (int64_t{group.cells} * heads() + 3) / 4;
  const MachineGrid grid = {
      static_cast<int32_t>(std::clamp<int64_t>(ctas, 1, 2 * machine_.sms() / group.layers + 1)),
      2 * group.layers};
  return machine_.launch(
      decode, grid, DecodeOldBlocks::shared_bytes(decode.shape_of_call(host_->format().max_length)),
      DecodeOldBlocks::kThreads);
}

template <class Machine>
Status DeviceCodedRows<Machine>::encode_group(const CodedCall& call, const CellGroup& group,
                                              bool writes) {
  switch (head_dim()) {
    case 64:
      return encode_group_of<2>(call, group, writes);
    case 96:
      return encode_group_of<3>(call, group, writes);
    case 128:
      return encode_group_of<4>(call, group, writes);
    default:
      return encode_group_of<8>(call, group, writes);
  }
}

template <class Machine>
template <int32_t kPer>
Status DeviceCodedRows<Machine>::encode_group_of(const CodedCall& call, const CellGroup& group,
                                                 bool writes) {
  using Encode = EncodeCells<kPer>;
  const int32_t base = Encode::kCallBytes + encode_cta_bytes(WeightedEncode{});
  const int32_t each = encode_warp_bytes(kPer * kWarpLanes);
  const int32_t half = machine_.shared_bytes() / 2 - 1024;
  const int32_t room = half >= base + each ? half : machine_.shared_bytes();
  const int32_t warps = std::min(kWeightedWarps, (room - base) / each);
  const int64_t items = int64_t{2} * group.cells * heads();
  const int64_t ctas = std::clamp<int64_t>((items + warps - 1) / warps, 1,
                                           std::max(1, 2 * machine_.sms() / group.layers));
  return machine_.launch(Encode{call, group, writes},
                         MachineGrid{static_cast<int32_t>(ctas), group.layers}, base + warps * each,
                         warps * kWarpLanes);
}

template <class Machine>
Status DeviceCodedRows<Machine>::plan(const DeviceWorks& works, const DeviceRowCounts& counts) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    states_.settle(works.moves[e]);
  }
  planned_ = host_plan(works);
  if (Status s = prepare(works, planned_); !s) return s;
  Result<CodedCall> made = call_of(works, most_blocks(works, planned_));
  if (!made) return made.status();
  CodedCall& call = *made;
  call.counts = counts;
  call.hints = planned_.hints.empty() ? nullptr : hints_;
  if (Status s = run(OpenEntries{call}, works.entries(), OpenEntries::kThreads); !s) return s;
  machine_.free(saved_);
  saved_ = nullptr;
  if (planned_.saved > 0 && !is_one_group(call)) {
    if (Status s = save(&call); !s) return s;
  }
  Status s = for_groups(call, [&](const CellGroup& group) {
    Status loaded = load_group(call, group);
    return loaded ? encode_group(call, group, false) : loaded;
  });
  if (!s) return s;
  return run(PlaceBlocks{call}, works.entries(), PlaceBlocks::kThreads / kWarpLanes);
}

// Blocks that write() reads once it has begun to write over them.
template <class Machine>
Status DeviceCodedRows<Machine>::save(CodedCall* call) {
  const int64_t blocks = int64_t{planned_.saved} * kMostSavedBlocks * heads() * 2;
  call->saved_bytes = saved_bytes();
  Status s =
      machine_.allocate(blocks * call->saved_bytes, "blocks of layers that are fixed", &saved_);
  if (!s) return s;
  call->saved = static_cast<uint8_t*>(saved_);
  return run(SaveBlocks{*call}, blocks, SaveBlocks::kThreads / kWarpLanes);
}

template <class Machine>
Status DeviceCodedRows<Machine>::write(const DeviceWorks& works, const PageCopy* copies) {
  Result<CodedCall> made = call_of(works, most_blocks(works, planned_));
  if (!made) return made.status();
  CodedCall& call = *made;
  call.copies = copies;
  call.hints = planned_.hints.empty() ? nullptr : hints_;
  call.saved = static_cast<uint8_t*>(saved_);
  call.saved_bytes = saved_bytes();
  const int64_t rows = int64_t{works.entries()} * heads() * 2;
  if (copies != nullptr) {
    Status s = run(RelocateBlocks{call}, rows, RelocateBlocks::kThreads / kWarpLanes);
    if (!s) return s;
  }
  if (Status s = run(ResolvePlaces{call}, rows * call.blocks, ResolvePlaces::kThreads); !s) {
    return s;
  }
  const bool is_loaded = is_one_group(call);
  Status s = for_groups(call, [&](const CellGroup& group) {
    if (!is_loaded) {
      if (Status loaded = load_group(call, group); !loaded) return loaded;
    }
    Status encoded = encode_group(call, group, true);
    const int64_t items = int64_t{group.layers} * group.cells * heads() * 2;
    return encoded ? run(WriteRawBlocks{call, group}, items, 1) : encoded;
  });
  if (!s) return s;
  machine_.free(saved_);
  saved_ = nullptr;
  note(works);
  return run(FinishEntries{call}, works.entries(), 1);
}

template <class Machine>
void DeviceCodedRows<Machine>::note(const DeviceWorks& works) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    const LayerMove& move = works.moves[e];
    if (move.to.body_end <= move.from.body_end) continue;
    const uint32_t hint = planned_.hints.empty() ? 0 : planned_.hints[e];
    const bool fixed = (hint & kFixesEntry) != 0 || states_.is_fixed(move);
    states_.note(move, fixed && !host_->is_raw_layer(move.layer), (hint & kRewritesEntry) != 0);
  }
}

// ---- means, steps and codebooks out of tokens ----

template <class Machine>
Status DeviceCodedRows<Machine>::prepare(const DeviceWorks& works, const HostPlan& host) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    const bool makes_books = std::count(host.samples.begin(), host.samples.end(), e) > 0;
    const bool fits = std::count(host.fits.begin(), host.fits.end(), e) > 0;
    if (!makes_books && !fits) continue;
    if (Status s = sample(works, e, makes_books); !s) {
      return s.with_context("sequence " + std::to_string(works.moves[e].slot) + ", layer " +
                            std::to_string(works.moves[e].layer));
    }
  }
  if (host.hints.empty()) return Status::ok();
  return upload(hints_, host.hints);
}

// The first blocks of an entry come to the host.
template <class Machine>
Status DeviceCodedRows<Machine>::sample(const DeviceWorks& works, int32_t entry, bool makes_books) {
  const LayerMove& move = works.moves[entry];
  const int32_t i = entry / works.num_layers;
  DeviceWorks one = works;
  one.slots += i, one.from += entry, one.to += entry;
  one.count = one.num_layers = 1, one.first_layer = move.layer;
  if (one.chunk.k != nullptr) {
    const int64_t skip = int64_t{i} * one.chunk.tokens * heads() * head_dim();
    one.chunk.k += skip, one.chunk.v += skip;
    if (one.chunk.significance != nullptr) one.chunk.significance += i * heads() * one.chunk.stride;
  }
  const int32_t all_blocks = block_count(move.to.body_end);
  Result<CodedCall> call = call_of(one, all_blocks);
  if (!call) return call.status();
  uint32_t* const hint = hints_ + config_.max_sequences * layers();
  call->hints = hint;
  if (Status s = machine_.upload(hint, &kFixesEntry, sizeof(kFixesEntry)); !s) return s;
  if (Status s = run(OpenEntries{*call}, 1, OpenEntries::kThreads); !s) return s;
  const CellGroup group{0, 1, 0, least(kSampleBlocks, all_blocks)};
  if (Status s = load_group(*call, group); !s) return s;
  const auto rows = static_cast<size_t>(group.cells) * heads();
  const size_t block = static_cast<size_t>(kBlockTokens) * head_dim();
  std::vector<uint16_t> x[2];
  std::vector<uint8_t> decided(rows * kBlockTokens * 4);
  for (const Component c : {Component::kKey, Component::kValue}) {
    std::vector<uint16_t>& of = x[static_cast<int32_t>(c)];
    of.resize(rows * block);
    const auto bytes = static_cast<int64_t>(2 * of.size());
    if (Status s = machine_.download(of.data(), call->staged(c, 0), bytes); !s) return s;
  }
  Status s = machine_.download(decided.data(), call->decided, static_cast<int64_t>(decided.size()));
  if (!s) return s;
  std::vector<CodedRows::BlockTokens> tokens;  // [heads, blocks]
  for (int32_t h = 0; h < heads(); ++h) {
    for (int32_t b = 0; b < group.cells; ++b) {
      CodedRows::BlockTokens of;
      of.first = device_.shape.first_of(b);
      of.count = CodedShape::end_of(b, move.to.body_end) - of.first;
      const size_t row = static_cast<size_t>(b) * heads() + h;
      for (int32_t c = 0; c < 2; ++c) {
        const uint16_t* from = x[c].data() + row * block;
        for (int32_t n = 0; n < of.count * head_dim(); ++n)
          of.x[c].push_back(half_to_float(from[n]));
      }
      for (int32_t t = 0; t < of.count; ++t) {
        const uint8_t* word = decided.data() + (row * kBlockTokens + t) * 4;
        of.decided.push_back(
            DecidedExponents::of(word[0] | uint32_t{word[1]} << 8 | uint32_t{word[2]} << 16));
        of.importance.push_back(static_cast<int8_t>(of.decided.back().importance));
      }
      tokens.push_back(std::move(of));
    }
  }
  std::vector<WeightedRow> fitted;
  const int64_t record_bytes = device_.shape.row_byte(1) - device_.shape.row_byte(0);
  std::vector<uint8_t> records(static_cast<size_t>(heads() * record_bytes));
  for (int32_t h = 0; h < heads(); ++h) {
    std::vector<float> keys;
    for (int32_t b = 0; b < group.cells; ++b) {
      const std::vector<float>& of = tokens[h * group.cells + b].x[0];
      keys.insert(keys.end(), of.begin(), of.end());
    }
    Result<WeightedRow> row = host_->fit_row(move.layer, h, keys);
    const Status usable = row && per_slot_ ? weighted_key_channels(*row).status() : row.status();
    if (!usable) return usable.with_context("kv_head " + std::to_string(h));
    put_record(*row, records.data() + h * record_bytes);
    fitted.push_back(std::move(*row));
  }
  if (per_slot_) {
    if (Status uploaded = upload(records_, records); !uploaded) return uploaded;
    const MakeRowTables make{device_, records_, record_bytes, move.slot, 1, move.layer, 1};
    Status made = run(make, heads(), MakeRowTables::kThreads / kWarpLanes);
    if (!made) return made;
  }
  return makes_books ? make_books(move.layer, fitted, tokens) : Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::make_books(int32_t layer, const std::vector<WeightedRow>& rows,
                                            const std::vector<CodedRows::BlockTokens>& tokens) {
  std::vector<CodedRows::BlockCodes> samples(rows.size());
  LayerSample sample;
  const size_t blocks = tokens.size() / rows.size();
  for (size_t h = 0; h < rows.size(); ++h) {
    for (size_t b = 0; b < blocks; ++b) {
      CodedRows::BlockCodes codes;
      Status s = host_->quantize(rows[h], tokens[h * blocks + b], &codes);
      if (!s) return s.with_context("kv_head " + std::to_string(h));
      for (int32_t c = 0; c < 2; ++c) {
        samples[h].codes[c].insert(samples[h].codes[c].end(), codes.codes[c].begin(),
                                   codes.codes[c].end());
      }
    }
    for (int32_t c = 0; c < 2; ++c) {
      const auto count = static_cast<int64_t>(samples[h].codes[c].size()) / head_dim();
      sample.rows[c].push_back({samples[h].codes[c].data(), count});
    }
  }
  Result<LayerBooks> books = make_layer_books(host_->format(), head_dim(), sample);
  if (!books) return books.status();
  host_->set_books(layer, *books);
  Status s = upload_books(layer);
  return s ? upload_layers() : s;
}

// ---- reading ----

template <class Machine>
Status DeviceCodedRows<Machine>::read_to(const ReadTarget& to) {
  const int64_t elements = int64_t{to.range.count()} * heads() * head_dim();
  if (Status s = run(ReadRawTokens{device_, to}, elements, 1024); !s) return s;
  const DeviceLayer& layer = host_layers_[to.layer];
  if (layer.families[0].books == nullptr) return Status::ok();
  const MakeReadRanges make{device_, to, scratch_.ranges};
  if (Status s = run(make, 2 * heads(), MakeReadRanges::kThreads); !s) return s;
  for (const Component c : {Component::kKey, Component::kValue}) {
    WeightedDecode decode;
    decode.bytes = device_.view.pages.base;
    decode.size = device_.pool_bytes;
    decode.places = reinterpret_cast<const WeightedPlace*>(directory(to.slot, to.layer, c));
    decode.ranges = scratch_.ranges + (c == Component::kKey ? 0 : heads());
    decode.status = scratch_.status;
    const DeviceRowTables& t = device_.tables;
    decode.rows = {t.key_scales, t.key_means, t.value_steps, layer.rope, t.rows, head_dim()};
    decode.family = layer.families[static_cast<int32_t>(c)];
    decode.component = c;
    decode.dtype = to.dtype;
    decode.token_stride = int64_t{heads()} * head_dim();
    decode.num_ranges = heads();
    decode.most_blocks = block_count(to.range.end) - to.range.first / kBlockTokens;
    if (Status s = decode.validate(); !s) return s;
    const int32_t base = weighted_region_bytes(decode) + weighted_decode_cta_bytes(decode) + 16;
    const int32_t each = weighted_decode_warp_bytes(decode);
    const int32_t warps = std::min(kDecodeWarps, (machine_.shared_bytes() - base) / each);
    const int64_t items = int64_t{decode.num_ranges} * decode.most_blocks;
    const auto ctas =
        static_cast<int32_t>(std::clamp<int64_t>((items + warps - 1) / warps, 1, machine_.sms()));
    Status s = machine_.launch(DecodeRanges{decode}, MachineGrid{ctas, 1}, base + warps * each,
                               warps * kWarpLanes);
    if (!s) return s;
  }
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::read(const LayerMove& at, Positions range, DType dtype, void* k,
                                      void* v) {
  return read_to({at.slot, at.layer, at.from.body_end, range, dtype, static_cast<uint16_t*>(k),
                  static_cast<uint16_t*>(v)});
}

// The tokens of less than a block fit into staging memory.
template <class Machine>
Status DeviceCodedRows<Machine>::restore(const LayerMove& move, Positions range) {
  if (range.count() <= 0) return Status::ok();
  const ReadTarget to = {move.slot,
                         move.layer,
                         move.from.body_end,
                         range,
                         DType::kFloat16,
                         scratch_.staged(Component::kKey, 0),
                         scratch_.staged(Component::kValue, 0)};
  if (Status s = read_to(to); !s) return s;
  return run(RestoreTokens{device_, to}, int64_t{range.count()} * heads() * head_dim(), 1024);
}

// ---- truncation, fork, codebooks from elsewhere ----

template <class Machine>
Status DeviceCodedRows<Machine>::cut_counts(const DeviceWorks& works,
                                            const DeviceRowCounts& counts) {
  Result<CodedCall> call = call_of(works, 1);
  if (!call) return call.status();
  call->counts = counts;
  return run(CutCounts{*call}, works.entries(), CutCounts::kThreads);
}

template <class Machine>
Status DeviceCodedRows<Machine>::cut(const DeviceWorks& works, const PageCopy* copies) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    states_.settle(works.moves[e]);
  }
  for (const int32_t slot : std::exchange(copies_, {})) {
    const MakeRowTables make{device_, nullptr, 0, slot, 1, 0, layers()};
    Status s = run(make, layers() * heads(), MakeRowTables::kThreads / kWarpLanes);
    if (!s) return s;
  }
  if (copies == nullptr) return Status::ok();
  Result<CodedCall> call = call_of(works, 1);
  if (!call) return call.status();
  call->copies = copies;
  return run(RelocateBlocks{*call}, int64_t{works.entries()} * heads() * 2,
             RelocateBlocks::kThreads / kWarpLanes);
}

template <class Machine>
Status DeviceCodedRows<Machine>::download_shared(RowFormat* host) {
  auto* const to = static_cast<CodedRows*>(host);
  for (int32_t l = 0; to != host_ && l < layers(); ++l) to->set_books(l, host_->books(l));
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::upload_shared(const RowFormat& host) {
  const auto& from = static_cast<const CodedRows&>(host);
  for (int32_t l = 0; l < layers(); ++l) {
    if (from.books(l).empty() || host_layers_[l].families[0].books != nullptr) continue;
    if (&from != host_) host_->set_books(l, from.books(l));
    if (Status s = upload_books(l); !s) return s;
  }
  if (Status s = upload_layers(); !s) return s;
  for (int32_t slot = 0; slot < config_.max_sequences; ++slot) {
    for (int32_t l = 0; l < layers(); ++l) {
      int32_t fixed = 0;
      Status s = machine_.download(&fixed, device_.state<int32_t>(slot, l, 0), sizeof(fixed));
      if (!s) return s;
      states_.import(slot, l, fixed != 0);
    }
  }
  if (!per_slot_) return Status::ok();
  const MakeRowTables make{device_, nullptr, 0, 0, config_.max_sequences, 0, layers()};
  return run(make, int64_t{config_.max_sequences} * layers() * heads(),
             MakeRowTables::kThreads / kWarpLanes);
}

}  // namespace tierkv::store
