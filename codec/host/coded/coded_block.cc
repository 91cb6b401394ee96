// SPDX-License-Identifier: Apache-2.0
#include "codec/format/coded_block.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "codec/format/errors.h"
#include "codec/host/coded/block_streams.h"
#include "codec/host/coded/block_symbols.h"
#include "tierkv/layout.h"

namespace tierkv {

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

Status check_block_shape(int32_t tokens, int32_t head_dim) {
  if (tokens < 1 || tokens > kBlockTokens) return invalid("a block has 1 to 64 tokens");
  if (head_dim < 1 || head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  return Status::ok();
}

Status encode_block(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, std::vector<uint8_t>* out) {
  if (Status s = check_block_shape(tokens, head_dim); !s) return s;
  BlockHeader named;
  named.version = kCodedBlockVersion;
  named.table_id = codebook.table_id;
  named.base_or_books = static_cast<uint16_t>(codebook.base);
  for (int32_t first = 0; first < head_dim; first += kSliceDims) {
    const int32_t dims = std::min(kSliceDims, head_dim - first);
    encode_slice({codes + first, tokens, dims, head_dim}, SliceBooks(codebook), named, nullptr,
                 out);
  }
  return Status::ok();
}

Status decode_block(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    const Codebook& codebook, int16_t* codes) {
  if (Status s = check_block_shape(tokens, head_dim); !s) return s;
  const BlockSource from = {bytes, size, kCodedBlockVersion, {&codebook, 1}};
  const char* wrong = decode_slices(from, {codes, tokens, head_dim, head_dim}, nullptr);
  if (wrong == nullptr) return Status::ok();
  std::fill_n(codes, static_cast<int64_t>(tokens) * head_dim, int16_t{0});
  return corrupt(std::string("coded block: ") + wrong);
}

}  // namespace tierkv
