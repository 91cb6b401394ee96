// SPDX-License-Identifier: Apache-2.0
// The header of a safetensors file, and the plan of a dump made from it: whatever the bytes, the
// answer is a refusal with a reason or tensors that fill the data exactly.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "datasets/safetensors/safetensors_dump.h"

using namespace tierkv;
using datasets::TensorInfo;

namespace {

void require(bool condition) {
  if (!condition) std::abort();
}

void check_header(const datasets::SafetensorsHeader& header, uint64_t data_bytes) {
  uint64_t end = 0;
  for (const TensorInfo& t : header.tensors) {
    require(t.begin == end && t.end >= t.begin);
    uint64_t bits = datasets::safetensors_bits(t.dtype);
    for (const int64_t n : t.shape) {
      require(n >= 0 && (n == 0 || bits <= UINT64_MAX / static_cast<uint64_t>(n)));
      bits *= static_cast<uint64_t>(n);
    }
    require(bits % 8 == 0 && bits / 8 == t.bytes());
    end = t.end;
  }
  require(end == data_bytes);
}

void check_plan(const datasets::ImportPlan& plan) {
  require(plan.info.layout.validate().is_ok());
  require(!plan.sequences.empty());
  for (const datasets::ImportPlan::Sequence& seq : plan.sequences) {
    require(static_cast<int32_t>(seq.layers.size()) == plan.info.layout.num_layers);
    for (const datasets::ImportPlan::Layer& layer : seq.layers) {
      for (int part = 0; part < 2; ++part) {
        const TensorInfo* t = layer.parts[part];
        require(t != nullptr);
        require(static_cast<int64_t>(t->bytes()) == seq.num_tokens * plan.info.layout.num_kv_heads *
                                                        plan.info.layout.head_dim *
                                                        dtype_bytes(plan.info.layout.dtype));
      }
    }
  }
}

}  // namespace

// The first byte chooses the names, the next two the bytes of data behind the header, which
// follows.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 3) return 0;
  const uint64_t data_bytes = data[1] | data[2] << 8;
  const Result<datasets::SafetensorsHeader> header = datasets::parse_safetensors_header(
      reinterpret_cast<const char*>(data) + 3, size - 3, data_bytes);
  if (!header) {
    require(!header.status().message().empty());
    return 0;
  }
  check_header(*header, data_bytes);
  datasets::TensorNames names;
  if (data[0] % 3 == 1) names = datasets::TensorNames::hugging_face();
  if (data[0] % 3 == 2) names.layer = "{seq}a{layer}a{part}", names.tokens = "{seq}a";
  const Result<datasets::ImportPlan> plan = datasets::plan_import(*header, names, {});
  if (plan) check_plan(*plan);
  if (!plan) require(!plan.status().message().empty());
  return 0;
}
