// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cmath>

#include "codec/host/convert.h"
#include "datasets/dump_rope.h"
#include "datasets/hdf5/hdf5_util.h"
#include "datasets/safetensors/safetensors_dump.h"
#include "tierkv/half.h"

namespace tierkv::datasets {
namespace {

Status tensor_error(const TensorInfo& t, const std::string& what) {
  return Status(StatusCode::kCorrupt, "tensor '" + printable(t.name) + "': " + what);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (const int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

// Heads, positions and channels of a tensor of k, v or q.
struct Extents {
  int64_t heads = 0, positions = 0, head_dim = 0;
};

Status extents_of(const TensorInfo& t, TensorAxes axes, Extents* out) {
  const bool batch =
      axes == TensorAxes::kBatchHeadTokenDim || axes == TensorAxes::kBatchTokenHeadDim;
  const bool by_token = axes == TensorAxes::kTokenHeadDim || axes == TensorAxes::kBatchTokenHeadDim;
  std::vector<int64_t> shape = t.shape;
  if (batch && shape.size() == 4 && shape[0] == 1) shape.erase(shape.begin());
  if (shape.size() != 3 || (batch && t.shape.size() != 4)) {
    return tensor_error(t, "has shape " + shape_text(t.shape) + " (expected " +
                               (batch ? "[1, " : "[") +
                               (by_token ? "tokens, heads" : "heads, tokens") + ", head_dim])");
  }
  if (by_token) std::swap(shape[0], shape[1]);
  *out = {shape[0], shape[1], shape[2]};
  return Status::ok();
}

bool parse_dtype(const std::string& name, DType* out) {
  for (const DType t : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    if (name != safetensors_name(t)) continue;
    *out = t;
    return true;
  }
  return false;
}

template <class T>
bool parse_number(const std::string& text, T* out) {
  const char* end = text.data() + text.size();
  const auto [p, error] = std::from_chars(text.data(), end, *out);
  return error == std::errc() && p == end;
}

class Planner {
 public:
  Planner(const SafetensorsHeader& header, const TensorNames& names, const ModelFacts& facts)
      : header_(header), names_(names), facts_(facts) {}

  Result<ImportPlan> run() {
    if (Status s = names_.validate(); !s) return s;
    if (Status s = check_version(); !s) return s;
    if (Status s = place_tensors(); !s) return s;
    if (Status s = read_layout(); !s) return s;
    for (ImportPlan::Sequence& seq : plan_.sequences) {
      if (Status s = check_sequence(&seq); !s) return s;
    }
    if (Status s = plan_.info.layout.validate(); !s) return s;
    return std::move(plan_);
  }

 private:
  size_t sequence_index(const std::string& name) {
    const std::string id = names_.has_sequences() ? name : "0";
    const auto [it, is_new] = place_.emplace(id, plan_.sequences.size());
    if (is_new) {
      plan_.sequences.emplace_back();
      plan_.sequences.back().id = id;
    }
    return it->second;
  }

  Status place_tensors() {
    std::vector<std::pair<std::string, const TensorInfo*>> tokens;
    std::map<size_t, std::map<int32_t, ImportPlan::Layer>> layers;  // by sequence
    for (const TensorInfo& t : header_.tensors) {
      TensorNames::Place place;
      std::string seq;
      if (names_.match_layer(t.name, &place)) {
        const size_t index = sequence_index(place.seq);
        const TensorInfo*& part = layers[index][place.layer].parts[static_cast<int>(place.part)];
        if (part != nullptr) {
          return tensor_error(t, "has the place of '" + printable(part->name) + "'");
        }
        part = &t;
      } else if (names_.match_tokens(t.name, &seq)) {
        tokens.emplace_back(seq, &t);
      } else {
        plan_.left_out.push_back(t.name);
      }
    }
    if (plan_.sequences.empty()) {
      std::string why = "no tensor is called " + names_.layer;
      if (!header_.tensors.empty())
        why += " (the first is '" + printable(header_.tensors[0].name) + "')";
      return Status(StatusCode::kNotFound, why);
    }
    for (const auto& [index, by_number] : layers) {
      ImportPlan::Sequence& seq = plan_.sequences[index];
      for (const auto& [number, layer] : by_number) {
        const auto next = static_cast<int32_t>(seq.layers.size());
        if (number != next) return missing(seq, next, DumpPart::kKeys);
        seq.layers.push_back(layer);
      }
    }
    for (const auto& [seq, tensor] : tokens) {
      const auto it = place_.find(names_.has_sequences() ? seq : "0");
      if (it == place_.end()) return tensor_error(*tensor, "its sequence has no layers");
      plan_.sequences[it->second].tokens = tensor;
    }
    return Status::ok();
  }

  const std::string* metadata(const std::string& key) const {
    const auto format = header_.metadata.find("format");
    if (format == header_.metadata.end() || format->second != "kv-dump") return nullptr;
    const auto it = header_.metadata.find(key);
    return it == header_.metadata.end() ? nullptr : &it->second;
  }

  Status check_version() const {
    const std::string* version = metadata("format_version");
    if (version == nullptr || *version == "1") return Status::ok();
    return Status(StatusCode::kVersion, "metadata 'format_version' is '" + printable(*version) +
                                            "' (this build reads 1)");
  }

  // From the caller, else the metadata, else `assumed`, which is then named.
  template <class T>
  Status fact(const char* key, const std::optional<T>& given, T assumed, T* out) {
    *out = given ? *given : assumed;
    if (given) return Status::ok();
    const std::string* text = metadata(key);
    if (text == nullptr) {
      plan_.assumed.push_back(std::string(key) + " = " + std::to_string(assumed));
      return Status::ok();
    }
    if (parse_number(*text, out)) return Status::ok();
    return Status(StatusCode::kCorrupt, "metadata '" + std::string(key) + "' is '" +
                                            printable(*text) + "', no number in range");
  }

  Status read_layout() {
    const ImportPlan::Sequence& first = plan_.sequences[0];
    const TensorInfo* k = first.layers[0].parts[static_cast<int>(DumpPart::kKeys)];
    if (k == nullptr) return missing(first, 0, DumpPart::kKeys);
    Extents e;
    if (Status s = extents_of(*k, names_.axes, &e); !s) return s;
    if (e.heads < 1 || e.heads > 65536 || e.head_dim < 1 || e.head_dim > kMaxHeadDim)
      return tensor_error(*k, "has " + std::to_string(e.heads) + " heads of " +
                                  std::to_string(e.head_dim) + " channels");
    CacheLayout& l = plan_.info.layout;
    l.num_layers = static_cast<int32_t>(first.layers.size());
    l.num_kv_heads = static_cast<int32_t>(e.heads);
    l.head_dim = static_cast<int32_t>(e.head_dim);
    if (!parse_dtype(k->dtype, &l.dtype)) return wrong_dtype(*k);
    int32_t q_heads = l.num_kv_heads, rope = 1;
    if (const TensorInfo* q = first.layers[0].parts[static_cast<int>(DumpPart::kQueries)]) {
      if (Status s = extents_of(*q, names_.axes, &e); !s) return s;
      q_heads = static_cast<int32_t>(std::clamp<int64_t>(e.heads, 0, 1 << 20));
    }
    std::optional<int32_t> rope_given;
    if (facts_.rope_applied) rope_given = *facts_.rope_applied ? 1 : 0;
    if (Status s = fact("num_q_heads", facts_.num_q_heads, q_heads, &l.num_q_heads); !s) return s;
    if (Status s = fact("rope_applied", rope_given, 1, &rope); !s) return s;
    if (Status s = fact("rope_theta", facts_.rope_theta, 0.0, &l.rope_theta); !s) return s;
    if (Status s = fact("sm_scale", facts_.sm_scale, 1 / std::sqrt(l.head_dim), &l.sm_scale); !s)
      return s;
    l.rope_applied = rope != 0;
    if (!std::isfinite(l.rope_theta) || l.rope_theta < 0 || rope < 0 || rope > 1) {
      return Status(StatusCode::kCorrupt, "rope_theta or rope_applied is out of range");
    }
    const bool ours = metadata("format") != nullptr && !facts_.rope_theta && !facts_.rope_applied;
    Result<std::vector<Rope>> turns =
        ours ? parse_rope_texts(header_.metadata, l) : Result<std::vector<Rope>>(implied_rope(l));
    if (!turns) return turns.status().with_context("metadata");
    plan_.info.rope = std::move(*turns);
    if (const std::string* id = metadata("model_id")) plan_.info.model_id = *id;
    if (facts_.model_id) plan_.info.model_id = *facts_.model_id;
    return Status::ok();
  }

  Status missing(const ImportPlan::Sequence& seq, int32_t layer, DumpPart part) const {
    return Status(StatusCode::kNotFound,
                  "tensor '" + printable(names_.layer_name(seq.id, layer, part)) + "' is missing");
  }
  Status wrong_dtype(const TensorInfo& t) const {
    return tensor_error(
        t, "is " + t.dtype + " (expected F16, BF16 or F32, the same for all k, v and q)");
  }

  Status check_rows(const TensorInfo& t, int64_t heads, int64_t positions) const {
    DType dtype;
    if (!parse_dtype(t.dtype, &dtype) || dtype != plan_.info.layout.dtype) return wrong_dtype(t);
    Extents e;
    if (Status s = extents_of(t, names_.axes, &e); !s) return s;
    if (e.heads != heads || e.head_dim != plan_.info.layout.head_dim || e.positions != positions) {
      return tensor_error(t, "has shape " + shape_text(t.shape) + " (expected " +
                                 std::to_string(heads) + " heads, " + std::to_string(positions) +
                                 " positions, head_dim " +
                                 std::to_string(plan_.info.layout.head_dim) + ")");
    }
    return Status::ok();
  }
  Status check_vector(const TensorInfo& t, std::vector<int64_t> shape, const char* dtype) const {
    if (t.shape == shape && t.dtype == dtype) return Status::ok();
    return tensor_error(t, "is " + t.dtype + " " + shape_text(t.shape) + " (expected " + dtype +
                               " " + shape_text(shape) + ")");
  }

  // As in a kv-dump, or as Hugging Face tokenizers give them: int64, with a batch of one.
  static Status check_tokens(const TensorInfo& t, int64_t tokens) {
    std::vector<int64_t> shape = t.shape;
    if (shape.size() == 2 && shape[0] == 1) shape.erase(shape.begin());
    if (shape == std::vector<int64_t>{tokens} && (t.dtype == "I32" || t.dtype == "I64"))
      return Status::ok();
    return tensor_error(t, "is " + t.dtype + " " + shape_text(t.shape) + " (expected I32 or I64 [" +
                               std::to_string(tokens) + "] or [1, " + std::to_string(tokens) +
                               "])");
  }

  Status check_sequence(ImportPlan::Sequence* seq) {
    const CacheLayout& l = plan_.info.layout;
    if (static_cast<int32_t>(seq->layers.size()) != l.num_layers) {
      return Status(StatusCode::kCorrupt, "sequence '" + printable(seq->id) + "' has " +
                                              std::to_string(seq->layers.size()) +
                                              " layers, another has " +
                                              std::to_string(l.num_layers));
    }
    const TensorInfo* first = seq->layers[0].parts[0];
    if (first == nullptr) return missing(*seq, 0, DumpPart::kKeys);
    Extents e;
    if (Status s = extents_of(*first, names_.axes, &e); !s) return s;
    if (e.positions < 1 || e.positions > kMaxSequenceTokens) {
      return tensor_error(*first, "has " + std::to_string(e.positions) + " tokens");
    }
    seq->num_tokens = e.positions;
    if (const std::string* kind = metadata("kind." + seq->id)) seq->kind = *kind;
    if (seq->tokens != nullptr) {
      if (Status s = check_tokens(*seq->tokens, seq->num_tokens); !s) return s;
    } else {
      plan_.assumed.push_back("tokens of sequence '" + printable(seq->id) + "' = 0, 0, 0, ...");
    }
    for (int32_t i = 0; i < l.num_layers; ++i) {
      if (Status s = check_layer(*seq, i); !s) return s;
    }
    return Status::ok();
  }

  Status check_layer(const ImportPlan::Sequence& seq, int32_t layer) {
    const CacheLayout& l = plan_.info.layout;
    const auto& parts = seq.layers[layer].parts;
    const auto part = [&](DumpPart p) { return parts[static_cast<int>(p)]; };
    for (const DumpPart p : {DumpPart::kKeys, DumpPart::kValues}) {
      if (part(p) == nullptr) return missing(seq, layer, p);
      if (Status s = check_rows(*part(p), l.num_kv_heads, seq.num_tokens); !s) return s;
    }
    if (const TensorInfo* s = part(DumpPart::kSignificance)) {
      if (Status status = check_vector(*s, {l.num_kv_heads, seq.num_tokens}, "F32"); !status)
        return status;
    }
    const TensorInfo* q = part(DumpPart::kQueries);
    const TensorInfo* positions = part(DumpPart::kQueryPositions);
    if (q == nullptr) {
      return positions == nullptr ? Status::ok() : missing(seq, layer, DumpPart::kQueries);
    }
    Extents e;
    if (Status s = extents_of(*q, names_.axes, &e); !s) return s;
    if (e.positions < 1 || e.positions > seq.num_tokens) {
      return tensor_error(*q, "has " + std::to_string(e.positions) + " positions (expected 1 to " +
                                  std::to_string(seq.num_tokens) + ")");
    }
    if (Status s = check_rows(*q, l.num_q_heads, e.positions); !s) return s;
    if (positions != nullptr) return check_vector(*positions, {e.positions}, "I32");
    if (e.positions == seq.num_tokens) return Status::ok();
    return missing(seq, layer, DumpPart::kQueryPositions);
  }

  const SafetensorsHeader& header_;
  const TensorNames& names_;
  const ModelFacts& facts_;
  ImportPlan plan_;
  std::map<std::string, size_t> place_;  // of sequences in the plan
};

class Importer {
 public:
  Importer(const SafetensorsReader& file, const ImportPlan& plan, TensorAxes axes,
           DumpWriter* writer)
      : file_(file), plan_(plan), axes_(axes), writer_(*writer) {}

  Status write_sequence(const ImportPlan::Sequence& seq, const std::function<void()>& layer_done) {
    std::vector<int32_t> tokens(seq.num_tokens, 0);
    if (seq.tokens != nullptr) {
      if (Status s = read_tokens(*seq.tokens, &tokens); !s) return s;
    }
    if (Status s = writer_.begin_sequence(seq.id, seq.kind, tokens); !s) return s;
    for (const ImportPlan::Layer& layer : seq.layers) {
      if (Status s = write_layer(seq, layer); !s) return s;
      layer_done();
    }
    return Status::ok();
  }

 private:
  template <class T>
  Status read(const TensorInfo& t, std::vector<T>* out) const {
    out->resize(t.bytes() / sizeof(T));
    return file_.read(t, 0, t.bytes(), out->data());
  }

  Status read_tokens(const TensorInfo& t, std::vector<int32_t>* out) const {
    if (t.dtype == "I32") return read(t, out);
    std::vector<int64_t> wide;
    if (Status s = read(t, &wide); !s) return s;
    for (size_t i = 0; i < wide.size(); ++i) {
      if (wide[i] >= INT32_MIN && wide[i] <= INT32_MAX) continue;
      return tensor_error(t, "element " + std::to_string(i) + " is " + std::to_string(wide[i]) +
                                 " (expected an int32)")
          .with_context(file_.path());
    }
    out->assign(wide.begin(), wide.end());
    return Status::ok();
  }

  Status read_positions(const TensorInfo& t, int64_t tokens, std::vector<int32_t>* out) const {
    if (Status s = read(t, out); !s) return s;
    for (size_t i = 0; i < out->size(); ++i) {
      const int32_t p = (*out)[i];
      if (p >= 0 && p < tokens && (i == 0 || p > (*out)[i - 1])) continue;
      return tensor_error(t, "element " + std::to_string(i) + " is " + std::to_string(p) +
                                 " (expected increasing positions below " + std::to_string(tokens) +
                                 ")")
          .with_context(file_.path());
    }
    return Status::ok();
  }

  Status read_significance(const TensorInfo& t, std::vector<float>* out) const {
    if (Status s = read(t, out); !s) return s;
    for (size_t i = 0; i < out->size(); ++i) {
      if (is_finite((*out)[i]) && (*out)[i] >= 0) continue;
      return tensor_error(t, "element " + std::to_string(i) + " is negative or not finite")
          .with_context(file_.path());
    }
    return Status::ok();
  }

  // Calls write(head, values [positions, head_dim]) for every head of a tensor of k, v or q.
  template <class Write>
  Status each_head(const TensorInfo& t, int32_t heads, const Write& write) {
    std::vector<uint8_t> bytes;
    if (Status s = read(t, &bytes); !s) return s;
    const DType dtype = plan_.info.layout.dtype;
    const int64_t d = plan_.info.layout.head_dim;
    const int64_t positions = static_cast<int64_t>(bytes.size()) / (heads * d * dtype_bytes(dtype));
    const bool by_token =
        axes_ == TensorAxes::kTokenHeadDim || axes_ == TensorAxes::kBatchTokenHeadDim;
    std::vector<float> x(positions * d);
    for (int32_t h = 0; h < heads; ++h) {
      for (int64_t p = 0; p < positions; ++p) {
        const int64_t at = by_token ? p * heads + h : h * positions + p;
        elements_to_float(dtype, bytes.data() + at * d * dtype_bytes(dtype), d, x.data() + p * d);
      }
      const auto bad = std::find_if_not(x.begin(), x.end(), is_finite);
      if (bad != x.end()) {
        return Status(StatusCode::kNonFinite, file_.path() + ": tensor '" + printable(t.name) +
                                                  "': head " + std::to_string(h) + ", position " +
                                                  std::to_string((bad - x.begin()) / d) +
                                                  " is not finite");
      }
      if (Status s = write(h, x.data()); !s) return s;
    }
    return Status::ok();
  }

  Status write_layer(const ImportPlan::Sequence& seq, const ImportPlan::Layer& layer) {
    const CacheLayout& l = plan_.info.layout;
    const auto part = [&](DumpPart p) { return layer.parts[static_cast<int>(p)]; };
    const TensorInfo* q = part(DumpPart::kQueries);
    std::vector<int32_t> positions;
    if (const TensorInfo* given = part(DumpPart::kQueryPositions)) {
      if (Status s = read_positions(*given, seq.num_tokens, &positions); !s) return s;
    } else if (q != nullptr) {
      for (int64_t t = 0; t < seq.num_tokens; ++t) positions.push_back(static_cast<int32_t>(t));
    }
    const TensorInfo* significance = part(DumpPart::kSignificance);
    if (Status s = writer_.begin_layer(positions, significance != nullptr); !s) return s;
    for (const Component c : {Component::kKey, Component::kValue}) {
      const TensorInfo& t = *part(c == Component::kKey ? DumpPart::kKeys : DumpPart::kValues);
      const auto write = [&](int32_t h, const float* x) { return writer_.write_row(h, c, x); };
      if (Status s = each_head(t, l.num_kv_heads, write); !s) return s;
    }
    if (q != nullptr) {
      const auto write = [&](int32_t h, const float* x) { return writer_.write_queries(h, x); };
      if (Status s = each_head(*q, l.num_q_heads, write); !s) return s;
    }
    if (significance == nullptr) return Status::ok();
    std::vector<float> x;
    if (Status s = read_significance(*significance, &x); !s) return s;
    for (int32_t h = 0; h < l.num_kv_heads; ++h) {
      if (Status s = writer_.write_significance(h, x.data() + h * seq.num_tokens); !s) return s;
    }
    return Status::ok();
  }

  const SafetensorsReader& file_;
  const ImportPlan& plan_;
  TensorAxes axes_;
  DumpWriter& writer_;
};

}  // namespace

Result<ImportPlan> plan_import(const SafetensorsHeader& header, const TensorNames& names,
                               const ModelFacts& facts) {
  return Planner(header, names, facts).run();
}

Status import_safetensors(const SafetensorsReader& file, const ImportPlan& plan, TensorAxes axes,
                          const std::string& path, bool overwrite,
                          const ConvertProgress& progress) {
  DumpInfo info = plan.info;
  info.created_by = "tierkv convert";
  Result<DumpWriter> writer = DumpWriter::create(path, info);
  if (!writer) return writer.status();
  Importer importer(file, plan, axes, &writer.value());
  const double total = static_cast<double>(plan.sequences.size()) * info.layout.num_layers;
  double done = 0;
  for (const ImportPlan::Sequence& seq : plan.sequences) {
    const Status s = importer.write_sequence(seq, [&] {
      if (progress) progress(++done / total);
    });
    if (!s) return s;
  }
  return writer->finish(overwrite);
}

}  // namespace tierkv::datasets
