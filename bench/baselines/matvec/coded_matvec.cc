// SPDX-License-Identifier: Apache-2.0
#include "bench/baselines/matvec/coded_matvec.h"

#include <algorithm>
#include <string>
#include <vector>

#include "codec/format/coded_block.h"

namespace tierkv {
namespace {

Status invalid(const std::string& what) {
  return Status(StatusCode::kInvalidArgument, "coded product: " + what);
}
Status unsupported(const std::string& what) {
  return Status(StatusCode::kUnsupported, "coded product: " + what);
}

Status check_codebook(const DeviceCodebook& book, const DeviceTree& tree) {
  if (book.mode != BlockMode::kPair && book.mode != BlockMode::kSingle) {
    return unsupported("codebook: only single codes and pairs are decoded here");
  }
  if (book.levels < 2 || book.levels > (book.mode == BlockMode::kPair ? 32 : 256)) {
    return invalid("codebook.levels");
  }
  if (book.max_length < 1 || book.max_length > kMaxCodeLength) {
    return invalid("codebook.max_length");
  }
  if (book.streams_per_lane != 1 && book.streams_per_lane != 2) {
    return invalid("codebook.streams_per_lane");
  }
  if (tree.entries == 0) {
    return book.mode == BlockMode::kSingle && book.max_length > kMaxSingleLength
               ? unsupported("codebook: single codes of more than 11 bits")
               : Status::ok();
  }
  if (book.mode != BlockMode::kSingle || book.streams_per_lane != 1) {
    return unsupported("codebook: trees of single codes with one stream a lane only");
  }
  return validate_tree(tree, book);
}

// The values of a block, from its codes and units; false where decode_block() refuses it.
struct HostBlock {
  const CodedMatvec& call;
  const Codebook& codebook;
  std::vector<int16_t> codes;

  bool decode(int32_t block, int32_t tokens) {
    codes.assign(static_cast<size_t>(kBlockTokens) * call.head_dim, 0);
    const CodedBlockRef& ref = call.blocks[block];
    const int64_t begin = int64_t{ref.offset} * kBlockAlignment,
                  bytes = int64_t{ref.units} * kBlockAlignment;
    if (bytes == 0 || begin + bytes > call.size) return false;
    return decode_block(call.bytes + begin, bytes, tokens, call.head_dim, codebook, codes.data())
        .is_ok();
  }
  double value(int32_t block, int32_t token, int32_t dim) const {
    const bool is_key = codebook.component == Component::kKey;
    const int32_t count = block_unit_count(codebook.component, call.head_dim);
    const uint16_t* units = call.units + int64_t{block} * count;
    const int32_t i = is_key ? dim : token;
    return half_to_float(units[count / 2 + i]) +
           double{half_to_float(units[i])} *
               codes[static_cast<size_t>(token) * call.head_dim + dim];
  }
};

void score_row(HostBlock* block, int32_t r) {
  const CodedMatvec& call = block->call;
  const CodedMatvecRow& row = call.rows[r];
  for (int32_t first = 0; first < row.tokens; first += kBlockTokens) {
    const int32_t i = first / kBlockTokens, tokens = std::min(kBlockTokens, row.tokens - first);
    const bool valid = block->decode(row.first_block + i, tokens);
    call.status[row.first_item + i] = valid ? StatusCode::kOk : StatusCode::kCorrupt;
    for (int32_t c = 0; c < call.columns; ++c) {
      const int64_t column = int64_t{r} * call.columns + c;
      const uint16_t* q = call.x + column * call.head_dim;
      for (int32_t t = 0; t < tokens; ++t) {
        double sum = 0;
        for (int32_t d = 0; d < call.head_dim && valid; ++d) {
          sum += block->value(row.first_block + i, t, d) * half_to_float(q[d]);
        }
        call.y[column * call.token_stride + first + t] = static_cast<float>(call.scale * sum);
      }
    }
  }
}

void add_row(HostBlock* block, int32_t r) {
  const CodedMatvec& call = block->call;
  const CodedMatvecRow& row = call.rows[r];
  const int32_t dims = call.head_dim;
  std::vector<double> sums(static_cast<size_t>(call.columns) * dims, 0.0);
  bool valid = true;
  for (int32_t first = 0; first < row.tokens; first += kBlockTokens) {
    const int32_t i = first / kBlockTokens, tokens = std::min(kBlockTokens, row.tokens - first);
    valid &= block->decode(row.first_block + i, tokens);
    for (int32_t c = 0; c < call.columns && valid; ++c) {
      const uint16_t* p = call.x + (int64_t{r} * call.columns + c) * call.token_stride + first;
      for (int32_t t = 0; t < tokens; ++t) {
        for (int32_t d = 0; d < dims; ++d) {
          sums[static_cast<size_t>(c) * dims + d] +=
              block->value(row.first_block + i, t, d) * half_to_float(p[t]);
        }
      }
    }
  }
  call.status[r] = valid ? StatusCode::kOk : StatusCode::kCorrupt;
  float* out = call.y + int64_t{r} * call.columns * dims;
  for (size_t i = 0; i < sums.size(); ++i) {
    out[i] = valid ? static_cast<float>(call.scale * sums[i]) : 0.0f;
  }
}

}  // namespace

Status CodedMatvec::validate() const {
  if (head_dim != 64 && head_dim != 96 && head_dim != 128) {
    return unsupported("head_dim must be 64, 96 or 128");
  }
  if (columns < 1) return invalid("columns must be at least 1");
  if (num_rows < 0 || num_items < 0 || num_blocks < 0) return invalid("a count is negative");
  if (size < 0) return invalid("size is negative");
  if (token_stride < 0 || token_stride % 2 != 0) return invalid("token_stride must be even");
  if (max_block_bytes < kCodedBlockHeaderBytes || max_block_bytes > kMaxCodedBlockBytes) {
    return invalid("max_block_bytes");
  }
  return check_codebook(codebook, tree);
}

Status CodedMatvec::validate_arrays() const {
  if (rows == nullptr || y == nullptr || status == nullptr) {
    return invalid("rows, y and status are needed");
  }
  if (num_items == 0) return Status::ok();
  if (bytes == nullptr || blocks == nullptr || units == nullptr || x == nullptr) {
    return invalid("bytes, blocks, units and x are needed");
  }
  for (const void* p : {static_cast<const void*>(bytes), static_cast<const void*>(units),
                        static_cast<const void*>(x)}) {
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return invalid("alignment of bytes, units or x");
  }
  return Status::ok();
}

Status multiply_coded_host(const CodedMatvec& call, const Codebook& codebook) {
  if (Status s = call.validate(); !s) return s;
  if (call.num_rows == 0) return Status::ok();
  if (Status s = call.validate_arrays(); !s) return s;
  HostBlock block{call, codebook, {}};
  for (int32_t r = 0; r < call.num_rows; ++r) {
    const CodedMatvecRow& row = call.rows[r];
    if (row.tokens < 0 || row.tokens > call.token_stride || row.first_block < 0 ||
        int64_t{row.first_block} + (row.tokens + kBlockTokens - 1) / kBlockTokens >
            call.num_blocks) {
      return invalid("a row lies outside the directory");
    }
    if (codebook.component == Component::kKey) {
      score_row(&block, r);
    } else {
      add_row(&block, r);
    }
  }
  return Status::ok();
}

}  // namespace tierkv
