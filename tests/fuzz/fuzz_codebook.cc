// SPDX-License-Identifier: Apache-2.0
// Codebooks of any bytes, and codebooks of any counts. The first byte chooses: 0 takes the rest as
// codes and builds a codebook, which is slow; anything else parses it as a serialised one.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/huffman.h"

namespace {

using namespace tierkv;

void require(bool condition) {
  if (!condition) std::abort();
}

// What decoders rely on.
void check_tables(const Codebook& c) {
  require(is_complete_code(c.lengths, c.max_length));
  require(c.table.size() == size_t{1} << c.max_length && device_table(c).size() == c.table.size());
  require(std::all_of(c.table.begin(), c.table.end(), [](uint16_t entry) {
    return (entry & 63) >= 1 && (entry & 63) <= kMaxCodeLength;
  }));
}

// The serialised form holds everything, and the same codebook has the same bytes.
std::vector<uint8_t> serialized(const Codebook& c) {
  std::vector<uint8_t> bytes;
  serialize_codebook(c, &bytes);
  require(static_cast<int64_t>(bytes.size()) == codebook_bytes(c));
  return bytes;
}

void check_round_trip(const Codebook& c) {
  const std::vector<uint8_t> bytes = serialized(c);
  const Result<Codebook> again = parse_codebook(bytes.data(), static_cast<int64_t>(bytes.size()));
  require(again.is_ok() && again->lengths == c.lengths && again->table == c.table);
  require(again->base == c.base && again->levels == c.levels && again->mode == c.mode);
}

// An empty histogram. Each is a megabyte, which is copied in a fraction of the time that fresh
// memory takes.
CodeHistogram& empty_histogram(Component component, uint32_t choice) {
  static constexpr int32_t kHeadDims[] = {1, 2, 3, 16, 17, 40};
  static const std::vector<CodeHistogram> kEmpty = [] {
    std::vector<CodeHistogram> all;
    for (const Component c : {Component::kKey, Component::kValue}) {
      for (const int32_t d : kHeadDims) all.emplace_back(c, d);
    }
    return all;
  }();
  static CodeHistogram histogram = kEmpty[0];
  constexpr uint32_t kChoices = sizeof(kHeadDims) / sizeof(kHeadDims[0]);
  histogram = kEmpty[(component == Component::kKey ? 0 : kChoices) + choice % kChoices];
  return histogram;
}

// Codes of a narrow window most of the time, where pairs and quads are counted; else of any width.
std::vector<int16_t> draw_codes(const uint8_t* data, size_t size, uint8_t spread) {
  std::vector<int16_t> codes;
  const int32_t window = spread < 224 ? 1 + spread % 8 : spread < 252 ? 1 + spread % 40 : 600;
  const int32_t base = size == 0 ? 0 : static_cast<int8_t>(data[0]) * (data[0] % 8 == 7 ? 255 : 1);
  for (size_t i = 1; i < size; ++i) {
    const int32_t x = window <= 40 ? data[i] : data[i] * 17;
    codes.push_back(static_cast<int16_t>(spread == 255 ? x : base + x % window));
  }
  return codes;
}

void build(const uint8_t* data, size_t size) {
  if (size < 4) return;
  CodebookSpec spec;
  // Every mode is tried where none is given.
  if (data[0] % 8 != 7) spec.mode = static_cast<BlockMode>(4 + data[0] % 4);
  spec.max_length = data[1] < 240 ? 8 + data[1] % 3 : data[1] % 20;  // 8 to 14 are allowed
  spec.streams_per_lane = data[0] < 0xf0 ? 1 + data[0] / 8 % 2 : data[0] % 4;
  CodeHistogram& h =
      empty_histogram(data[0] / 16 % 2 == 0 ? Component::kKey : Component::kValue, data[2]);
  const std::vector<int16_t> codes = draw_codes(data + 4, size - 4, data[3]);
  h.add(codes.data(), static_cast<int64_t>(codes.size()) / h.head_dim());
  const Result<Codebook> c = build_codebook(h, spec);
  if (c) {
    check_tables(*c);
    check_round_trip(*c);
    return;
  }
  require(c.status().code() == StatusCode::kInvalidArgument);
  require(spec.max_length < 8 || spec.max_length > kMaxCodeLength || spec.streams_per_lane < 1 ||
          spec.streams_per_lane > 2);
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
    check_tables(*c);
    if (data[0] % 4 == 1) check_round_trip(*c);
  } else {
    require(!c.status().message().empty());
  }
  return 0;
}
