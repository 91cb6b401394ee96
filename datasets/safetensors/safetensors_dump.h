// SPDX-License-Identifier: Apache-2.0
// kv-dumps to safetensors and back, under names of the caller's choice.
#pragma once

#include <functional>
#include <optional>

#include "datasets/dump.h"
#include "datasets/safetensors/safetensors.h"
#include "datasets/safetensors/tensor_names.h"

namespace tierkv::datasets {

using ConvertProgress = std::function<void(double)>;  // share done; may be empty

// Every value as stored; the attributes of the dump go to "__metadata__". kInvalidArgument where
// the names hold one sequence and the dump has more (only_sequence: the one to take, empty: all).
Status export_safetensors(const DumpReader& dump, const TensorNames& names,
                          const std::string& only_sequence, const std::string& path, bool overwrite,
                          const ConvertProgress& progress);

// Paths of datasets in a dump's layers that a kv-dump does not name and that are therefore not
// carried over, such as `pruned` of a decompressed container.
Result<std::vector<std::string>> other_datasets(const std::string& dump_path);

// What tensors do not say of a model; what is unset comes from the metadata of a file that
// export_safetensors() wrote, or is assumed.
struct ModelFacts {
  std::optional<int32_t> num_q_heads;
  std::optional<double> sm_scale, rope_theta;
  std::optional<bool> rope_applied;
  std::optional<std::string> model_id;
};

// Where everything of a dump lies in a safetensors file. Pointers are into the header.
struct ImportPlan {
  struct Layer {
    std::array<const TensorInfo*, kNumDumpParts> parts{};  // null: not there
  };
  struct Sequence {
    std::string id, kind;
    const TensorInfo* tokens = nullptr;  // null: not there
    int64_t num_tokens = 0;
    std::vector<Layer> layers;
  };
  DumpInfo info;  // without sequences
  std::vector<Sequence> sequences;
  std::vector<std::string> left_out;  // tensors whose names do not match
  std::vector<std::string> assumed;   // facts that neither the file nor the caller gave
};

// kCorrupt or kNotFound with the tensor that is missing or does not fit.
Result<ImportPlan> plan_import(const SafetensorsHeader& header, const TensorNames& names,
                               const ModelFacts& facts);

// Writes the dump of a plan; values that are not finite are refused.
Status import_safetensors(const SafetensorsReader& file, const ImportPlan& plan, TensorAxes axes,
                          const std::string& path, bool overwrite, const ConvertProgress& progress);

}  // namespace tierkv::datasets
