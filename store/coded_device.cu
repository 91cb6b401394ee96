#include "store/coded_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "codec/cuda_device.cuh"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}
Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}
Status no_scores() {
  return unsupported("a coded cache keeps no scores: it has no tiers");
}

// What the host can do and a device cannot.
Status check_device_config(const KvStoreConfig& c) {
  if (c.layout.head_dim > kSliceDims) return unsupported("coded: head_dim 256 on a device");
  if (c.layout.group_size() > kCodedColumns) {
    return unsupported("coded: more than 8 query heads a kv head on a device");
  }
  if (c.coded.codebooks == CodebookSource::kDevice) {
    return unsupported("coded.codebooks: kDevice is not there yet");
  }
  if (c.coded.codebooks != CodebookSource::kGiven) return Status::ok();
  const CodedBooks books = CodedBooks::of_config(c);
  for (const Component part : {Component::kKey, Component::kValue}) {
    const std::vector<Codebook>& list = books.of(0, part);
    if (list.size() != 1) return unsupported("coded.given: one codebook a component on a device");
    if (list.front().mode != BlockMode::kPair) {
      return unsupported("coded.given: only codes in pairs on a device");
    }
  }
  const int32_t streams = books.of(0, Component::kKey).front().streams_per_lane;
  return streams == books.of(0, Component::kValue).front().streams_per_lane
             ? Status::ok()
             : unsupported("coded.given: keys and values with different streams per lane");
}

Result<bool> is_capturing(GpuStream stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &capture);
  if (error != cudaSuccess) return cuda_status(error, "capture");
  return capture != cudaStreamCaptureStatusNone;
}

// A device needs the arrays of a codebook's scalars.
AttentionConfig raw_attention(const KvStoreConfig& c) {
  AttentionConfig a;
  a.num_layers = c.layout.num_layers;
  a.num_q_heads = c.layout.num_q_heads;
  a.num_kv_heads = c.layout.num_kv_heads;
  a.head_dim = c.layout.head_dim;
  a.sm_scale = c.layout.sm_scale;
  a.page_bytes = coded_page_bytes(c.layout.head_dim);
  a.num_tiers = 1;
  a.tiers[0] = {kRawSide, raw_tier()};
  return a;
}

}  // namespace

Result<std::unique_ptr<CodedDeviceStore>> CodedDeviceStore::make(const KvStoreConfig& config,
                                                                 GpuStream stream) {
  Result<std::unique_ptr<CodedHostStore>> mirror = CodedHostStore::make(config);
  if (!mirror) return mirror.status();
  if (Status s = check_device_config(config); !s) return s;
  std::unique_ptr<CodedDeviceStore> store(new CodedDeviceStore(std::move(*mirror), stream));
  if (Status s = store->allocate(); !s) return s;
  if (Status s = store->allocate_attention(); !s) return s;
  if (Status s = store->upload_books(); !s) return s;
  if (Status s = store->wait(); !s) return s;
  return Result<std::unique_ptr<CodedDeviceStore>>(std::move(store));
}

CodedDeviceStore::~CodedDeviceStore() {
  (void)cudaStreamSynchronize(stream_);
  for (void* p : memory_) (void)cudaFree(p);
}

template <class T>
Status CodedDeviceStore::take(size_t count, T** memory) {
  void* p = nullptr;
  const cudaError_t error = cudaMalloc(&p, std::max<size_t>(count, 1) * sizeof(T));
  if (error == cudaErrorMemoryAllocation) {
    (void)cudaGetLastError();
    return Status(StatusCode::kOutOfRange, "no device memory for the store");
  }
  if (error != cudaSuccess) return cuda_status(error, "create");
  memory_.push_back(p);
  *memory = static_cast<T*>(p);
  return Status::ok();
}

template <class T>
Status CodedDeviceStore::upload(const std::vector<T>& from, const T** to) {
  T* memory = nullptr;
  if (Status s = take(from.size(), &memory); !s) return s;
  *to = memory;
  if (Status s = copy(memory, from.data(), from.size() * sizeof(T)); !s) return s;
  return wait();  // the source goes
}

