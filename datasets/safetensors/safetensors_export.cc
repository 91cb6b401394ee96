// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>

#include "codec/host/convert.h"
#include "datasets/dump_rope.h"
#include "datasets/hdf5/hdf5_util.h"
#include "datasets/safetensors/safetensors_dump.h"

namespace tierkv::datasets {
namespace {

std::string number_text(double x) {
  char text[40];
  std::snprintf(text, sizeof(text), "%.17g", x);
  return text;
}

class Exporter {
 public:
  Exporter(const DumpReader& dump, const TensorNames& names) : dump_(dump), names_(names) {}

  Status run(const std::vector<int32_t>& sequences, const std::string& path, bool overwrite,
             const ConvertProgress& progress) {
    for (const int32_t s : sequences) add_sequence(s);
    Result<SafetensorsWriter> writer = SafetensorsWriter::create(path, tensors_, metadata_);
    if (!writer) return writer.status();
    const double total = static_cast<double>(sequences.size()) * layout().num_layers;
    double done = 0;
    for (const int32_t s : sequences) {
      std::vector<int32_t> tokens;
      if (Status status = dump_.read_tokens(s, &tokens); !status) return status;
      if (Status status = append(*writer, names_.tokens_name(seq(s).id), tokens); !status)
        return status;
      for (int32_t l = 0; l < layout().num_layers; ++l) {
        if (Status status = write_layer(*writer, s, l); !status) return status;
        if (progress) progress(++done / total);
      }
    }
    return writer->finish(overwrite);
  }

 private:
  const CacheLayout& layout() const { return dump_.info().layout; }
  const SequenceInfo& seq(int32_t s) const { return dump_.info().sequences[s]; }
  std::string name(int32_t s, int32_t layer, DumpPart part) const {
    return names_.layer_name(seq(s).id, layer, part);
  }

  void add(const std::string& name, const char* dtype, std::vector<int64_t> shape) {
    TensorInfo t;
    t.name = name;
    t.dtype = dtype;
    t.shape = std::move(shape);
    tensors_.push_back(std::move(t));
  }
  std::vector<int64_t> shape(int64_t heads, int64_t positions) const {
    const int64_t d = layout().head_dim;
    switch (names_.axes) {
      case TensorAxes::kHeadTokenDim:
        return {heads, positions, d};
      case TensorAxes::kTokenHeadDim:
        return {positions, heads, d};
      case TensorAxes::kBatchHeadTokenDim:
        return {1, heads, positions, d};
      case TensorAxes::kBatchTokenHeadDim:
        return {1, positions, heads, d};
    }
    return {};
  }

  void add_sequence(int32_t s) {
    const CacheLayout& l = layout();
    const DumpInfo& info = dump_.info();
    metadata_ = {{"format", "kv-dump"},
                 {"format_version", std::to_string(info.format_version)},
                 {"model_id", info.model_id},
                 {"created_by", info.created_by},
                 {"num_q_heads", std::to_string(l.num_q_heads)},
                 {"rope_applied", l.rope_applied ? "1" : "0"},
                 {"rope_theta", number_text(l.rope_theta)},
                 {"sm_scale", number_text(l.sm_scale)}};
    metadata_.merge(rope_texts(info.rope, l));
    kinds_["kind." + seq(s).id] = seq(s).kind;
    metadata_.insert(kinds_.begin(), kinds_.end());
    add(names_.tokens_name(seq(s).id), "I32", {seq(s).num_tokens});
    for (int32_t i = 0; i < l.num_layers; ++i) {
      const LayerInfo& layer = seq(s).layers[i];
      const char* type = safetensors_name(layer.dtype);
      add(name(s, i, DumpPart::kKeys), type, shape(l.num_kv_heads, seq(s).num_tokens));
      add(name(s, i, DumpPart::kValues), type, shape(l.num_kv_heads, seq(s).num_tokens));
      if (layer.has_q) {
        add(name(s, i, DumpPart::kQueries), safetensors_name(layer.dtype),
            shape(l.num_q_heads, layer.num_queries));
        add(name(s, i, DumpPart::kQueryPositions), "I32", {layer.num_queries});
      }
      if (layer.has_significance) {
        add(name(s, i, DumpPart::kSignificance), "F32", {l.num_kv_heads, seq(s).num_tokens});
      }
    }
  }

  template <class Vector>
  static Status append(SafetensorsWriter& writer, const std::string& tensor, const Vector& values) {
    return writer.append(tensor, values.data(), values.size() * sizeof(values[0]));
  }

