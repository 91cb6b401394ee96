// SPDX-License-Identifier: Apache-2.0
// The kernels of codec/gpu/coded/codebook_batch.h, as functions of a CTA and its shared memory.
#pragma once

#include "codec/format/codebook_choice.h"
#include "codec/gpu/coded/code_summary.cuh"
#include "codec/gpu/coded/codebook_batch.h"

namespace tierkv {

inline constexpr int32_t kWidestPair = 32;
inline constexpr int32_t kTries = kAlphabetChoices * kRarityChoices;
inline constexpr int32_t kMostItems = 2 * kMaxSymbols;  // of a list of package-merge

// A code for one alphabet.
struct BookTry {
  double price;
  int32_t levels, base, max_length;
  int32_t possible;  // 0: more symbols than code words
  uint8_t lengths[kMaxSymbols];
};

struct BookWorkspace {
  CodeSummary* summaries;  // [num_books]
  BookTry* tries;          // [num_books][kTries]
};
TKV_HD BookWorkspace book_workspace(const CodebookBuild& call) {
  auto* summaries = static_cast<CodeSummary*>(call.workspace);
  return {summaries, reinterpret_cast<BookTry*>(summaries + call.num_books)};
}

// One alphabet and rarity, by a CTA each.

struct TryShared {
  Count counts[kMaxSymbols];     // of the symbols, those that are dropped too
  Count keys[kMaxSymbols];       // kept ones, sorted: count * kMaxSymbols + symbol
  Count weights[2][kMostItems];  // of the list below and of this one
  uint32_t is_symbol[kMaxCodeLength][kMostItems / 32];
  int32_t chosen[kMaxCodeLength];  // symbols chosen in each list
  Count inside[kBookThreads];      // the best base of a thread, then of all
  int32_t base[kBookThreads];
  Count total, dropped, outside, payload;
  int32_t fill, kept;
};

// As the host's best_base().
__device__ inline int32_t find_base(const HistogramView& h, int32_t levels, TryShared* shared) {
  const int32_t lo = h.summary.min_code, hi = h.summary.max_code;
  const int32_t lowest = max(lo - levels, int32_t{INT16_MIN});
  const int32_t highest = min(hi, INT16_MAX + 1 - levels);
  const auto is_better = [&](Count inside, int32_t base, Count best, int32_t best_base) {
    if (inside != best) return inside > best;
    const int32_t centre = levels - 1 - lo - hi;
    const int32_t off = abs(2 * base + centre), best_off = abs(2 * best_base + centre);
    return off != best_off ? off < best_off : base < best_base;
  };
  Count best = 0;
  int32_t best_base = INT32_MAX / 4;
  for (int32_t base = lowest + book_thread(); base <= highest; base += kBookThreads) {
    Count inside = 0;
    for (int32_t i = 0; i < levels; ++i) inside += h.count(base + i);
    if (is_better(inside, base, best, best_base)) best = inside, best_base = base;
  }
  shared->inside[book_thread()] = best;
  shared->base[book_thread()] = best_base;
  __syncthreads();
  for (int32_t i = 0; i < kBookThreads; ++i) {
    if (is_better(shared->inside[i], shared->base[i], best, best_base)) {
      best = shared->inside[i], best_base = shared->base[i];
    }
  }
  __syncthreads();
  return best_base;
}

// As the host's count_pairs().
__device__ inline void count_symbols(const HistogramView& h, int32_t levels, int32_t base,
                                     TryShared* shared) {
  const int32_t lo = h.summary.min_code, hi = h.summary.max_code;
  if (book_thread() == 0) {
    Count inside = 0;
    int32_t fill = 0;
    for (int32_t i = 0; i < levels; ++i) {
      inside += h.count(base + i);
      if (h.count(base + i) > h.count(base + fill)) fill = i;
    }
    shared->fill = fill;
    shared->outside = h.summary.total - inside;
  }
  for (int32_t i = book_thread(); i < kMaxSymbols; i += kBookThreads) shared->counts[i] = 0;
  __syncthreads();
  const int32_t fill = shared->fill;
  if (h.pairs_are_exact()) {
    const int32_t codes = hi - lo + 1;
    const auto digit = [&](int32_t code) {
      return code >= base && code < base + levels ? code - base : fill;
    };
    for (int32_t i = book_thread(); i < codes * codes; i += kBookThreads) {
      const int32_t a = lo + i / codes, b = lo + i % codes;
      const Count n = h.pairs[(a & 255) << 8 | (b & 255)];
      if (n > 0) atomicAdd(&shared->counts[digit(a) + levels * digit(b)], n);
    }
  } else {
    const Count inside = h.summary.total - shared->outside;
    for (int32_t i = book_thread(); i < levels * levels; i += kBookThreads) {
      const Count a = h.count(base + i % levels), b = h.count(base + i / levels);
      shared->counts[i] = expected_count(a, b, inside > 1 ? inside : 1) / 2;
    }
    __syncthreads();
    if (book_thread() == 0) shared->counts[fill + levels * fill] += shared->outside / 2;
  }
  __syncthreads();
}

// The kept symbols, lightest first, two at least.
__device__ inline void sort_symbols(int32_t symbols, int32_t rarity, int32_t max_length,
                                    TryShared* shared) {
  if (book_thread() == 0) {
    Count total = 0;
    for (int32_t s = 0; s < symbols; ++s) total += shared->counts[s];
    const Count rarest = rarest_kept(rarity, total, max_length);
    Count dropped = 0;
    int32_t kept = 0;
    for (int32_t s = 0; s < symbols; ++s) {
      const bool keep = shared->counts[s] >= rarest;
      kept += keep;
      if (!keep) dropped += shared->counts[s], shared->counts[s] = 0;
    }
    shared->total = total;
    shared->dropped = dropped;
    shared->kept = max(kept, 2);
    int32_t missing = max(2 - kept, 0);
    for (int32_t s = 0; s < kMaxSymbols; ++s) {
      const Count n = s < symbols ? shared->counts[s] : 0;
      const bool stands_in = s < symbols && n == 0 && missing > 0;
      missing -= stands_in;
      shared->keys[s] = n > 0 || stands_in ? n * kMaxSymbols + static_cast<Count>(s) : ~Count{0};
    }
  }
  __syncthreads();
  int32_t size = 2;  // what lies behind the symbols stays there
  while (size < symbols) size *= 2;
  for (int32_t width = 2; width <= size; width *= 2) {
    for (int32_t step = width / 2; step > 0; step /= 2) {
      for (int32_t i = book_thread(); i < size / 2; i += kBookThreads) {
        const int32_t a = 2 * i - i % step, b = a + step;
        const Count x = shared->keys[a], y = shared->keys[b];
        const bool rising = (a & width) == 0;
        if ((x > y) == rising) shared->keys[a] = y, shared->keys[b] = x;
      }
      __syncthreads();
    }
  }
}

// Elements of x [n], sorted, that are less than `limit`.
template <class At>
__device__ __forceinline__ int32_t count_less(const At& x, int32_t n, Count limit) {
  int32_t low = 0, high = n;
  while (low < high) {
    const int32_t middle = (low + high) / 2;
    if (x(middle) < limit) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The lists of package-merge: merge_level() of codec/host/coded/huffman.cc, every item at its place
// by its rank among those of the other kind.
__device__ inline void merge_lists(int32_t max_length, TryShared* shared) {
  const int32_t kept = shared->kept;
  const auto symbol = [&](int32_t i) { return shared->keys[i] / kMaxSymbols; };
  int32_t items = 0;
  for (int32_t l = 0; l < max_length; ++l) {
    const Count* below = shared->weights[l % 2];
    Count* out = shared->weights[(l + 1) % 2];
    const auto package = [&](int32_t i) { return below[2 * i] + below[2 * i + 1]; };
    const int32_t packages = items / 2;
    for (int32_t i = book_thread(); i < kMostItems / 32; i += kBookThreads) {
      shared->is_symbol[l][i] = 0;
    }
    __syncthreads();
    for (int32_t i = book_thread(); i < kept; i += kBookThreads) {
      const int32_t at = i + count_less(package, packages, symbol(i));
      out[at] = symbol(i);
      atomicOr(&shared->is_symbol[l][at / 32], 1u << (at % 32));
    }
    // A symbol stands before a package of the same weight.
    for (int32_t i = book_thread(); i < packages; i += kBookThreads) {
      out[i + count_less(symbol, kept, package(i) + 1)] = package(i);
    }
    items = kept + packages;
    __syncthreads();
  }
}

// As the end of find_code_lengths(); then the bytes of a serialised codebook and the price.
__device__ inline void price_lengths(int32_t symbols, int32_t max_length, TryShared* shared,
                                     BookTry* out) {
  if (book_thread() == 0) {
    int32_t chosen = 2 * shared->kept - 2;
    for (int32_t l = max_length - 1; l >= 0; --l) {
      int32_t of_list = 0;
      for (int32_t i = 0; i < chosen; i += 32) {
        const uint32_t mask = chosen - i < 32 ? (1u << (chosen - i)) - 1u : ~0u;
        of_list += __popc(shared->is_symbol[l][i / 32] & mask);
      }
      shared->chosen[l] = of_list;
      chosen = 2 * (chosen - of_list);
    }
    shared->payload = 0;
  }
  for (int32_t s = book_thread(); s < kMaxSymbols; s += kBookThreads) out->lengths[s] = 0;
  __syncthreads();
  for (int32_t i = book_thread(); i < shared->kept; i += kBookThreads) {
    int32_t length = 0;
    for (int32_t l = 0; l < max_length; ++l) length += i < shared->chosen[l];
    out->lengths[shared->keys[i] % kMaxSymbols] = static_cast<uint8_t>(length);
    atomicAdd(&shared->payload, shared->keys[i] / kMaxSymbols * static_cast<Count>(length));
  }
  __syncthreads();
  if (book_thread() != 0) return;
  int32_t nibbles = 0, run = 0, longest = 0;
  for (int32_t s = 0; s < symbols; ++s) {
    const int32_t length = out->lengths[s];
    longest = max(longest, length);
    // A run of absent symbols takes two nibbles and holds up to kLongestRun.
    if (length > 0) {
      nibbles += 1;
      run = 0;
    } else {
      nibbles += run % kLongestRun == 0 ? 2 : 0;
      run += 1;
    }
  }
  CodeCost cost;
  cost.payload = shared->payload;
  cost.total = shared->total;
  cost.dropped = shared->dropped;
  cost.outside = shared->outside;
  cost.book_bytes = kCodebookHeaderBytes + (nibbles + 1) / 2;
  out->max_length = longest;
  out->price = price_of(cost);
}

__device__ inline void try_alphabet(const CodebookBuild& call, int32_t block, TryShared* shared) {
  const int32_t book = block / kTries, choice = block % kTries / kRarityChoices;
  const BookWorkspace work = book_workspace(call);
  BookTry* out = work.tries + block;
  const HistogramView h = {work.summaries[book], call.pairs + int64_t{book} * kHistogramCounts,
                           call.wide + int64_t{book} * kHistogramCounts};
  const int32_t range = h.summary.max_code - h.summary.min_code + 1;
  const int32_t levels = alphabet_levels(choice, 2, kWidestPair, max(range, 2));
  if (book_thread() == 0) out->possible = 0;
  if (levels == 0) return;
  const int32_t base = find_base(h, levels, shared);
  count_symbols(h, levels, base, shared);
  sort_symbols(levels * levels, block % kRarityChoices, call.max_length, shared);
  if (shared->kept > 1 << call.max_length) return;
  merge_lists(call.max_length, shared);
  price_lengths(levels * levels, call.max_length, shared, out);
  if (book_thread() != 0) return;
  out->levels = levels;
  out->base = base;
  out->possible = 1;
}

// The choice, its code words and tables, by a CTA for a book.

struct FinishShared {
  uint16_t words[kMaxSymbols];
  uint8_t lengths[kMaxSymbols];
  int32_t with_length[kMaxCodeLength + 1];  // symbols
  int32_t chosen;
};

// As assign_code_words(): a thread for a length.
__device__ inline void assign_words(int32_t symbols, FinishShared* shared) {
  const int32_t length = book_thread() + 1;
  if (length <= kMaxCodeLength) {
    int32_t n = 0;
    for (int32_t s = 0; s < symbols; ++s) n += shared->lengths[s] == length;
    shared->with_length[length] = n;
  }
  __syncthreads();
  if (length <= kMaxCodeLength && shared->with_length[length] > 0) {
    uint32_t next = 0;
    for (int32_t l = 1; l < length; ++l) next = (next + shared->with_length[l]) << 1;
    for (int32_t s = 0; s < symbols; ++s) {
      if (shared->lengths[s] != length) continue;
      shared->words[s] = static_cast<uint16_t>(__brev(next++) >> (32 - length));
    }
  }
  __syncthreads();
}

// As find_cheapest(): a thread for an entry.
__device__ inline void find_cheapest_symbols(int32_t levels, const FinishShared& shared,
                                             uint16_t* cheapest) {
  for (int32_t entry = book_thread(); entry < kCheapestEntries; entry += kBookThreads) {
    const int32_t place = (entry - 1) / levels, digit = (entry - 1) % levels;
    int32_t best = Codebook::kNoSymbol;
    for (int32_t s = 0; s < levels * levels && entry < 1 + 2 * levels; ++s) {
      const bool asked = entry == 0 || (place == 0 ? s % levels : s / levels) == digit;
      if (!asked || shared.lengths[s] == 0) continue;
      if (best == Codebook::kNoSymbol || shared.lengths[s] < shared.lengths[best]) best = s;
    }
    cheapest[entry] = static_cast<uint16_t>(best);
  }
}

__device__ inline void finish_book(const CodebookBuild& call, int32_t book, FinishShared* shared) {
  const BookTry* tries = book_workspace(call).tries + book * kTries;
  if (book_thread() == 0) {
    // The first of least price; one alphabet at least has few enough symbols.
    int32_t best = -1;
    for (int32_t i = 0; i < kTries; ++i) {
      if (tries[i].possible && (best < 0 || tries[i].price < tries[best].price)) best = i;
    }
    shared->chosen = best;
  }
  __syncthreads();
  const BookTry& chosen = tries[shared->chosen];
  const int32_t levels = chosen.levels, symbols = levels * levels;
  uint8_t* lengths = call.lengths + int64_t{book} * kMaxSymbols;
  for (int32_t s = book_thread(); s < kMaxSymbols; s += kBookThreads) {
    lengths[s] = shared->lengths[s] = chosen.lengths[s];
    shared->words[s] = 0;
  }
  __syncthreads();
  assign_words(symbols, shared);
  uint32_t* words = call.words + int64_t{book} * kMaxSymbols;
  uint32_t* table = call.tables + (int64_t{book} << call.max_length);
  for (int32_t s = book_thread(); s < kMaxSymbols; s += kBookThreads) {
    const int32_t length = shared->lengths[s];
    words[s] = length == 0 ? 0u : shared->words[s] | static_cast<uint32_t>(length) << 16;
    if (length == 0) continue;
    const auto entry = static_cast<uint32_t>(length | s % levels << 6 | s / levels << 22);
    for (int32_t i = shared->words[s]; i < 1 << chosen.max_length; i += 1 << length) {
      table[i] = entry;
    }
  }
  for (int32_t i = (1 << chosen.max_length) + book_thread(); i < 1 << call.max_length;
       i += kBookThreads) {
    table[i] = 0;
  }
  uint16_t* cheapest = call.cheapest + int64_t{book} * kCheapestEntries;
  find_cheapest_symbols(levels, *shared, cheapest);
  if (book_thread() != 0) return;
  DeviceCodebook out;
  out.table = table;
  out.words = words;
  out.cheapest = cheapest;
  out.max_length = chosen.max_length;
  out.levels = levels;
  out.base = chosen.base;
  out.streams_per_lane = call.streams_per_lane;
  out.component = call.component;
  out.table_id = call.table_id;
  call.books[int64_t{book} * call.book_stride] = out;
}

}  // namespace tierkv
