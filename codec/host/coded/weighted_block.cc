// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/weighted_block.h"

#include <algorithm>
#include <string>

#include "codec/host/coded/block_symbols.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "weighted block: " + what);
}

// Header, layout and source of one slice that is being written.
struct Draft {
  WeightedBlockHeader header;
  WeightedBlockLayout at;
};

// The header of a slice's raw form. exponents: [tokens], null in all slices but the first.
WeightedBlockHeader raw_header(const Slice& slice, Component component, const RawForm& raw,
                               const int8_t* exponents) {
  WeightedBlockHeader h;
  h.mode = raw.mode;
  h.component = component;
  h.tokens = static_cast<uint8_t>(slice.tokens);
  h.dims = static_cast<uint8_t>(slice.dims);
  h.base_or_books = static_cast<uint16_t>(raw.base);
  if (exponents == nullptr) return h;
  const auto [least, most] = std::minmax_element(exponents, exponents + slice.tokens);
  h.least_exponent = *least;
  h.exponent_bits = static_cast<uint8_t>(bits_for(static_cast<uint32_t>(*most - *least)));
  return h;
}

WeightedBlockHeader coded_header(const WeightedBlockHeader& raw, const SliceBooks& books,
                                 uint16_t book_of, const SymbolPlan& plan) {
  WeightedBlockHeader h = raw;
  const uint32_t* bits = plan.stream_bits;
  const auto [least, most] = std::minmax_element(bits, bits + books.streams());
  h.mode = books.first().mode;
  h.streams_per_lane = static_cast<uint8_t>(books.first().streams_per_lane);
  h.base_or_books = book_of;
  h.least_length = static_cast<uint16_t>(*least);
  h.length_bits = static_cast<uint8_t>(bits_for(*most - *least));
  h.exceptions = static_cast<uint8_t>(plan.exception_count);
  return h;
}

void write_coded(const Slice& slice, const SliceBooks& books, const SymbolPlan& plan,
                 const Draft& draft, uint8_t* block) {
  const WeightedBlockHeader& h = draft.header;
  for (int32_t i = 0; i < books.streams(); ++i) {
    store_field(block + draft.at.lengths, i, h.length_bits, plan.stream_bits[i] - h.least_length);
  }
  write_plan(slice, books, plan,
             {block + draft.at.low_plane, block + draft.at.payload, block + draft.at.exceptions});
}

// The books of a slice's dim blocks, and the header field that names them.
struct SliceChoice {
  SliceBooks books;
  uint16_t field = 0;
};
SliceChoice choose(const BookFamily& family, const uint8_t* book_of, int32_t dims) {
  const Codebook& first = family.books.front();
  SliceChoice choice{SliceBooks(first, weighted_order(first.component))};
  for (int32_t f = 0; book_of != nullptr && f < dim_block_count(dims); ++f) {
    choice.books.of[f] = &family.books[book_of[f]];
    choice.field = static_cast<uint16_t>(choice.field | book_of[f] << (2 * f));
  }
  return choice;
}

void encode_slice(const Slice& slice, const int8_t* exponents, const BookFamily& family,
                  const uint8_t* book_of, std::vector<uint8_t>* out) {
  const SliceChoice choice = choose(family, book_of, slice.dims);
  const SliceBooks& books = choice.books;
  SymbolPlan plan;
  plan_symbols(slice, books, kMaxWeightedExceptions, &plan);
  const RawForm raw = raw_form(slice);
  Draft draft{raw_header(slice, books.first().component, raw, exponents), {}};
  draft.at = weighted_layout(draft.header, 0);
  bool coded = false;
  if (plan.possible) {
    Draft candidate{coded_header(draft.header, books, choice.field, plan), {}};
    candidate.header.table_id = family.books.front().table_id;
    candidate.at = weighted_layout(candidate.header, static_cast<int32_t>(plan.payload_bits));
    coded = candidate.at.bytes < draft.at.bytes;
    if (coded) draft = candidate;
  }
  WeightedBlockHeader& h = draft.header;
  h.units = static_cast<uint16_t>(draft.at.bytes / kBlockAlignment);
  const size_t begin = out->size();
  out->resize(begin + static_cast<size_t>(draft.at.bytes), 0);
  uint8_t* block = out->data() + begin;
  for (int32_t t = 0; exponents != nullptr && t < slice.tokens; ++t) {
    store_field(block + draft.at.exponents, t, h.exponent_bits,
                static_cast<uint32_t>(exponents[t] - h.least_exponent));
  }
  if (coded) {
    write_coded(slice, books, plan, draft, block);
  } else {
    write_raw_codes(slice, h.component, raw, block + draft.at.payload);
  }
  store_weighted_header(h, block);
  h.checksum = block_checksum(block, draft.at.bytes);
  store_weighted_header(h, block);
}

}  // namespace

Status BookFamily::validate() const {
  if (books.empty() || books.size() > kMaxFamilyBooks) return invalid("a family has 1 to 4 books");
  const Codebook& first = books.front();
  for (size_t i = 0; i < books.size(); ++i) {
    const Codebook& book = books[i];
    if (book.component != first.component || book.mode != first.mode ||
        book.streams_per_lane != first.streams_per_lane) {
      return invalid("book " + std::to_string(i) +
                     " has another component, mode or number of streams than book 0");
    }
    if (book.table_id != first.table_id + i) {
      return invalid("book " + std::to_string(i) + " has table id " +
                     std::to_string(book.table_id));
    }
  }
  return Status::ok();
}

Status encode_weighted_block(const WeightedCodes& block, const BookFamily& family,
                             const uint8_t* book_of, std::vector<uint8_t>* out) {
  if (Status s = check_block_shape(block.tokens, block.head_dim); !s) {
    return s.with_context("weighted block");
  }
  if (Status s = family.validate(); !s) return s;
  for (int32_t f = 0; book_of != nullptr && f < dim_block_count(block.head_dim); ++f) {
    if (book_of[f] >= family.books.size()) {
      return invalid("dim block " + std::to_string(f) + " names book " +
                     std::to_string(book_of[f]));
    }
  }
  if (family.books.front().component == Component::kKey) {
    for (int32_t t = 0; t < block.tokens; ++t) {
      if (!is_importance_exponent(block.exponents[t])) {
        return invalid("a key's exponent is outside -8 to 4");
      }
    }
  }
  for (int32_t first = 0; first < block.head_dim; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, block.head_dim - first);
    encode_slice({block.codes + first, block.tokens, dims, block.head_dim},
                 first == 0 ? block.exponents : nullptr, family,
                 book_of == nullptr ? nullptr : book_of + first / kDimBlock, out);
  }
  return Status::ok();
}

}  // namespace tierkv