  // Rows [heads][positions * row_bytes] in the order of the axes.
  Status append_rows(SafetensorsWriter& writer, const std::string& tensor,
                     const std::vector<LargeBytes>& rows, int64_t positions) {
    const bool by_token =
        names_.axes == TensorAxes::kTokenHeadDim || names_.axes == TensorAxes::kBatchTokenHeadDim;
    if (!by_token) {
      for (const LargeBytes& row : rows) {
        if (Status s = append(writer, tensor, row); !s) return s;
      }
      return Status::ok();
    }
    LargeBytes all;
    for (int64_t t = 0; t < positions; ++t) {
      for (const LargeBytes& row : rows) {
        const auto bytes = static_cast<int64_t>(row.size()) / positions;
        all.insert(all.end(), row.begin() + t * bytes, row.begin() + (t + 1) * bytes);
      }
    }
    return append(writer, tensor, all);
  }

  Status write_queries(SafetensorsWriter& writer, int32_t s, int32_t layer) {
    const LayerInfo& l = seq(s).layers[layer];
    std::vector<LargeBytes> rows(layout().num_q_heads);
    std::vector<float> q;
    for (int32_t h = 0; h < layout().num_q_heads; ++h) {
      if (Status status = dump_.read_queries(s, layer, h, 1, &q); !status) return status;
      rows[h].resize(q.size() * dtype_bytes(l.dtype));
      float_to_elements(l.dtype, q.data(), static_cast<int64_t>(q.size()), rows[h].data());
    }
    std::vector<int32_t> positions;
    if (Status status = dump_.read_query_positions(s, layer, &positions); !status) return status;
    if (Status status = append(writer, name(s, layer, DumpPart::kQueryPositions), positions);
        !status) {
      return status;
    }
    return append_rows(writer, name(s, layer, DumpPart::kQueries), rows, l.num_queries);
  }

  Status write_layer(SafetensorsWriter& writer, int32_t s, int32_t layer) {
    const LayerInfo& l = seq(s).layers[layer];
    const int32_t heads = layout().num_kv_heads;
    for (const Component c : {Component::kKey, Component::kValue}) {
      std::vector<LargeBytes> rows(heads);
      for (int32_t h = 0; h < heads; ++h) {
        RowData row;
        if (Status status = dump_.read_row(s, layer, h, c, &row); !status) return status;
        rows[h] = std::move(row.bytes);
      }
      const DumpPart part = c == Component::kKey ? DumpPart::kKeys : DumpPart::kValues;
      if (Status status = append_rows(writer, name(s, layer, part), rows, seq(s).num_tokens);
          !status) {
        return status;
      }
    }
    for (int32_t h = 0; h < heads && l.has_significance; ++h) {
      std::vector<float> significance;
      if (Status status = dump_.read_significance(s, layer, h, &significance); !status)
        return status;
      if (Status status = append(writer, name(s, layer, DumpPart::kSignificance), significance);
          !status) {
        return status;
      }
    }
    return l.has_q ? write_queries(writer, s, layer) : Status::ok();
  }

  const DumpReader& dump_;
  const TensorNames& names_;
  std::vector<TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_, kinds_;
};

}  // namespace

Result<std::vector<std::string>> other_datasets(const std::string& dump_path) {
  const std::vector<std::string> known = {"k", "v", "q", "q_positions", "significance"};
  const Hdf5Lock lock;
  const Result<Handle> file = open_file(dump_path);
  if (!file) return file.status().with_context(dump_path);
  std::vector<std::string> others;
  const auto list = [&](const std::string& path) {
    const Result<std::vector<std::string>> names = list_group(file->id(), path);
    return names ? *names : std::vector<std::string>();
  };
  for (const std::string& seq : list("/seq")) {
    const std::string layers = "/seq/" + seq + "/layer";
    for (const std::string& layer : list(layers)) {
      for (const std::string& name : list(layers + "/" + layer)) {
        if (std::find(known.begin(), known.end(), name) == known.end())
          others.push_back(layers + "/" + layer + "/" + name);
      }
    }
  }
  return others;
}

Status export_safetensors(const DumpReader& dump, const TensorNames& names,
                          const std::string& only_sequence, const std::string& path, bool overwrite,
                          const ConvertProgress& progress) {
  if (Status s = names.validate(); !s) return s;
  std::vector<int32_t> sequences;
  const std::vector<SequenceInfo>& all = dump.info().sequences;
  for (size_t i = 0; i < all.size(); ++i) {
    if (only_sequence.empty() || all[i].id == only_sequence)
      sequences.push_back(static_cast<int32_t>(i));
  }
  const std::string& file = dump.info().path;
  if (sequences.empty()) {
    return Status(StatusCode::kNotFound,
                  file + ": no sequence '" + printable(only_sequence) + "' (--seq)");
  }
  if (sequences.size() > 1 && !names.has_sequences()) {
    return Status(StatusCode::kInvalidArgument,
                  file + ": has " + std::to_string(sequences.size()) +
                      " sequences and names without {seq}; choose one (--seq)");
  }
  return Exporter(dump, names).run(sequences, path, overwrite, progress);
}

}  // namespace tierkv::datasets
