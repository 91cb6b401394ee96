// SPDX-License-Identifier: Apache-2.0
// The bytes of a page in every format that pages can hold.
#include <random>

#include "codec/host/page_codec.h"
#include "tests/golden/golden_table.h"

namespace tierkv {
namespace {

using std::to_string;

// Tokens that fp16 holds exactly, made of integers so that they are the same everywhere.
struct Tokens {
  std::vector<uint16_t> k, v;
  std::vector<float> scores;
  std::vector<int32_t> positions;

  Tokens(int32_t count, int32_t head_dim) {
    std::mt19937 rng(static_cast<uint32_t>(count * 1000 + head_dim));
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t d = 0; d < head_dim; ++d) {
        const int32_t outlier = d % 37 == 5 ? 1000 : 0;
        k.push_back(float_to_half(
            static_cast<float>(static_cast<int32_t>(rng() % 2001) - 1000 + outlier) / 256));
        v.push_back(
            float_to_half(static_cast<float>(static_cast<int32_t>(rng() % 2001) - 1000) / 1024));
      }
      scores.push_back(static_cast<float>(rng() % 4096) / 8192);
      positions.push_back(3 * i);
    }
  }
  TokenBatch batch(int32_t first, int32_t count, int32_t head_dim) const {
    TokenBatch b;
    b.k = k.data() + int64_t{first} * head_dim;
    b.v = v.data() + int64_t{first} * head_dim;
    b.scores = scores.data() + first;
    b.positions = positions.data() + first;
    b.count = count;
    return b;
  }
};

// A page that lacks five tokens of being full, written in two pieces; the next page of its tokens
// read back.
TEST(PageGolden, BytesOfEveryFormat) {
  golden::Table table("pages.csv",
                      "head_dim,key_bits,value_bits,group,page_bytes,tokens,page_xxh3,read_xxh3");
  for (int32_t head_dim : {64, 96, 128, 256}) {
    for (const std::string key_bits : {"16", "8", "4", "2", "2n"}) {
      for (const std::string value_bits : {"16", "8", "4", "2", "2n"}) {
        for (int32_t group : {0, 32}) {
          TierFormat format = *parse_tier_format("k" + key_bits + "v" + value_bits);
          if (!format.k.is_raw()) format.k.group = group;
          if (!format.v.is_raw()) format.v.group = group;
          if (group != 0 && format == raw_tier()) continue;
          const Result<PageChoice> size = choose_page_size({format}, head_dim);
          ASSERT_TRUE(size.is_ok()) << size.status().message();
          const PageFormat page_format{format, head_dim, size->page_bytes};
          const int32_t used = size->tokens[0] - 5;
          const Tokens tokens(used, head_dim);
          std::vector<uint8_t> page(static_cast<size_t>(size->page_bytes), 0);
          ASSERT_TRUE(encode_page(page_format, page.data(), 0, tokens.batch(0, 7, head_dim)));
          ASSERT_TRUE(
              encode_page(page_format, page.data(), 7, tokens.batch(7, used - 7, head_dim)));
          std::vector<float> k(static_cast<size_t>(used) * head_dim), v(k.size());
          TokenOutput out;
          out.k = k.data();
          out.v = v.data();
          out.count = used;
          ASSERT_TRUE(decode_page(page_format, page.data(), 0, out));
          k.insert(k.end(), v.begin(), v.end());
          table.expect({to_string(head_dim), key_bits, value_bits, to_string(group),
                        to_string(size->page_bytes), to_string(size->tokens[0]), golden::hash(page),
                        golden::hash(k)});
        }
      }
    }
  }
}

}  // namespace
}  // namespace tierkv
