// SPDX-License-Identifier: Apache-2.0
// Containers of any bytes: opening, reading and decoding may refuse, never crash. The first byte
// draws the options: bit 0 verifies checksums, which hostile bytes seldom pass, so most inputs
// leave it clear and reach what lies behind. The rest is the container.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "tools/container/container_file.h"

namespace {

using namespace tierkv;

constexpr int64_t kMaxDecodedValues = int64_t{1} << 20;  // of all rows together, for speed

bool is_small(const CacheDecoder& decoder) {
  const CacheLayout& l = decoder.model().layout;
  int64_t tokens = 0;
  for (const ContainerSequence& s : decoder.sequences()) {
    tokens += static_cast<int64_t>(s.tokens.size());
  }
  const double values = static_cast<double>(tokens) * l.num_layers * l.num_kv_heads * l.head_dim;
  return values <= static_cast<double>(kMaxDecodedValues);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  ContainerReadOptions options;
  options.verify_checksums = (data[0] & 1) != 0;
  Result<ContainerReader> reader =
      ContainerReader::from_bytes(std::vector<uint8_t>(data + 1, data + size), "input", options);
  if (!reader) return 0;
  const Result<CacheDecoder> decoder = CacheDecoder::open(std::move(reader.value()));
  if (!decoder || !is_small(*decoder)) return 0;
  const Status status = verify(*decoder, 1, {});
  if (!status && status.message().empty()) std::abort();  // a refusal says what is wrong
  return 0;
}