Status CodedDeviceStore::allocate() {
  const KvStoreConfig& c = config();
  const CodedView& host = mirror_->view_;
  const auto sequences = static_cast<size_t>(c.max_sequences);
  const size_t rows = sequences * host.rows_per_sequence();
  const size_t allocator = allocator_bytes(host.allocator.shape).total;
  const size_t workspace = page_op_workspace_bytes(host.allocator.shape, c.max_sequences);
  uint8_t *pool = nullptr, *tables = nullptr, *scratch = nullptr;
  state_.s = host;
  CodedView& view = state_.s;
  DeviceState& common = state_.common;
  if (Status s = take(host.pages.page_bytes * c.num_pages, &pool); !s) return s;
  if (Status s = take(allocator, &tables); !s) return s;
  if (Status s = take(workspace, &scratch); !s) return s;
  if (Status s = take(sequences, &view.infos); !s) return s;
  if (Status s = take(rows * host.max_blocks, &view.keys); !s) return s;
  if (Status s = take(rows * host.max_blocks, &view.values); !s) return s;
  if (Status s = take(rows * host.head_dim, &view.key_means); !s) return s;
  if (Status s = take(rows * host.head_dim, &view.value_means); !s) return s;
  if (Status s = take(1, &common.failure); !s) return s;
  if (Status s = take(sequences, &common.batch); !s) return s;
  if (Status s = take(sequences, &common.before); !s) return s;
  if (Status s = take(sequences, &common.entry_counts); !s) return s;
  if (Status s = take(rows, &common.row_counts); !s) return s;
  if (Status s = take(1, &common.report); !s) return s;
  if (Status s = take(1, &common.other_report); !s) return s;
  if (Status s = take(rows, &common.appended); !s) return s;
  const Result<PageAllocator> a = make_page_allocator(host.allocator.shape, tables, allocator);
  if (!a) return a.status();
  view.allocator = *a;
  view.pages.base = pool;
  view.pages.records = a->records;
  allocator_memory_ = tables;
  op_workspace_ = {scratch, workspace};
  // What the kernels of prompts look at.
  common.s.allocator = *a;
  common.s.pages = view.pages;
  common.s.infos = view.infos;
  common.s.num_kv_heads = view.num_kv_heads;
  const Result<PageLayout> raw = make_page_layout(raw_tier(), view.head_dim, view.pages.page_bytes);
  if (!raw) return raw.status();
  common.s.layouts[kRawSide] = *raw;
  common.max_tokens = c.max_tokens;
  if (Status s = upload(c.coded.key_steps, &state_.key_steps); !s) return s;
  if (Status s = upload(c.coded.value_steps, &state_.value_steps); !s) return s;
  if (Status s = copy(common.failure, &kNoFailure, sizeof(kNoFailure)); !s) return s;
  return initialize_device(*a, stream_);
}

Status CodedDeviceStore::allocate_attention() {
  const KvStoreConfig& c = config();
  raw_attention_ = raw_attention(c);
  if (Status s = raw_attention_.validate(); !s) return s;
  const Result<AttentionGrid> grid = attention_grid(raw_attention_);
  if (!grid) return grid.status();
  raw_grid_ = *grid;
  raw_workspace_.bytes = attention_workspace_bytes(raw_attention_, raw_grid_, c.max_sequences);
  const Result<DeviceLimits> limits = device_limits();
  if (!limits) return limits.status();
  // As coded_attention_workspace_bytes(), for any codebooks: a warp or a row each has a partial.
  CodedAttention largest;
  largest.num_rows = c.max_sequences * c.layout.num_kv_heads;
  largest.columns = c.layout.group_size();
  largest.head_dim = c.layout.head_dim;
  CodedAttentionGrid any;
  any.num_ctas = limits->sms;
  const size_t rows = static_cast<size_t>(largest.num_rows);
  const size_t queries = static_cast<size_t>(c.max_sequences) * c.layout.num_q_heads;
  uint8_t *raw = nullptr, *coded = nullptr;
  if (Status s = take(raw_workspace_.bytes, &raw); !s) return s;
  if (Status s = take(coded_attention_workspace_bytes(largest, any), &coded); !s) return s;
  if (Status s = take(rows, &rows_); !s) return s;
  if (Status s = take(rows, &row_status_); !s) return s;
  for (int32_t part = 0; part < 2; ++part) {
    if (Status s = take(queries * c.layout.head_dim, &part_out_[part]); !s) return s;
    if (Status s = take(queries, &part_lse_[part]); !s) return s;
  }
  raw_workspace_.memory = raw;
  coded_workspace_ = coded;
  return cuda_status(cudaMemsetAsync(raw, 0, raw_workspace_.bytes, stream_), "create");
}

