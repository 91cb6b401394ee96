// SPDX-License-Identifier: Apache-2.0
#include "datasets/dump_check.h"

#include <cmath>

#include "datasets/dump_rope.h"
#include "datasets/hdf5/hdf5_dataset.h"

namespace tierkv::datasets {
namespace {

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string s = "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    s += (i > 0 ? ", " : "") + (shape[i] < 0 ? std::string("any") : std::to_string(shape[i]));
  }
  return s + "]";
}

std::string type_text(hid_t type) {
  if (const std::optional<DType> t = dtype_of(type)) return dtype_name(*t);
  const std::string bits = std::to_string(8 * H5Tget_size(type));
  return (H5Tget_class(type) == H5T_INTEGER ? bits + "-bit integer" : bits + "-bit float") +
         (H5Tget_order(type) == H5T_ORDER_BE ? ", big-endian" : "");
}

std::optional<DType> parse_dtype(const std::string& name) {
  for (const DType t : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    if (name == dtype_name(t)) return t;
  }
  return std::nullopt;
}

// Reads a text that may be missing but, when it is there, must be text.
Status read_optional_text(hid_t object, const char* name, std::string* out) {
  Result<std::string> text = read_string_attribute(object, name);
  if (text) *out = *text;
  return text || text.status().code() == StatusCode::kNotFound ? Status::ok() : text.status();
}

class Checker {
 public:
  Checker(hid_t file, DumpInfo* info) : file_(file), info_(*info) {}

  Status run() {
    if (Status s = read_attributes(); !s) return s.with_context("/");
    Result<std::vector<Rope>> rope = read_rope(file_, info_.layout);
    if (!rope) return rope.status();
    info_.rope = std::move(*rope);
    Result<std::vector<std::string>> ids = list_group(file_, "/seq");
    if (!ids) return ids.status().with_context("/seq");
    if (ids->empty()) return corrupt("/seq: has no sequences");
    for (const std::string& id : *ids) {
      SequenceInfo seq;
      seq.id = id;
      if (Status s = check_sequence(&seq); !s) return s;
      info_.sequences.push_back(std::move(seq));
    }
    return Status::ok();
  }

 private:
  Status read_attributes() {
    const Handle root(H5Gopen2(file_, "/", H5P_DEFAULT));
    Result<std::string> format = read_string_attribute(root.id(), "format");
    if (!format) return format.status();
    if (*format != "kv-dump") {
      return corrupt("attribute 'format' is '" + printable(*format) + "' (expected 'kv-dump')");
    }
    if (Status s = read_int(root.id(), "format_version", &info_.format_version); !s) return s;
    if (info_.format_version != 1) {
      return Status(StatusCode::kVersion, "format_version " + std::to_string(info_.format_version) +
                                              " is not known (this build reads 1)");
    }
    if (Status s = read_layout(root.id()); !s) return s;
    if (Status s = read_optional_text(root.id(), "model_id", &info_.model_id); !s) return s;
    return read_optional_text(root.id(), "created_by", &info_.created_by);
  }

  Status read_layout(hid_t root) {
    CacheLayout& l = info_.layout;
    int32_t rope = 0;
    if (Status s = read_int(root, "num_layers", &l.num_layers); !s) return s;
    if (Status s = read_int(root, "num_q_heads", &l.num_q_heads); !s) return s;
    if (Status s = read_int(root, "num_kv_heads", &l.num_kv_heads); !s) return s;
    if (Status s = read_int(root, "head_dim", &l.head_dim); !s) return s;
    if (Status s = read_int(root, "rope_applied", &rope); !s) return s;
    if (rope != 0 && rope != 1) return corrupt("attribute 'rope_applied' must be 0 or 1");
    l.rope_applied = rope == 1;
    Result<std::string> dtype = read_string_attribute(root, "dtype");
    if (!dtype) return dtype.status();
    const std::optional<DType> parsed = parse_dtype(*dtype);
    if (!parsed) {
      return corrupt("attribute 'dtype' is '" + printable(*dtype) +
                     "' (expected float16, bfloat16 or float32)");
    }
    l.dtype = *parsed;
    const Result<double> scale = read_double_attribute(root, "sm_scale");
    if (!scale) return scale.status();
    l.sm_scale = *scale;
    const Result<double> theta = read_double_attribute(root, "rope_theta");
    if (!theta && theta.status().code() != StatusCode::kNotFound) return theta.status();
    l.rope_theta = theta ? *theta : 0;
    if (!std::isfinite(l.rope_theta) || l.rope_theta < 0) {
      return corrupt("attribute 'rope_theta' must be finite and not negative");
    }
    if (Status s = l.validate(); !s) return corrupt("attribute " + s.message());
    return Status::ok();
  }

  static Status read_int(hid_t root, const char* name, int32_t* out) {
    const Result<int64_t> v = read_int_attribute(root, name);
    if (!v) return v.status();
    if (*v < INT32_MIN || *v > INT32_MAX) {
      return corrupt("attribute '" + std::string(name) + "' is absurd (" + std::to_string(*v) +
                     ")");
    }
    *out = static_cast<int32_t>(*v);
    return Status::ok();
  }

  // Opens a dataset of this shape, -1 matching any extent; completeness is for the caller to check.
  Result<Dataset> open(const std::string& path, const std::vector<int64_t>& shape) {
    Result<Dataset> d = open_dataset(file_, path);
    if (!d) return d.status().with_context(path);
    bool same = d->shape.size() == shape.size();
    for (size_t i = 0; same && i < shape.size(); ++i) {
      same = shape[i] < 0 || shape[i] == d->shape[i];
    }
    if (!same) {
      return corrupt(path + ": has shape " + shape_text(d->shape) + " (expected " +
                     shape_text(shape) + ")");
    }
    return d;
  }

