// SPDX-License-Identifier: Apache-2.0
// The page allocator: which page belongs to which row, for all sequences, layers and heads at once.
//
// State is plain data in one block of memory that the caller owns: a free ring of page ids, the
// page tables, one record per page, one entry per sequence. It may lie on the host or on the
// device; the same operations exist for both and leave the same bytes. An operation (PageOp) covers
// a batch of sequences and is all or nothing: it succeeds for every row, or changes nothing and
// says why in its report. On the device it is a fixed chain of kernels on the caller's stream:
// nothing is synchronised, nothing allocated, and it can be captured in a CUDA graph.
//
//   AllocatorShape shape = ...;
//   AllocatorBytes bytes = allocator_bytes(shape);  // memory: bytes.total, kAllocatorAlignment
//   Result<PageAllocator> a = make_page_allocator(shape, memory, bytes.total);
//   Status s = initialize_device(*a, stream);
//   s = run_page_op_device(*a, PageOp::grow(batch, tokens, report), workspace, stream);
//
// Operations on one allocator must be ordered by the caller (one stream). allocator/README.md holds
// the glossary and the conservation laws, allocator/invariants.h checks them.
//
// Sources: DiffKV section 5 (circular free page list, bidirectional page table, prompt and
// generation phase); reference counts, fork, truncate and reports are ours.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tierkv/export.h"
#include "tierkv/page.h"
#include "tierkv/page_table.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

inline constexpr size_t kAllocatorAlignment = 256;

struct TKV_API AllocatorShape {
  PageTableShape table;
  int32_t num_pages = 0;

  Status validate() const;
};

// Positions in an endless list of page ids, of which `ids` keeps the last num_pages: the id at
// position p is ids[p % num_pages]. Free pages are the positions start <= p < end; the rest of the
// ring is dead.
struct RingCursors {
  int64_t start;  // pages taken so far
  int64_t end;    // pages given back so far, plus num_pages
};

struct FreeRing {
  int32_t* ids = nullptr;  // [num_pages]
  RingCursors* cursors = nullptr;
  int32_t num_pages = 0;
};

enum class SequenceState : int32_t {
  kFree = 0,  // no pages; open() or fork() may take it
  kLive = 1,
  kReserved = 2,  // between reserve() and keep(): holds pages for tokens that are not planned yet
};

struct alignas(16) SequenceEntry {
  int64_t last_named;  // by which operation, and at which place of its batch first: finds repeated
                       // sequences
  SequenceState state;
  int32_t shares;  // 1: forked, from another or by one, so that its pages may be shared
  SideCounts
      reserved;  // kReserved: the last pages of each side, of every row, are for later tokens
};

// Between the stages of an operation on the device: who drops a page that several tables hold.
struct DropMark {
  int32_t last_row;  // batch row + 1
  int32_t count;
};

// What operations carry from one to the next.
struct OpState {
  int64_t first_error;  // between operations kNoError
  int64_t op_number;    // of the next operation, from 1
  uint32_t arrived;     // CTAs that are done with the current stage; between operations 0
  int32_t shares;       // whether a page is dropped that may be shared; between operations 0
};
inline constexpr int64_t kNoError = INT64_MAX;

// All pointers in one memory, host or device.
struct PageAllocator {
  AllocatorShape shape;
  FreeRing ring;
  int32_t* slots = nullptr;            // [num_rows][row_stride]
  SideCounts* tokens = nullptr;        // [num_rows]
  SideCounts* pages = nullptr;         // [num_rows]
  int32_t* references = nullptr;       // [num_pages] tables that hold the page; 1 where none does
  DropMark* drop_marks = nullptr;      // [num_pages], between operations 0
  SequenceEntry* sequences = nullptr;  // [num_sequences]
  OpState* state = nullptr;

  PageTableView table() const { return {shape.table, slots, tokens, pages}; }
};

// Bytes of each part, padding included.
struct AllocatorBytes {
  size_t slots = 0;      // the page tables proper
  size_t counts = 0;     // tokens and pages per row
  size_t sequences = 0;  // and cursors
  size_t ring = 0;
  size_t references = 0;
  size_t drop_marks = 0;
  size_t total = 0;
};
TKV_API AllocatorBytes allocator_bytes(const AllocatorShape& shape);

// Lays an allocator over memory[0 .. bytes) without touching it. kInvalidArgument: bad shape, null
// or misaligned memory; kBufferTooSmall.
TKV_API Result<PageAllocator> make_page_allocator(const AllocatorShape& shape, void* memory,
                                                  size_t bytes);

// All pages free in ascending order, all sequences free, all tables empty.
TKV_API Status initialize_host(const PageAllocator& a);
TKV_API Status initialize_device(const PageAllocator& a, GpuStream stream);