// Once the mirror has codebooks they never change.
Status CodedDeviceStore::upload_books() {
  if (!mirror_->books_.ready() || !books_.empty()) return Status::ok();
  std::vector<DeviceCodebook> books;
  for (int32_t i = 0; i < 2 * config().layout.num_layers; ++i) {
    const Codebook& book = mirror_->books_.of(i / 2, static_cast<Component>(i % 2)).front();
    DeviceCodebook device = device_codebook(book);
    if (Status s = upload(device_table(book), &device.table); !s) return s;
    if (Status s = upload(encoder_words(book), &device.words); !s) return s;
    if (Status s = upload(book.cheapest, &device.cheapest); !s) return s;
    books.push_back(device);
  }
  if (Status s = upload(books, &state_.books); !s) return s;
  books_ = std::move(books);
  return Status::ok();
}

Status CodedDeviceStore::set_batch(DeviceCall call, const Slots& slots, int32_t tokens) {
  batch_ = slots;
  return begin_batch(state_.common, {call, static_cast<int32_t>(slots.size()), tokens},
                     slots.data(), stream_);
}

Status CodedDeviceStore::use_batch(DeviceCall call, const Slots& slots) {
  return slots == batch_ ? Status::ok() : set_batch(call, slots, 0);
}

Status CodedDeviceStore::run(const PageOp& op) {
  return run_page_op_device(state_.s.allocator, op, op_workspace_, stream_);
}

Result<SequenceId> CodedDeviceStore::add_sequence() {
  const Result<int32_t> slot = table().free_slot();
  if (!slot) return slot.status();
  const Slots slots = {*slot};
  if (Status s = set_batch(DeviceCall::kNone, slots, 0); !s) return s;
  if (Status s = run(PageOp::open(batch(slots), state_.common.other_report)); !s) return s;
  if (Status s = reset_sequences(state_.common, 1, stream_); !s) return s;
  return table().claim(*slot, SequencePhase::kPrompt, SequenceInfo{});
}

Status CodedDeviceStore::release(SequenceId sequence) {
  const Result<int32_t> slot = table().slot_of(sequence);
  if (!slot) return slot.status();
  const Slots slots = {*slot};
  if (Status s = set_batch(DeviceCall::kNone, slots, 0); !s) return s;
  if (Status s = run(PageOp::release(batch(slots), state_.common.other_report)); !s) return s;
  table().release(*slot);
  return Status::ok();
}

Status CodedDeviceStore::begin_prompt(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_prompt(sequences, tokens);
  if (!slots) return slots.status();
  const auto count = static_cast<int32_t>(slots->size());
  const DeviceState& d = state_.common;
  if (Status s = set_batch(DeviceCall::kBeginPrompt, *slots, tokens); !s) return s;
  if (Status s = plan_chunk(d, count, tokens, stream_); !s) return s;
  if (Status s = run(PageOp::reserve(batch(*slots), d.entry_counts, d.report)); !s) return s;
  // Where nothing was reserved there is nothing to keep: that operation then refuses itself.
  if (Status s = run(PageOp::keep(batch(*slots), d.row_counts, d.other_report)); !s) return s;
  if (Status s = finish_chunk(d, count, tokens, stream_); !s) return s;
  planned_.clear();
  for (const int32_t slot : *slots) {
    table().set_info(slot, {table().info(slot).num_tokens + tokens, 0, kInPrompt, 0});
  }
  return Status::ok();
}

