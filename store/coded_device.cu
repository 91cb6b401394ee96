#include "store/coded_device.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>

#include "codec/cuda_device.cuh"
#include "store/stream_capture.cuh"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}
Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}

// What the host can do and a device cannot.
Status check_device_config(const KvStoreConfig& c) {
  if (c.coded.codebooks != CodebookSource::kGiven) return Status::ok();
  const CodedBooks books = CodedBooks::of_config(c);
  const int32_t streams = books.of(0, Component::kKey).front().streams_per_lane;
  for (const Component part : {Component::kKey, Component::kValue}) {
    for (const Codebook& book : books.of(0, part)) {
      if (book.mode != BlockMode::kPair) {
        return unsupported("coded.given: only codes in pairs on a device");
      }
      if (book.streams_per_lane != streams) {
        return unsupported("coded.given: codebooks with different streams per lane on a device");
      }
    }
  }
  return Status::ok();
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
  if (Status s = store->check_attention(); !s) return s.with_context("coded.given");
  if (Status s = store->wait(); !s) return s;
  return Result<std::unique_ptr<CodedDeviceStore>>(std::move(store));
}

CodedDeviceStore::~CodedDeviceStore() {
  (void)cudaStreamSynchronize(stream_);
  for (void* p : memory_) (void)cudaFree(p);
}

Status CodedDeviceStore::take_bytes(size_t bytes, void** memory) {
  if (Status s = device_allocate(bytes, "create", memory); !s) return s;
  memory_.push_back(*memory);
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
  if (Status s = take(rows, &view.key_steps); !s) return s;
  if (Status s = take(rows, &view.value_steps); !s) return s;
  if (Status s = take(1, &common.failure); !s) return s;
  if (Status s = take(kCallMemories * sequences, &batches_); !s) return s;
  if (Status s = take(sequences, &common.before); !s) return s;
  if (Status s = take(sequences, &common.entry_counts); !s) return s;
  if (Status s = take(rows, &common.row_counts); !s) return s;
  if (Status s = take(1, &common.report); !s) return s;
  if (Status s = take(1, &common.other_report); !s) return s;
  if (Status s = take(rows, &common.appended); !s) return s;
  if (Status s = take(1, &fixed_count_); !s) return s;
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
  if (Status s = upload(std::vector<uint32_t>(2), &empty_table_); !s) return s;
  if (c.coded.steps == StepSource::kGiven) {
    if (Status s = upload(c.coded.key_steps, &state_.given_key_steps); !s) return s;
    if (Status s = upload(c.coded.value_steps, &state_.given_value_steps); !s) return s;
  } else {
    if (Status s = take(4 * rows, &state_.ranges); !s) return s;
  }
  if (c.coded.means == MeanSource::kGiven) {
    const auto rounded = [](std::vector<float> means) {
      for (float& x : means) x = half_to_float(float_to_half(x));
      return means;
    };
    if (Status s = upload(rounded(c.coded.key_means), &state_.given_key_means); !s) return s;
    if (Status s = upload(rounded(c.coded.value_means), &state_.given_value_means); !s) return s;
  }
  // Rows in their prompts have none; attention looks at them all the same.
  for (float* steps : {view.key_steps, view.value_steps}) {
    const cudaError_t error = cudaMemsetAsync(steps, 0, rows * sizeof(float), stream_);
    if (error != cudaSuccess) return cuda_status(error, "create");
  }
  if (Status s = copy(common.failure, &kNoFailure, sizeof(kNoFailure)); !s) return s;
  return initialize_device(*a, stream_);
}

