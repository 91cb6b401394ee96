// Small stores in a random basis, what their rows hold and what attention makes of it.
#pragma once

#include <memory>
#include <random>
#include <vector>

#include "store/tiers/host_basis.h"
#include "tests/support/small_store.h"

namespace tierkv::testing {

inline constexpr BasisKind kBasisKinds[] = {BasisKind::kNone, BasisKind::kMean,
                                            BasisKind::kHadamard, BasisKind::kMatrix};

// small_config() of bfloat16 input, with a random basis of these kinds.
KvStoreConfig basis_config(std::mt19937* rng, BasisKind keys, BasisKind values);

std::unique_ptr<HostBasisStore> make_basis_store(const KvStoreConfig& config);

// A prompt of `tokens` tokens and some steps of one, every layer.
void fill(KvStore* store, RandomInput* input, SequenceId id, int32_t tokens, int32_t steps);

// What a row holds, in coordinates and mapped back.
struct DecodedRow {
  std::vector<std::vector<float>> coordinates, k, v;
  std::vector<int32_t> positions;
};
DecodedRow decode(const StoreView& s, int32_t row, const Basis& keys, const Basis& values);

inline constexpr int32_t kProbabilityStride = 160;
struct Attended {
  std::vector<uint16_t> out;         // [q_heads, head_dim]
  std::vector<float> lse;            // [q_heads]
  std::vector<float> probabilities;  // [kv_heads, kProbabilityStride]
};
// One layer of one sequence; q is fp16, [q_heads, head_dim].
Attended attend(KvStore* store, SequenceId id, int32_t layer, const std::vector<uint8_t>& q);

}  // namespace tierkv::testing
