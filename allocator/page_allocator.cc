// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "allocator/free_ring.h"
#include "tierkv/allocator.h"

namespace tierkv {
namespace {

// Where each part of the memory starts.
struct Placement {
  size_t slots, tokens, pages, sequences, cursors, state, ring, references, drop_marks, total;
};

size_t padded(size_t bytes) {
  return (bytes + kAllocatorAlignment - 1) / kAllocatorAlignment * kAllocatorAlignment;
}

Placement place(const AllocatorShape& shape) {
  const auto rows = static_cast<size_t>(shape.table.num_rows());
  const auto pages = static_cast<size_t>(shape.num_pages);
  size_t at = 0;
  const auto next = [&at](size_t bytes) {
    const size_t start = at;
    at += padded(bytes);
    return start;
  };
  Placement p{};
  p.slots = next(rows * static_cast<size_t>(shape.table.row_stride()) * sizeof(int32_t));
  p.tokens = next(rows * sizeof(SideCounts));
  p.pages = next(rows * sizeof(SideCounts));
  p.sequences = next(static_cast<size_t>(shape.table.num_sequences) * sizeof(SequenceEntry));
  p.cursors = next(sizeof(RingCursors));
  p.state = next(sizeof(OpState));
  p.ring = next(pages * sizeof(int32_t));
  p.references = next(pages * sizeof(int32_t));
  p.drop_marks = next(pages * sizeof(DropMark));
  p.total = at;
  return p;
}

}  // namespace

Status AllocatorShape::validate() const {
  if (num_pages < 1) return {StatusCode::kInvalidArgument, "num_pages must be positive"};
  return table.validate();
}

AllocatorBytes allocator_bytes(const AllocatorShape& shape) {
  const Placement p = place(shape);
  AllocatorBytes bytes;
  bytes.slots = p.tokens - p.slots;
  bytes.counts = p.sequences - p.tokens;
  bytes.sequences = p.ring - p.sequences;
  bytes.ring = p.references - p.ring;
  bytes.references = p.drop_marks - p.references;
  bytes.drop_marks = p.total - p.drop_marks;
  bytes.total = p.total;
  return bytes;
}

Result<PageAllocator> make_page_allocator(const AllocatorShape& shape, void* memory, size_t bytes) {
  if (Status s = shape.validate(); !s) return s;
  if (memory == nullptr) return Status(StatusCode::kInvalidArgument, "allocator memory is null");
  if (reinterpret_cast<uintptr_t>(memory) % kAllocatorAlignment != 0) {
    return Status(StatusCode::kInvalidArgument, "allocator memory is not aligned to 256 bytes");
  }
  const Placement p = place(shape);
  if (bytes < p.total) {
    return Status(StatusCode::kBufferTooSmall, "allocator memory has " + std::to_string(bytes) +
                                                   " bytes, needs " + std::to_string(p.total));
  }
  char* base = static_cast<char*>(memory);
  PageAllocator a;
  a.shape = shape;
  a.slots = reinterpret_cast<int32_t*>(base + p.slots);
  a.tokens = reinterpret_cast<SideCounts*>(base + p.tokens);
  a.pages = reinterpret_cast<SideCounts*>(base + p.pages);
  a.sequences = reinterpret_cast<SequenceEntry*>(base + p.sequences);
  a.ring = {reinterpret_cast<int32_t*>(base + p.ring),
            reinterpret_cast<RingCursors*>(base + p.cursors), shape.num_pages};
  a.state = reinterpret_cast<OpState*>(base + p.state);
  a.references = reinterpret_cast<int32_t*>(base + p.references);
  a.drop_marks = reinterpret_cast<DropMark*>(base + p.drop_marks);
  return a;
}

Status initialize_host(const PageAllocator& a) {
  if (a.slots == nullptr || a.state == nullptr) {
    return {StatusCode::kInvalidArgument, "allocator has no memory"};
  }
  const int64_t rows = a.shape.table.num_rows();
  const int64_t slots = rows * a.shape.table.row_stride();
  for (int64_t i = 0; i < slots; ++i) a.slots[i] = kNoPage;
  for (int64_t r = 0; r < rows; ++r) a.tokens[r] = a.pages[r] = SideCounts{};
  for (int32_t s = 0; s < a.shape.table.num_sequences; ++s) {
    a.sequences[s] = {0, SequenceState::kFree, 0, {}};
  }
  fill_ring(a.ring);
  for (int32_t p = 0; p < a.shape.num_pages; ++p) {
    a.references[p] = 1;
    a.drop_marks[p] = {0, 0};
  }
  *a.state = {kNoError, 1, 0, 0};
  return Status::ok();
}

}  // namespace tierkv
