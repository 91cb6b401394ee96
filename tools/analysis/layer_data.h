// SPDX-License-Identifier: Apache-2.0
// The rows of one (sequence, layer) of a dump in memory, as stored, and the statistics taken from
// them.
#pragma once

#include <initializer_list>
#include <vector>

#include "codec/policy/profile.h"
#include "datasets/dump.h"
#include "tools/analysis/attention_error.h"
#include "tools/presets/scheme.h"

namespace tierkv::analysis {

struct LayerData {
  int32_t seq = 0, layer = 0;
  int64_t tokens = 0;
  std::vector<RowData> k, v;  // per kv_head
  std::vector<std::vector<float>>
      q;  // per kv_head [group, positions, head_dim]; empty without queries
  std::vector<std::vector<float>> significance;  // per kv_head [tokens]; empty where not asked for
  std::vector<int32_t> positions;                // of the queries
  const Rope* rope = nullptr;  // of the layer; null: unknown, keys are taken as stored

  bool has_queries() const { return !positions.empty(); }
  // Bytes of K, V and q as the dump stores them.
  static int64_t dump_bytes(const datasets::DumpInfo& info, int32_t seq, int32_t layer);
};

// kNotFound, naming the layer, where its significance is neither stored nor computable (q of all
// positions).
Status check_significance(const datasets::DumpInfo& info, int32_t seq, int32_t layer);

// Whether the scheme takes the significance of a layer: where it needs one, and where it uses one
// that is stored or computable.
bool wants_significance(const Scheme& scheme, const datasets::DumpInfo& info, int32_t seq,
                        int32_t layer);

// How the dump or, where it does not know, the profile says that the keys of a layer are rotated;
// null: unknown.
const Rope* rope_of(const datasets::DumpInfo& info, const Profile* profile, int32_t layer);
// kInvalidArgument, naming a layer or rope_applied, where dump and profile say otherwise.
Status check_rope(const datasets::DumpInfo& info, const Profile* profile);
// "plain, theta 100000", "halves of 64 dims, frequencies by layer", "rotation unknown", ...
std::string rotation_text(const std::vector<Rope>& rope, const CacheLayout& layout);
// "keys before RoPE: plain, theta 100000", "keys are not rotated", ...
std::string describe_rope(const datasets::DumpInfo& info, const Profile* profile);

// Reads a layer. `rope` is what the dump says. `need_significance`: from the dump, or computed when
// it has the queries of all positions; check_significance() otherwise. Heads are read on up to
// `threads` threads.
Status load_layer(datasets::DumpReader& reader, int32_t seq, int32_t layer, bool need_significance,
                  int32_t threads, LayerData* out);

// The same in steps. After shape_layer() the others may run at once, one call per head and
// component; complete_significance() comes last. The memory of `out` is used again.
void shape_layer(const datasets::DumpInfo& info, int32_t seq, int32_t layer, LayerData* out);
Status load_component(datasets::DumpReader& reader, int32_t kv_head, Component c, LayerData* out);
Status load_queries(datasets::DumpReader& reader, int32_t kv_head, LayerData* out);
// Positions of the queries, and the significance that the dump holds.
Status load_shared(datasets::DumpReader& reader, bool need_significance, LayerData* out);
// Computes the significance that is needed and was not in the dump.
Status complete_significance(const datasets::DumpInfo& info, bool need_significance,
                             LayerData* out);

// Why a row of the layer cannot be coded: its largest value among these components. Those of a dump
// are finite, whatever a basis made of them.
Status cannot_hold(StatusCode code, const LayerData& data, int32_t kv_head,
                   std::initializer_list<Component> components);

// kUnsupported naming the dataset where the dump says that tokens were pruned: zeros stand for
// them.
Status check_unpruned(const datasets::DumpInfo& info);

// Means over all tokens of the row, E|x|^2 of V, and E|q|^2 (0 without queries).
RowProfile measure_row(const LayerData& data, int32_t kv_head, int32_t head_dim);

// Queries [first, first + count) of the row's positions, for all heads of its group.
QueryTile make_tile(const LayerData& data, int32_t kv_head, const CacheLayout& layout,
                    int64_t first, int64_t count);

}  // namespace tierkv::analysis
