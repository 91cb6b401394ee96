// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/weighted_block.h"

#include <algorithm>
#include <string>

#include "codec/host/coded/block_streams.h"
#include "codec/host/coded/block_symbols.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "weighted block: " + what);
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
  const Codebook& first_book = family.books.front();
  BlockHeader named;
  named.table_id = first_book.table_id;
  for (int32_t first = 0; first < block.head_dim; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, block.head_dim - first);
    SliceBooks books(first_book, weighted_order(first_book.component));
    named.base_or_books = 0;
    for (int32_t f = 0; book_of != nullptr && f < dim_block_count(dims); ++f) {
      const uint8_t book = book_of[first / kDimBlock + f];
      books.of[f] = &family.books[book];
      named.base_or_books = static_cast<uint16_t>(named.base_or_books | book << (2 * f));
    }
    encode_slice({block.codes + first, block.tokens, dims, block.head_dim}, books, named,
                 first == 0 ? block.exponents : nullptr, out);
  }
  return Status::ok();
}

Status decode_weighted_block(const uint8_t* bytes, int64_t size, const BookFamily& family,
                             const WeightedTarget& out) {
  if (Status s = check_block_shape(out.tokens, out.head_dim); !s) {
    return s.with_context("weighted block");
  }
  if (Status s = family.validate(); !s) return s;
  const BlockSource from = {bytes, size, kWeightedBlockVersion, family.books};
  const SliceCodes codes = {out.codes, out.tokens, out.head_dim, out.head_dim};
  const char* wrong = decode_slices(from, codes, out.exponents);
  if (wrong == nullptr) return Status::ok();
  std::fill_n(out.codes, static_cast<int64_t>(out.tokens) * out.head_dim, int16_t{0});
  std::fill_n(out.exponents, out.tokens, int8_t{0});
  return Status(StatusCode::kCorrupt, std::string("weighted block: ") + wrong);
}

}  // namespace tierkv
