// SPDX-License-Identifier: Apache-2.0
// The chunks kModel and kSequence of a container.
#include <algorithm>

#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"
#include "tierkv/container.h"

namespace tierkv {

std::vector<uint8_t> serialize_model(const ContainerModel& model) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  const CacheLayout& l = model.layout;
  w.i32(l.num_layers);
  w.i32(l.num_q_heads);
  w.i32(l.num_kv_heads);
  w.i32(l.head_dim);
  w.i32(static_cast<int32_t>(l.dtype));
  w.i32(l.rope_applied ? 1 : 0);
  w.f64(l.rope_theta);
  w.f64(l.sm_scale);
  w.i32(model.num_sequences);
  w.text(model.preset);
  w.text(model.model_id);
  w.text(model.created_by);
  // Layers share pairing and rotary dims; one that does not rotate has zeros.
  const auto rotated = std::find_if(model.rope.begin(), model.rope.end(), [](const Rope& rope) {
    return rope.pairing != RopePairing::kNone;
  });
  const Rope form = rotated == model.rope.end() ? Rope() : *rotated;
  w.u32(static_cast<uint32_t>(model.rope.size()));
  w.i32(static_cast<int32_t>(form.pairing));
  w.i32(form.rotary_dims);
  for (const Rope& rope : model.rope) {
    for (size_t p = 0; p < form.inv_freq.size(); ++p) {
      w.f32(p < rope.inv_freq.size() ? rope.inv_freq[p] : 0.0f);
    }
  }
  return bytes;
}

namespace {

Status bad_model(const std::string& what) {
  return corrupt("model: " + what);
}

// Layers share pairing and rotary dims.
Status read_ropes(ByteReader& r, const CacheLayout& layout, std::vector<Rope>* out) {
  const uint64_t count = r.u32();
  const int32_t pairing = r.i32(), dims = r.i32();
  if (!r.ok() || (count > 1 && count != static_cast<uint64_t>(layout.num_layers))) {
    return bad_model("rope: not of one or of all layers");
  }
  if (count == 0 && (pairing != 0 || dims != 0)) return bad_model("rope: fields of no rotation");
  if (dims < 0 || dims > layout.head_dim || r.left() != count * static_cast<uint64_t>(dims / 2) * 4)
    return bad_model("size disagrees with its fields");
  for (uint64_t i = 0; i < count; ++i) {
    Rope rope;
    rope.pairing = static_cast<RopePairing>(pairing);
    rope.rotary_dims = dims;
    for (int32_t p = 0; p < dims / 2; ++p) rope.inv_freq.push_back(r.f32());
    if (Status s = rope.validate(layout.head_dim); !s) return bad_model(s.message());
    out->push_back(std::move(rope));
  }
  return Status::ok();
}

}  // namespace

Result<ContainerModel> parse_model(const std::vector<uint8_t>& bytes) {
  ContainerModel model;
  ByteReader r(bytes);
  CacheLayout& l = model.layout;
  l.num_layers = r.i32();
  l.num_q_heads = r.i32();
  l.num_kv_heads = r.i32();
  l.head_dim = r.i32();
  const int32_t dtype = r.i32(), rope = r.i32();
  l.rope_theta = r.f64();
  l.sm_scale = r.f64();
  model.num_sequences = r.i32();
  model.preset = r.text();
  model.model_id = r.text();
  model.created_by = r.text();
  if (!r.ok()) return bad_model("size disagrees with its fields");
  if (dtype < 0 || dtype > 2) return bad_model("unknown dtype " + std::to_string(dtype));
  if (rope != 0 && rope != 1) return bad_model("rope_applied is neither 0 nor 1");
  if (model.num_sequences < 1) return bad_model("has no sequences");
  l.dtype = static_cast<DType>(dtype);
  l.rope_applied = rope == 1;
  if (Status s = l.validate(); !s) return bad_model(s.message());
  if (Status s = read_ropes(r, l, &model.rope); !s) return s;
  return model;
}

std::vector<uint8_t> serialize_sequence(const ContainerSequence& sequence) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.text(sequence.id);
  w.text(sequence.kind);
  w.u64(sequence.tokens.size());
  for (const int32_t t : sequence.tokens) w.i32(t);
  return bytes;
}

Result<ContainerSequence> parse_sequence(const std::vector<uint8_t>& bytes) {
  ContainerSequence sequence;
  ByteReader r(bytes);
  sequence.id = r.text();
  sequence.kind = r.text();
  const uint64_t count = r.u64();
  if (!r.ok() || count != r.left() / 4 || r.left() % 4 != 0 || count == 0) {
    return corrupt("sequence: size disagrees with its fields");
  }
  if (sequence.id.empty() || sequence.id.find('/') != std::string::npos) {
    return corrupt("sequence: bad id '" + sequence.id + "'");
  }
  for (uint64_t i = 0; i < count; ++i) sequence.tokens.push_back(r.i32());
  return sequence;
}

}  // namespace tierkv