Status CodedDeviceStore::append(const AppendCall& call) {
  const Result<Slots> slots = table().admit_append(call);
  if (!slots) return slots.status();
  const DType dtype = config().layout.dtype;
  const auto is_aligned = [dtype](const void* p) {
    return reinterpret_cast<uintptr_t>(p) % static_cast<uintptr_t>(dtype_bytes(dtype)) == 0;
  };
  if (!is_aligned(call.k) || !is_aligned(call.v)) return invalid("k or v is misaligned");
  if (Status s = use_batch(DeviceCall::kAppend, *slots); !s) return s;
  const DeviceTokens tokens = {call.k,      call.v,    dtype, static_cast<int32_t>(slots->size()),
                               call.tokens, call.layer};
  if (Status s = append_coded(state_, tokens, stream_); !s) return s;
  for (const int32_t slot : *slots) {
    table().set_layer_tokens(slot, call.layer, table().info(slot).num_tokens);
  }
  return Status::ok();
}

Status CodedDeviceStore::score_prompt(const PromptScores&) {
  return no_scores();
}
Status CodedDeviceStore::update_scores(const ScoreUpdate&) {
  return no_scores();
}

// The step that makes the store's codebooks is the mirror's.
Status CodedDeviceStore::begin_step(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  if (books_.empty()) {
    const Result<bool> capturing = is_capturing(stream_);
    if (!capturing) return capturing.status();
    if (*capturing) return invalid("a step is captured before the store has codebooks");
    const bool fills = std::any_of(slots->begin(), slots->end(), [&](int32_t slot) {
      return coded_step_fills_block(table().info(slot), tokens, state_.s.window_tokens);
    });
    if (fills) {
      if (Status s = to_mirror(*slots, Content::kPages); !s) return s;
      if (Status s = mirror_->begin_step(sequences, tokens); !s) return s;
      return from_mirror(*slots);
    }
  }
  return begin_step_on_device(*slots, tokens);
}

Status CodedDeviceStore::begin_step_on_device(const Slots& slots, int32_t tokens) {
  const auto count = static_cast<int32_t>(slots.size());
  if (Status s = set_batch(DeviceCall::kBeginStep, slots, tokens); !s) return s;
  if (Status s = plan_coded_step(state_, count, tokens, stream_); !s) return s;
  const DeviceState& d = state_.common;
  if (Status s = run(PageOp::append(batch(slots), d.row_counts, d.report)); !s) return s;
  if (Status s = apply_coded_step(state_, count, tokens, stream_); !s) return s;
  planned_.clear();  // its token counts have changed
  for (const int32_t slot : slots) {
    table().set_info(slot,
                     coded_info_after_step(table().info(slot), tokens, state_.s.window_tokens));
  }
  return Status::ok();
}

Status CodedDeviceStore::note_replay(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  for (const int32_t slot : *slots) {
    table().set_info(slot,
                     coded_info_after_step(table().info(slot), tokens, state_.s.window_tokens));
    table().set_complete(slot);
  }
  batch_ = *slots;
  planned_.clear();
  return Status::ok();
}