// The sequences of an operation, in the caller's order. Batch row i is row
// sequences[i / rows_per_sequence] * rows_per_sequence + i % rows_per_sequence. kPaddingSequence is
// padding: its rows are skipped.
inline constexpr int32_t kPaddingSequence = -1;
struct SequenceBatch {
  const int32_t* sequences = nullptr;  // [count]
  int32_t count = 0;                   // 1 to num_sequences
};

// A page whose tokens the caller copies after the operation, before anything else writes the
// target.
struct PageCopy {
  int32_t source;  // kNoPage: nothing to copy
  int32_t target;
};

// What became of an operation; written once it is decided. May be device memory or mapped host
// memory.
struct OpReport {
  StatusCode status;  // kOk, or why nothing changed
  int32_t
      batch_row;  // the first that is at fault; -1: none, or kOutOfPages, which is nobody's fault
  int64_t pages_needed;
  int64_t pages_missing;  // kOutOfPages: how many more free pages it would have taken
  int64_t pages_returned;
  int64_t pages_free;  // after the operation
};

enum class PageOpKind : int32_t {
  kOpen,
  kReserve,
  kKeep,
  kAppend,
  kGrow,
  kTruncate,
  kRelease,
  kFork
};

// One operation, as data. Pointers lie in the memory of the allocator it is run on.
//
// Statuses in the report, of the first batch row at fault: kOutOfRange for a sequence id or a
// length beyond its table; kStaleSequence for a sequence that is not open (a double release, a use
// after release); kInvalidArgument for a repeated sequence, a sequence in the wrong state, or
// counts that contradict the operation. Then kOutOfPages.
struct TKV_API PageOp {
  PageOpKind kind = PageOpKind::kOpen;
  SequenceBatch batch;
  const int32_t* sources = nullptr;    // fork: [count] the sequences to copy, repetition allowed
  const SideCounts* counts = nullptr;  // as the operation says; aligned to 16 bytes
  PageCopy* copies =
      nullptr;  // fork, truncate: [batch rows][kMaxSides], every entry written on success
  OpReport* report = nullptr;

  // Free sequences become live and empty.
  static PageOp open(SequenceBatch batch, OpReport* report);

  // Prompt phase, first half: `pages` [count] more pages for each side of every row of the
  // sequence, enough for the worst case (worst_case_pages() on the left side of each table).
  static PageOp reserve(SequenceBatch batch, const SideCounts* pages, OpReport* report);
  // Prompt phase, second half: `tokens` [batch rows] are what each side now holds. The first left
  // pages stay, as many of the last as the right side needs move over, and the surplus between them
  // returns. A right side cannot shrink.
  static PageOp keep(SequenceBatch batch, const SideCounts* tokens, OpReport* report);

  // Generation phase: `added` [batch rows] tokens for each side, at most one new page per side. A
  // negative number takes tokens from the end and keeps their pages, which must not be shared.
  static PageOp append(SequenceBatch batch, const SideCounts* added, OpReport* report);

  // `tokens` [batch rows] are what each side now holds: any number of new pages. Fewer than before
  // are taken from the end and keep their pages, which must not be shared.
  static PageOp grow(SequenceBatch batch, const SideCounts* tokens, OpReport* report);

  // `tokens` [batch rows] are left on each side. A page that is left partly filled while others
  // share it is exchanged for a new one: the copies say which.
  static PageOp truncate(SequenceBatch batch, const SideCounts* tokens, PageCopy* copies,
                         OpReport* report);

  // Everything returns; the sequences are free.
  static PageOp release(SequenceBatch batch, OpReport* report);

  // Free sequences `batch` become live copies of `sources`: full pages are shared, a partly filled
  // page is replaced by a new one that the caller copies.
  static PageOp fork(SequenceBatch batch, const int32_t* sources, PageCopy* copies,
                     OpReport* report);
};

// Plain sequential reference. The returned status is kInvalidArgument when the call itself is
// malformed (null or misaligned pointer, empty or too large batch): then nothing was written, the
// report neither. What the rows say is in the report alone.
TKV_API Status run_page_op_host(const PageAllocator& a, const PageOp& op);

// Scratch of one operation with up to max_batch sequences, aligned to kAllocatorAlignment. No
// content survives.
TKV_API size_t page_op_workspace_bytes(const AllocatorShape& shape, int32_t max_batch);

struct DeviceWorkspace {
  void* memory = nullptr;
  size_t bytes = 0;
};

// Two to five kernels on `stream`. A kernel that the caller launches behind them with programmatic
// stream serialization may start before the tables are written, and has to wait for that.
// kInvalidArgument as above, kBufferTooSmall, kCuda when a launch fails.
TKV_API Status run_page_op_device(const PageAllocator& a, const PageOp& op,
                                  const DeviceWorkspace& workspace, GpuStream stream);

// A page that more than one table holds is frozen: nobody may write to it.
TKV_HD bool is_frozen(const PageAllocator& a, int32_t page) {
  return a.references[page] > 1;
}

}  // namespace tierkv
