// Codebooks of any bytes, and codebooks of any counts. The first byte chooses: 0 takes the rest as
// codes and builds a codebook, which is slow; anything else parses it as a serialised one.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "codec/codebook.h"
#include "codec/huffman.h"

namespace {

using namespace tierkv;

void require(bool condition) {
  if (!condition) std::abort();
}

// What decoders rely on, and that the serialised form holds everything.
void check(const Codebook& c) {
  require(is_complete_code(c.lengths, c.max_length));
  require(c.table.size() == size_t{1} << c.max_length && device_table(c).size() == c.table.size());
  for (uint16_t entry : c.table) require((entry & 63) >= 1 && (entry & 63) <= kMaxCodeLength);
  std::vector<uint8_t> bytes;
  serialize_codebook(c, &bytes);
  require(static_cast<int64_t>(bytes.size()) == codebook_bytes(c));
  const Result<Codebook> again = parse_codebook(bytes.data(), codebook_bytes(c));
  require(again.is_ok() && again->lengths == c.lengths && again->table == c.table);
  require(again->base == c.base && again->levels == c.levels && again->mode == c.mode);
}

void build(const uint8_t* data, size_t size) {
  if (size < 4) return;
  CodebookSpec spec;
  if (data[0] & 4) spec.mode = static_cast<BlockMode>(4 + (data[0] & 3));
  spec.max_length = data[1] % 20;  // 8 to 14 are allowed
  spec.streams_per_lane = data[2] % 3;
  const int32_t head_dim = 1 + data[3] % 40;
  std::vector<int16_t> codes((size - 4) / 2);
  if (!codes.empty()) memcpy(codes.data(), data + 4, 2 * codes.size());
  // Half of the inputs stay near zero, where pairs are counted.
  if (data[0] & 8) {
    for (int16_t& code : codes) code = static_cast<int16_t>(code % 32);
  }
  CodeHistogram h(data[0] & 16 ? Component::kKey : Component::kValue, head_dim);
  h.add(codes.data(), static_cast<int64_t>(codes.size()) / head_dim);
  const Result<Codebook> c = build_codebook(h, spec);
  if (c) return check(*c);
  require(c.status().code() == StatusCode::kInvalidArgument);
  require(spec.max_length < 8 || spec.max_length > kMaxCodeLength || spec.streams_per_lane == 0);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  if (data[0] == 0) {
    build(data + 1, size - 1);
    return 0;
  }
  const std::vector<uint8_t> exact(data + 1, data + size);
  const Result<Codebook> c = parse_codebook(exact.data(), static_cast<int64_t>(exact.size()));
  if (c) {
    check(*c);
  } else {
    require(!c.status().message().empty());
  }
  return 0;
}