  Result<DType> check_floats(const std::string& path, const std::vector<int64_t>& shape) {
    Result<Dataset> d = open(path, shape);
    if (!d) return d.status();
    const std::optional<DType> dtype = dtype_of(d->type.id());
    if (!dtype) {
      return corrupt(path + ": is " + type_text(d->type.id()) +
                     " (expected little-endian float16, bfloat16 or float32)");
    }
    if (Status s = check_complete(*d); !s) return s.with_context(path);
    return *dtype;
  }

  Status check_cache(const std::string& path, const std::vector<int64_t>& shape) {
    const Result<DType> dtype = check_floats(path, shape);
    if (!dtype) return dtype.status();
    if (*dtype != info_.layout.dtype) {
      return corrupt(path + ": is " + dtype_name(*dtype) + " (expected " +
                     dtype_name(info_.layout.dtype) + ", as the attribute 'dtype' says)");
    }
    return Status::ok();
  }

  // `length` -1 takes any length and returns it.
  Status check_integers(const std::string& path, int64_t* length) {
    Result<Dataset> d = open(path, {*length});
    if (!d) return d.status();
    *length = d->shape[0];
    if (H5Tget_class(d->type.id()) != H5T_INTEGER) {
      return corrupt(path + ": is " + type_text(d->type.id()) + " (expected int32)");
    }
    return *length == 0 ? Status::ok() : check_complete(*d).with_context(path);
  }

  Status check_sequence(SequenceInfo* seq) {
    const std::string base = "/seq/" + seq->id;
    const Handle group(H5Gopen2(file_, base.c_str(), H5P_DEFAULT));
    if (!group.ok()) return corrupt(base + ": is not a group");
    if (Status s = read_optional_text(group.id(), "kind", &seq->kind); !s) {
      return s.with_context(base);
    }
    seq->num_tokens = -1;
    if (Status s = check_integers(base + "/tokens", &seq->num_tokens); !s) return s;
    if (seq->num_tokens == 0) return corrupt(base + "/tokens: has no tokens");
    if (seq->num_tokens > kMaxSequenceTokens) {
      return corrupt(base + "/tokens: has " + std::to_string(seq->num_tokens) +
                     " tokens (expected at most " + std::to_string(kMaxSequenceTokens) + ")");
    }
    Result<std::vector<std::string>> layers = list_group(file_, base + "/layer");
    if (!layers) return layers.status().with_context(base + "/layer");
    if (static_cast<int32_t>(layers->size()) != info_.layout.num_layers) {
      return corrupt(base + "/layer: has " + std::to_string(layers->size()) +
                     " layers (expected num_layers = " + std::to_string(info_.layout.num_layers) +
                     ")");
    }
    seq->layers.resize(info_.layout.num_layers);
    for (int32_t l = 0; l < info_.layout.num_layers; ++l) {
      if (Status s = check_layer(*seq, l, &seq->layers[l]); !s) return s;
    }
    return Status::ok();
  }

  Status check_layer(const SequenceInfo& seq, int32_t layer, LayerInfo* out) {
    const std::string base = layer_path(seq.id, layer);
    const CacheLayout& l = info_.layout;
    const std::vector<int64_t> cache = {l.num_kv_heads, seq.num_tokens, l.head_dim};
    if (Status s = check_cache(base + "/k", cache); !s) return s;
    if (Status s = check_cache(base + "/v", cache); !s) return s;
    out->dtype = l.dtype;
    out->has_significance = has_member(base, "significance");
    if (out->has_significance) {
      const Result<DType> dtype =
          check_floats(base + "/significance", {l.num_kv_heads, seq.num_tokens});
      if (!dtype) return dtype.status();
      if (*dtype != DType::kFloat32) {
        return corrupt(base + "/significance: is " + dtype_name(*dtype) + " (expected float32)");
      }
    }
    out->has_pruned = has_member(base, "pruned");
    out->has_q = has_member(base, "q");
    if (out->has_q) return check_queries(base, seq.num_tokens, out);
    if (has_member(base, "q_positions")) return corrupt(base + "/q: is missing beside q_positions");
    return Status::ok();
  }

  Status check_queries(const std::string& base, int64_t tokens, LayerInfo* out) {
    const CacheLayout& l = info_.layout;
    Result<Dataset> q = open(base + "/q", {l.num_q_heads, -1, l.head_dim});
    if (!q) return q.status();
    out->num_queries = q->shape[1];
    if (out->num_queries == 0 || out->num_queries > tokens) {
      return corrupt(base + "/q: has " + std::to_string(out->num_queries) +
                     " positions (expected 1 to " + std::to_string(tokens) + ")");
    }
    if (Status s = check_cache(base + "/q", q->shape); !s) return s;
    return check_integers(base + "/q_positions", &out->num_queries);
  }

  bool has_member(const std::string& base, const char* name) {
    return H5Lexists(file_, (base + "/" + name).c_str(), H5P_DEFAULT) > 0;
  }

  hid_t file_;
  DumpInfo& info_;
};

}  // namespace

std::string layer_path(const std::string& sequence, int32_t layer) {
  return "/seq/" + sequence + "/layer/" + std::to_string(layer);
}

Status check_dump(hid_t file, DumpInfo* info) {
  return Checker(file, info).run();
}

}  // namespace tierkv::datasets