Status CodedDeviceStore::attend_raw(const AttendRequest& request, const Slots& slots) {
  const AttentionBatch batch = {state_.common.batch, static_cast<int32_t>(slots.size())};
  if (slots != planned_) {
    // Another layout of the workspace, which must begin with zeros.
    if (planned_count_ != 0 && slots.size() != planned_count_) {
      const cudaError_t error =
          cudaMemsetAsync(raw_workspace_.memory, 0, raw_workspace_.bytes, stream_);
      if (error != cudaSuccess) return cuda_status(error, "attend");
    }
    planned_count_ = slots.size();
    if (Status s = plan_attention(raw_attention_, raw_grid_, state_.s.allocator.table(), batch,
                                  raw_workspace_, stream_);
        !s) {
      return s;
    }
    planned_ = slots;
  }
  AttendCall call;
  call.table = state_.s.allocator.table();
  call.pages = state_.s.pages;
  call.batch = batch;
  call.layer = request.layer;
  call.q = request.q;
  call.out = part_out_[1];
  call.lse = part_lse_[1];
  return tierkv::attend(raw_attention_, raw_grid_, call, raw_workspace_, stream_);
}

Status CodedDeviceStore::attend_blocks(const AttendRequest& request, const Slots& slots) {
  const CodedView& s = state_.s;
  const auto count = static_cast<int32_t>(slots.size());
  if (Status t = plan_coded_rows(state_, request.layer, count, rows_, stream_); !t) return t;
  int64_t items = 0;
  for (const int32_t slot : slots) {
    items += int64_t{table().info(slot).window_first / kBlockTokens} * s.num_kv_heads;
  }
  CodedAttention call;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const bool key = c == Component::kKey;
    CodedComponent& component = key ? call.keys : call.values;
    component.bytes = s.pages.base;
    component.blocks = key ? s.keys : s.values;
    component.steps = key ? state_.key_steps : state_.value_steps;
    component.size = s.pages.page_bytes * s.pages.num_pages;
    component.codebook = books_[2 * request.layer + (key ? 0 : 1)];
  }
  call.rows = rows_;
  call.q = request.q;
  call.out = part_out_[0];
  call.lse = part_lse_[0];
  call.row_status = row_status_;
  call.workspace = coded_workspace_;
  call.num_rows = count * s.num_kv_heads;
  call.num_items = static_cast<int32_t>(items);
  call.num_blocks = s.allocator.shape.table.num_rows() * s.max_blocks;
  call.num_steps = s.rows_per_sequence();
  call.columns = config().layout.group_size();
  call.head_dim = s.head_dim;
  call.sm_scale = static_cast<float>(config().layout.sm_scale);
  call.max_block_bytes = most_coded_block_bytes(s.head_dim);
  const Result<CodedAttentionGrid> grid = coded_attention_grid(call);
  if (!grid) return grid.status();
  return attend_coded(call, *grid, stream_);
}

Status CodedDeviceStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table().admit_attend(request);
  if (!slots) return slots.status();
  if (request.probabilities != nullptr) {
    return unsupported("probabilities of a coded cache on a device");
  }
  const Result<bool> capturing = is_capturing(stream_);
  if (!capturing) return capturing.status();
  if (*capturing) {
    return unsupported("attend() of a coded cache is not captured: its grid follows the blocks");
  }
  if (Status s = use_batch(DeviceCall::kAttend, *slots); !s) return s;
  if (Status s = attend_raw(request, *slots); !s) return s;
  const bool coded = std::any_of(slots->begin(), slots->end(),
                                 [&](int32_t slot) { return table().info(slot).window_first > 0; });
  if (coded) {
    if (Status s = attend_blocks(request, *slots); !s) return s;
  }
  CodedJoin join;
  join.q = static_cast<const uint16_t*>(request.q);
  join.coded_out = coded ? part_out_[0] : nullptr;
  join.coded_lse = part_lse_[0];
  join.status = row_status_;
  join.raw_out = part_out_[1];
  join.raw_lse = part_lse_[1];
  join.out = static_cast<uint16_t*>(request.out);
  join.lse = request.lse;
  join.count = static_cast<int32_t>(slots->size());
  join.layer = request.layer;
  join.group = config().layout.group_size();
  join.sm_scale = static_cast<float>(config().layout.sm_scale);
  return join_coded(state_, join, stream_);
}

}  // namespace tierkv
