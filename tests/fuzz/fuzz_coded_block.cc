// SPDX-License-Identifier: Apache-2.0
// Coded blocks: any codes come back, and any bytes are refused or give the same codes on both
// paths. The input draws the codebook, the shape, the codes and the damage.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "codec/format/coded_block.h"
#include "codec/format/huffman.h"
#include "tests/fuzz/fuzz_input.h"

namespace {

using namespace tierkv;
using fuzz::Input;

void require(bool condition) {
  if (!condition) std::abort();
}

// Any complete code: the counts are bytes of the input, repeated.
bool draw_codebook(Input* in, Codebook* c) {
  c->mode = static_cast<BlockMode>(4 + in->byte() % 4);
  c->component = static_cast<Component>(in->byte() % 2);
  c->table_id = static_cast<uint8_t>(in->byte());
  c->streams_per_lane = 1 + static_cast<int32_t>(in->byte() % 2);
  const int32_t lowest = c->mode == BlockMode::kSplit ? 17 : 2;
  const int32_t highest = c->mode == BlockMode::kPair ? 32 : c->mode == BlockMode::kQuad ? 4 : 256;
  // Most alphabets are small: their tables are built in a fraction of the time.
  const uint32_t levels = in->u16();
  const int32_t choices =
      levels < 0xf000 ? std::min(8, highest - lowest + 1) : highest - lowest + 1;
  c->levels = lowest + static_cast<int32_t>(levels) % choices;
  c->base =
      std::min(static_cast<int32_t>(static_cast<int16_t>(in->u16())), INT16_MAX + 1 - c->levels);
  uint64_t counts[16];
  for (uint64_t& n : counts) n = in->byte() >> in->byte() % 8;
  std::vector<uint64_t> of_symbols(static_cast<size_t>(c->symbol_count()));
  for (size_t s = 0; s < of_symbols.size(); ++s) of_symbols[s] = counts[(s + s / 16) % 16];
  const uint32_t depth = in->byte();  // deep tables take longer to build: seldom
  const int32_t limit = 2 + static_cast<int32_t>(depth < 240 ? depth % 7 : depth % 13);
  if (!find_code_lengths(of_symbols, limit, &c->lengths)) return false;
  c->max_length = *std::max_element(c->lengths.begin(), c->lengths.end());
  return complete_codebook(c).is_ok();
}

struct Shape {
  int32_t tokens, head_dim;
};

// One tile of one slice most of the time; at most 2048 codes, with any number of tokens or
// channels.
Shape draw_shape(Input* in) {
  const uint32_t dims = in->u16(), tokens = in->u16();
  Shape shape;
  shape.head_dim = 1 + static_cast<int32_t>(dims % (dims < 0xf000 ? 16 : dims < 0xfc00 ? 40 : 200));
  const int32_t most = std::min(64, 2048 / shape.head_dim);
  shape.tokens = 1 + static_cast<int32_t>(tokens) % (tokens < 0xe000 ? std::min(16, most) : most);
  return shape;
}

// A refused block leaves zeros.
bool decode(const std::vector<uint8_t>& bytes, Shape shape, const Codebook& c,
            std::vector<int16_t>* codes) {
  const std::vector<uint8_t> exact(bytes.begin(), bytes.end());
  const size_t n = static_cast<size_t>(shape.tokens) * shape.head_dim;
  codes->assign(n, 0x5a5a);
  const auto size = static_cast<int64_t>(exact.size());
  const Status a = decode_block(exact.data(), size, shape.tokens, shape.head_dim, c, codes->data());
  require(a.is_ok() || (a.code() == StatusCode::kCorrupt && *codes == std::vector<int16_t>(n, 0)));
  return a.is_ok();
}

void repair_checksum(std::vector<uint8_t>* bytes) {
  if (bytes->size() < 16) return;
  const size_t size = 16 * load_u16(bytes->data() + 12);
  if (size >= 16 && size <= bytes->size()) {
    store_u16(bytes->data() + 14, block_checksum(bytes->data(), static_cast<int32_t>(size)));
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Input in(data, size);
  const uint32_t what = in.byte();
  Codebook codebook;
  if (!draw_codebook(&in, &codebook)) return 0;
  const Shape shape = draw_shape(&in);
  std::vector<int16_t> codes(static_cast<size_t>(shape.tokens) * shape.head_dim), back;
  if (what % 4 == 0) {  // hostile bytes as they are
    std::vector<uint8_t> bytes = in.rest();
    if (what & 8) repair_checksum(&bytes);
    decode(bytes, shape, codebook, &back);
    return 0;
  }
  // Damage first, so that changing the codes leaves it alone.
  struct {
    uint32_t at, flip;
  } damage[4];
  for (auto& d : damage) d = {in.u16(), in.byte()};
  const std::vector<uint8_t> drawn = in.rest();
  for (size_t i = 0; i < codes.size() && !drawn.empty(); ++i) {
    const int32_t x = drawn[i % drawn.size()];
    const int32_t wide = drawn[(i * 7 + 1) % drawn.size()];
    codes[i] =
        static_cast<int16_t>(codebook.base + x % codebook.levels + (x == 255 ? wide * 257 : 0));
  }
  std::vector<uint8_t> bytes;
  require(encode_block(codes.data(), shape.tokens, shape.head_dim, codebook, &bytes).is_ok());
  if (what % 4 == 1) {
    require(decode(bytes, shape, codebook, &back) && back == codes);
    return 0;
  }
  for (const auto& d : damage) bytes[d.at % bytes.size()] ^= static_cast<uint8_t>(d.flip);
  if (what % 4 == 3) repair_checksum(&bytes);
  decode(bytes, shape, codebook, &back);
  return 0;
}
