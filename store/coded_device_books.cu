// The end of a prompt of a coded store's device back end, and the codebooks that the first one
// makes: histograms on the device, codebooks on the host, as in KVComp section 3.1.2, or on the
// device as well.

#include <cuda_runtime.h>

#include <algorithm>

#include "codec/codebook_batch.h"
#include "codec/cuda_device.cuh"
#include "store/coded_device.h"

namespace tierkv {
namespace {

// Device memory for the time of a call.
class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { (void)cudaFree(memory_); }
  Status take(size_t bytes) { return device_allocate(bytes, "end_prompt", &memory_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(memory_);
  }

 private:
  void* memory_ = nullptr;
};

}  // namespace

Status CodedDeviceStore::make_books(const PromptEnd& prompt) {
  const int32_t books = 2 * config().layout.num_layers;
  const size_t bytes = 2 * books * kHistogramCounts * sizeof(uint32_t);
  Scratch counts;
  if (Status t = counts.take(bytes); !t) return t;
  const cudaError_t error = cudaMemsetAsync(counts.as<void>(), 0, bytes, stream_);
  if (error != cudaSuccess) return cuda_status(error, "end_prompt");
  auto* const pairs = counts.as<uint32_t>();
  uint32_t* const wide = pairs + int64_t{books} * kHistogramCounts;
  if (Status t =
          count_prompt_codes(state_, {pairs, wide, prompt.count, prompt.most_blocks}, stream_);
      !t) {
    return t;
  }
  DeviceFailure failure;
  if (Status t = copy(&failure, state_.common.failure, sizeof(failure)); !t) return t;
  if (Status t = wait(); !t) return t;
  if (failure.status != StatusCode::kOk) return Status::ok();  // take_status() will tell
  return config().coded.codebooks == CodebookSource::kDevice ? build_books_here(pairs, wide)
                                                             : build_books_on_host(pairs, wide);
}

// pairs, wide: device, [2][num_layers][kHistogramCounts].
Status CodedDeviceStore::build_books_on_host(const uint32_t* pairs, const uint32_t* wide) {
  const int32_t layers = config().layout.num_layers;
  std::vector<CodeHistogram> histograms;
  std::vector<uint32_t> read(2 * kHistogramCounts);
  constexpr size_t kBytes = kHistogramCounts * sizeof(uint32_t);
  for (int32_t i = 0; i < 2 * layers; ++i) {
    const int64_t at = int64_t{i % 2 * layers + i / 2} * kHistogramCounts;
    if (Status t = copy(read.data(), pairs + at, kBytes); !t) return t;
    if (Status t = copy(read.data() + kHistogramCounts, wide + at, kBytes); !t) return t;
    if (Status t = wait(); !t) return t;
    histograms.push_back(histogram_of_counts(static_cast<Component>(i % 2), state_.s.head_dim,
                                             read.data(), read.data() + kHistogramCounts));
  }
  Result<CodedBooks> books = CodedBooks::of_histograms(config(), histograms);
  if (!books) return books.status();
  mirror_->books_ = std::move(*books);
  return upload_books();
}

// The same. The mirror gets the code lengths, from which all else follows.
Status CodedDeviceStore::build_books_here(const uint32_t* pairs, const uint32_t* wide) {
  const CodedConfig& coded = config().coded;
  const int32_t layers = config().layout.num_layers, books = 2 * layers;
  DeviceCodebook* device_books = nullptr;
  CodebookBuild call;
  Scratch lengths, workspace;
  if (Status s = take(books, &device_books); !s) return s;
  if (Status s = take(size_t(books) << coded.max_length, &call.tables); !s) return s;
  if (Status s = take(size_t(books) * kMaxSymbols, &call.words); !s) return s;
  if (Status s = take(size_t(books) * kCheapestEntries, &call.cheapest); !s) return s;
  if (Status s = lengths.take(size_t(books) * kMaxSymbols); !s) return s;
  if (Status s = workspace.take(codebook_workspace_bytes(layers)); !s) return s;
  call.lengths = lengths.as<uint8_t>();
  call.workspace = workspace.as<void>();
  call.num_books = layers;
  call.book_stride = 2;
  call.max_length = coded.max_length;
  call.streams_per_lane = coded.streams_per_lane;
  for (int32_t c = 0; c < 2; ++c) {
    CodebookBuild part = call;
    const int64_t first = int64_t{c} * layers;
    part.pairs = pairs + first * kHistogramCounts;
    part.wide = wide + first * kHistogramCounts;
    part.books = device_books + c;
    part.tables += first << coded.max_length;
    part.words += first * kMaxSymbols;
    part.cheapest += first * kCheapestEntries;
    part.lengths += first * kMaxSymbols;
    part.component = static_cast<Component>(c);
    if (Status s = build_codebooks(part, stream_); !s) return s;
  }
  std::vector<DeviceCodebook> read(books);
  std::vector<uint8_t> read_lengths(size_t(books) * kMaxSymbols);
  if (Status s = copy(read.data(), device_books, read.size() * sizeof(DeviceCodebook)); !s) {
    return s;
  }
  if (Status s = copy(read_lengths.data(), call.lengths, read_lengths.size()); !s) return s;
  if (Status s = wait(); !s) return s;
  std::vector<std::vector<Codebook>> lists;
  for (int32_t i = 0; i < books; ++i) {
    const int64_t at = int64_t{i % 2 * layers + i / 2} * kMaxSymbols;
    Result<Codebook> book = codebook_of_device(read[i], read_lengths.data() + at);
    if (!book) return book.status();
    lists.push_back({std::move(*book)});
  }
  mirror_->books_ = CodedBooks::of_lists(std::move(lists));
  state_.books = device_books;
  books_ = std::move(read);
  return Status::ok();
}

// A prompt that was refused leaves no codebooks: those that it made go.
Status CodedDeviceStore::forget_unused_books() {
  DeviceFailure failure;
  if (Status s = copy(&failure, state_.common.failure, sizeof(failure)); !s) return s;
  if (Status s = wait(); !s) return s;
  if (failure.status == StatusCode::kOk) return Status::ok();
  mirror_->books_ = CodedBooks();
  books_.clear();
  state_.books = nullptr;
  return Status::ok();
}

Status CodedDeviceStore::end_prompt(SequenceList sequences) {
  const Result<Slots> slots = table().admit_end_prompt(sequences);
  if (!slots) return slots.status();
  PromptEnd prompt;
  prompt.count = static_cast<int32_t>(slots->size());
  const CodedConfig& coded = config().coded;
  prompt.means = coded.means;
  prompt.steps = coded.steps;
  prompt.key_relative = coded.key_relative;
  prompt.value_relative = coded.value_relative;
  for (const int32_t slot : *slots) {
    const int32_t tokens = table().info(slot).num_tokens;
    if (Status s = check_coded_prompt_end(coded, tokens); !s) return s;
    prompt.most_blocks =
        std::max(prompt.most_blocks,
                 coded_tokens_after_prompt(tokens, state_.s.window_tokens) / kBlockTokens);
  }
  const DeviceState& d = state_.common;
  if (Status s = set_batch(DeviceCall::kEndPrompt, *slots, 0); !s) return s;
  if (Status s = begin_coded_prompt_end(state_, prompt, stream_); !s) return s;
  const bool makes_books = books_.empty() && prompt.most_blocks > 0;
  if (makes_books) {
    if (Status s = make_books(prompt); !s) return s;
  }
  if (Status s = plan_coded_prompt(state_, prompt, stream_); !s) return s;
  if (Status s = run(PageOp::reserve(batch(*slots), d.entry_counts, d.report)); !s) return s;
  if (Status s = write_coded_prompt(state_, prompt, stream_); !s) return s;
  // Where nothing was reserved there is nothing to keep: that operation then refuses itself.
  if (Status s = run(PageOp::keep(batch(*slots), d.row_counts, d.other_report)); !s) return s;
  if (Status s = finish_coded_prompt(state_, prompt, stream_); !s) return s;
  if (makes_books) {
    if (Status s = forget_unused_books(); !s) return s;
  }
  calls_.forget_plans();
  calls_.forget_batches();  // what comes next looks whether the call has failed
  for (const int32_t slot : *slots) {
    table().set_info(
        slot, coded_info_after_prompt(table().info(slot).num_tokens, state_.s.window_tokens));
    table().set_phase(slot, SequencePhase::kLive);
  }
  return Status::ok();
}

}  // namespace tierkv
