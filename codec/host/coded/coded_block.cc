// SPDX-License-Identifier: Apache-2.0
#include "codec/host/coded/coded_block.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "codec/host/coded/block_streams.h"
#include "codec/host/coded/block_symbols.h"
#include "tierkv/layout.h"

namespace tierkv {
namespace {

Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "coded block: " + what);
}

Status check_shape(int32_t tokens, int32_t head_dim) {
  if (tokens < 1 || tokens > kBlockTokens) return invalid("a block has 1 to 64 tokens");
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  return Status::ok();
}

}  // namespace

uint16_t block_checksum(const uint8_t* block, int32_t bytes) {
  // The sums of the words 4 g + j and of their prefix sums, for j = 0..3: word 4 g + j of 4 G words
  // weighs 4 (G - g) - j.
  uint64_t prefix[4] = {}, sum[4] = {};
  for (int32_t i = 0; i < bytes; i += kBlockAlignment) {
    uint32_t words[4];
    memcpy(words, block + i, sizeof(words));
    for (int32_t j = 0; j < 4; ++j) sum[j] += prefix[j] += words[j];
  }
  uint64_t total = 4 * (sum[0] + sum[1] + sum[2] + sum[3]);
  total -= prefix[1] + 2 * prefix[2] + 3 * prefix[3];
  const uint64_t stored = static_cast<uint64_t>(load_u16(block + 14)) << 16;
  total -= stored * static_cast<uint64_t>(bytes / 4 - 3);
  return static_cast<uint16_t>(total % kChecksumPrime);
}

Status check_family(std::span<const Codebook> books) {
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

Status encode_block(const BlockContent& block, std::span<const Codebook> family,
                    const uint8_t* book_of, std::vector<uint8_t>* out) {
  if (Status s = check_shape(block.tokens, block.head_dim); !s) return s;
  if (Status s = check_family(family); !s) return s;
  for (int32_t f = 0; book_of != nullptr && f < dim_block_count(block.head_dim); ++f) {
    if (book_of[f] >= family.size()) {
      return invalid("dim block " + std::to_string(f) + " names book " +
                     std::to_string(book_of[f]));
    }
  }
  if (block.exponents != nullptr && family.front().component == Component::kKey) {
    for (int32_t t = 0; t < block.tokens; ++t) {
      if (!is_importance_exponent(block.exponents[t])) {
        return invalid("a key's exponent is outside -8 to 4");
      }
    }
  }
  BlockHeader named;
  named.table_id = family.front().table_id;
  for (int32_t first = 0; first < block.head_dim; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, block.head_dim - first);
    SliceBooks books(family.front());
    named.base_or_books = 0;
    for (int32_t f = 0; book_of != nullptr && f < dim_block_count(dims); ++f) {
      const uint8_t book = book_of[first / kDimBlock + f];
      books.of[f] = &family[book];
      named.base_or_books = static_cast<uint16_t>(named.base_or_books | book << (2 * f));
    }
    encode_slice({block.codes + first, block.tokens, dims, block.head_dim}, books, named,
                 first == 0 ? block.exponents : nullptr, out);
  }
  return Status::ok();
}

Status decode_block(const uint8_t* bytes, int64_t size, std::span<const Codebook> family,
                    const BlockTarget& out) {
  if (Status s = check_shape(out.tokens, out.head_dim); !s) return s;
  if (Status s = check_family(family); !s) return s;
  const SliceCodes codes = {out.codes, out.tokens, out.head_dim, out.head_dim};
  int8_t own[kBlockTokens];
  int8_t* const exponents = out.exponents != nullptr ? out.exponents : own;
  const char* wrong = decode_slices({bytes, size, family}, codes, exponents);
  if (wrong == nullptr && out.exponents == nullptr &&
      std::any_of(own, own + out.tokens, [](int8_t e) { return e != 0; })) {
    wrong = "exponents where there are none";
  }
  if (wrong == nullptr) return Status::ok();
  std::fill_n(out.codes, static_cast<int64_t>(out.tokens) * out.head_dim, int16_t{0});
  std::fill_n(exponents, out.tokens, int8_t{0});
  return Status(StatusCode::kCorrupt, std::string("coded block: ") + wrong);
}

}  // namespace tierkv