// Once the mirror has codebooks they never change.
Status CodedDeviceStore::upload_books() {
  if (!mirror_->books_.ready() || !books_.empty()) return Status::ok();
  const CodedBooks& from = mirror_->books_;
  state_.num_key_books = static_cast<int32_t>(from.of(0, Component::kKey).size());
  state_.num_value_books = static_cast<int32_t>(from.of(0, Component::kValue).size());
  const bool shared = config().coded.codebooks == CodebookSource::kGiven;  // by all layers
  std::vector<DeviceCodebook> books;
  for (int32_t layer = 0; layer < config().layout.num_layers; ++layer) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      for (const Codebook& book : from.of(layer, c)) {
        if (shared && layer > 0) {
          books.push_back(books[books.size() - static_cast<size_t>(state_.num_books())]);
          continue;
        }
        DeviceCodebook device = device_codebook(book);
        if (Status s = upload(device_table(book), &device.table); !s) return s;
        if (Status s = upload(encoder_words(book), &device.words); !s) return s;
        if (Status s = upload(book.cheapest, &device.cheapest); !s) return s;
        books.push_back(device);
      }
    }
  }
  if (Status s = upload(books, &state_.books); !s) return s;
  books_ = std::move(books);
  return Status::ok();
}

Status CodedDeviceStore::enter_call() {
  const Result<uint64_t> capture = capture_id(stream_);
  if (!capture) return capture.status();
  calls_.enter(*capture);
  state_.common.batch = batches_ + int64_t{calls_.index()} * config().max_sequences;
  return Status::ok();
}

Status CodedDeviceStore::set_batch(DeviceCall call, const Slots& slots, int32_t tokens) {
  if (Status s = enter_call(); !s) return s;
  calls_.wrote_batch(slots);
  return begin_batch(state_.common, {call, static_cast<int32_t>(slots.size()), tokens},
                     slots.data(), stream_);
}

Status CodedDeviceStore::use_batch(DeviceCall call, const Slots& slots) {
  if (Status s = enter_call(); !s) return s;
  return calls_.has_batch(slots) ? Status::ok() : set_batch(call, slots, 0);
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
  calls_.forget_plans();  // perhaps for a sequence that had the slot
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
  if (Status s = check_coded_prompt(tokens); !s) return s;
  const auto count = static_cast<int32_t>(slots->size());
  const DeviceState& d = state_.common;
  if (Status s = set_batch(DeviceCall::kBeginPrompt, *slots, tokens); !s) return s;
  if (Status s = plan_chunk(d, count, tokens, stream_); !s) return s;
  if (Status s = run(PageOp::reserve(batch(*slots), d.entry_counts, d.report)); !s) return s;
  // Where nothing was reserved there is nothing to keep: that operation then refuses itself.
  if (Status s = run(PageOp::keep(batch(*slots), d.row_counts, d.other_report)); !s) return s;
  if (Status s = finish_chunk(d, count, tokens, stream_); !s) return s;
  calls_.forget_plans();
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

Status CodedDeviceStore::score_prompt(const PromptScores& scores) {
  if (!state_.s.fixed.format.any()) return no_coded_scores();
  const Result<Slots> slots = table().admit_scores(scores);
  if (!slots) return slots.status();
  if (Status s = use_batch(DeviceCall::kScorePrompt, *slots); !s) return s;
  const DeviceScores x = {scores.significance, scores.stride, static_cast<int32_t>(slots->size()),
                          scores.layer, 0};
  return tierkv::score_prompt(state_.common, x, stream_);
}
Status CodedDeviceStore::update_scores(const ScoreUpdate&) {
  return no_coded_scores();
}

// The step that makes the store's codebooks is the mirror's.
Status CodedDeviceStore::begin_step(SequenceList sequences, int32_t tokens) {
  const Result<Slots> slots = table().admit_begin_step(sequences, tokens);
  if (!slots) return slots.status();
  if (books_.empty()) {
    const Result<uint64_t> capture = capture_id(stream_);
    if (!capture) return capture.status();
    if (*capture != 0) return invalid("a step is captured before the store has codebooks");
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
  calls_.forget_plans();  // its token counts have changed
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
  calls_.forget_plans();
  return Status::ok();
}

}  // namespace tierkv
