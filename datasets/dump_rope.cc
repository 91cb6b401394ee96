// SPDX-License-Identifier: Apache-2.0
#include "datasets/dump_rope.h"

#include <charconv>
#include <cmath>
#include <cstdio>

#include "datasets/hdf5/hdf5_dataset.h"
#include "datasets/slab.h"

namespace tierkv::datasets {
namespace {

constexpr char kFrequencies[] = "/rope_inv_freq";

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

Result<RopePairing> parse_pairing(const std::string& name, bool applied) {
  for (int32_t i = 0; i < 3; ++i) {
    if (name == kPairingNames[i] && (i != 0) == applied) return static_cast<RopePairing>(i);
  }
  return corrupt("attribute 'rope_pairing' is '" + printable(name) + "' (expected " +
                 (applied ? "'halves' or 'neighbours', as rope_applied is 1)"
                          : "'none', as rope_applied is 0)"));
}

// Frequencies of one layer after the other; *layers: 1 where they are the same for all.
Result<std::vector<float>> read_frequencies(hid_t file, int64_t pairs, int64_t num_layers,
                                            int64_t* layers) {
  const Result<Dataset> d = open_dataset(file, kFrequencies);
  if (!d) return d.status().with_context(kFrequencies);
  const bool shared = d->shape == std::vector<int64_t>{pairs};
  if (!shared && d->shape != std::vector<int64_t>{num_layers, pairs}) {
    std::string shape;
    for (const int64_t n : d->shape) shape += (shape.empty() ? "" : ", ") + std::to_string(n);
    const std::string half = std::to_string(pairs);
    return corrupt(std::string(kFrequencies) + ": has shape [" + shape + "] (expected [" + half +
                   "] or [" + std::to_string(num_layers) + ", " + half + "], by rope_dims)");
  }
  if (dtype_of(d->type.id()) != DType::kFloat32) {
    return corrupt(std::string(kFrequencies) + ": is not little-endian float32");
  }
  if (Status s = check_complete(*d); !s) return s.with_context(kFrequencies);
  *layers = shared ? 1 : num_layers;
  std::vector<float> out;
  const Slab all = {std::vector<int64_t>(d->shape.size(), 0), d->shape};
  if (Status s = read_slab_as(file, kFrequencies, all, &out); !s) return s;
  for (size_t i = 0; i < out.size(); ++i) {
    if (std::isfinite(out[i]) && out[i] >= 0) continue;
    return corrupt(std::string(kFrequencies) + ": element " + std::to_string(i) + " is " +
                   std::to_string(out[i]) + " (expected radians a position, not negative)");
  }
  return out;
}

Result<int32_t> read_dims(hid_t root, int32_t head_dim) {
  const Result<int64_t> dims = read_int_attribute(root, "rope_dims");
  if (!dims) return dims.status().with_context("/");
  if (*dims <= 0 || *dims % 2 != 0 || *dims > head_dim) {
    return corrupt("/: attribute 'rope_dims' is " + std::to_string(*dims) +
                   " (expected an even number up to head_dim = " + std::to_string(head_dim) + ")");
  }
  return static_cast<int32_t>(*dims);
}

}  // namespace

std::vector<Rope> implied_rope(const CacheLayout& layout) {
  if (!layout.rope_applied) return {Rope{}};
  if (layout.rope_theta <= 0 || layout.head_dim % 2 != 0) return {};
  Rope plain = Rope::plain(layout.rope_theta, layout.head_dim);
  if (!plain.validate(layout.head_dim)) return {};  // a base so small that a frequency overflows
  return {std::move(plain)};
}

Result<std::vector<Rope>> read_rope(hid_t file, const CacheLayout& layout) {
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  const bool has_frequencies = H5Lexists(file, kFrequencies, H5P_DEFAULT) > 0;
  const Result<std::string> name = read_string_attribute(root.id(), "rope_pairing");
  if (!name && name.status().code() != StatusCode::kNotFound)
    return name.status().with_context("/");
  if (!name) {
    if (!has_frequencies && H5Aexists(root.id(), "rope_dims") <= 0) return implied_rope(layout);
    return corrupt("/: attribute 'rope_pairing' is missing beside rope_dims or rope_inv_freq");
  }
  Rope rope;
  const Result<RopePairing> pairing = parse_pairing(*name, layout.rope_applied);
  if (!pairing) return pairing.status().with_context("/");
  rope.pairing = *pairing;
  if (rope.pairing == RopePairing::kNone) {
    if (!has_frequencies) return std::vector<Rope>{rope};
    return corrupt(std::string(kFrequencies) + ": is there although rope_pairing is 'none'");
  }
  const Result<int32_t> dims = read_dims(root.id(), layout.head_dim);
  if (!dims) return dims.status();
  rope.rotary_dims = *dims;
  int64_t layers = 0;
  const int64_t pairs = *dims / 2;
  const Result<std::vector<float>> frequencies =
      read_frequencies(file, pairs, layout.num_layers, &layers);
  if (!frequencies) return frequencies.status();
  std::vector<Rope> out(layers, rope);
  for (int64_t l = 0; l < layers; ++l) {
    out[l].inv_freq.assign(frequencies->begin() + l * pairs,
                           frequencies->begin() + (l + 1) * pairs);
  }
  return out;
}

std::map<std::string, std::string> rope_texts(const std::vector<Rope>& rope,
                                              const CacheLayout& layout) {
  if (rope.empty() || rope == implied_rope(layout)) return {};
  std::map<std::string, std::string> texts = {
      {"rope_pairing", kPairingNames[static_cast<int32_t>(rope[0].pairing)]}};
  if (rope[0].pairing == RopePairing::kNone) return texts;
  texts["rope_dims"] = std::to_string(rope[0].rotary_dims);
  std::string& all = texts["rope_inv_freq"];
  for (const Rope& r : rope) {
    for (const float f : r.inv_freq) {
      char text[40];
      std::snprintf(text, sizeof(text), "%.9g", static_cast<double>(f));
      all += (all.empty() ? "" : " ") + std::string(text);
    }
  }
  return texts;
}

Result<std::vector<Rope>> parse_rope_texts(const std::map<std::string, std::string>& texts,
                                           const CacheLayout& layout) {
  const auto text = [&](const char* name) {
    const auto it = texts.find(name);
    return it == texts.end() ? std::string() : it->second;
  };
  if (text("rope_pairing").empty()) return implied_rope(layout);
  Rope rope;
  const Result<RopePairing> pairing = parse_pairing(text("rope_pairing"), layout.rope_applied);
  if (!pairing) return pairing.status();
  rope.pairing = *pairing;
  if (rope.pairing == RopePairing::kNone) return std::vector<Rope>{rope};
  const std::string dims = text("rope_dims"), frequencies = text("rope_inv_freq");
  const char* dims_end = dims.data() + dims.size();
  const auto parsed = std::from_chars(dims.data(), dims_end, rope.rotary_dims);
  if (parsed.ec != std::errc() || parsed.ptr != dims_end || rope.rotary_dims <= 0) {
    return corrupt("rope_dims is '" + printable(dims) + "' (expected a positive number)");
  }
  std::vector<float> all;
  const char* end = frequencies.data() + frequencies.size();
  for (const char* p = frequencies.data(); p < end;) {
    const auto [next, error] = std::from_chars(p, end, all.emplace_back());
    if (error != std::errc() || (next != end && *next != ' ')) {
      return corrupt("rope_inv_freq: element " + std::to_string(all.size() - 1) +
                     " is no number in range");
    }
    p = next == end ? end : next + 1;
  }
  const auto pairs = static_cast<size_t>(rope.rotary_dims / 2);
  if (pairs == 0 || (all.size() != pairs && all.size() != pairs * layout.num_layers)) {
    return corrupt("rope_inv_freq: has " + std::to_string(all.size()) + " numbers (expected " +
                   std::to_string(pairs) + ", or as many for each layer)");
  }
  std::vector<Rope> out(all.size() / pairs, rope);
  for (size_t l = 0; l < out.size(); ++l) {
    out[l].inv_freq.assign(all.begin() + l * pairs, all.begin() + (l + 1) * pairs);
  }
  if (Status s = check_rope(out, layout); !s) return corrupt(s.message());
  return out;
}

Status check_rope(const std::vector<Rope>& rope, const CacheLayout& layout) {
  const auto bad = [](const std::string& what) {
    return Status(StatusCode::kInvalidArgument, "rope: " + what);
  };
  if (rope.empty()) return Status::ok();
  if (rope.size() != 1 && rope.size() != static_cast<size_t>(layout.num_layers)) {
    return bad(std::to_string(rope.size()) + " rotations for " + std::to_string(layout.num_layers) +
               " layers");
  }
  if (layout.rope_applied != (rope[0].pairing != RopePairing::kNone)) {
    return bad("the pairing contradicts rope_applied");
  }
  for (const Rope& r : rope) {
    if (Status s = r.validate(layout.head_dim); !s) return s;
    if (r.pairing != rope[0].pairing || r.rotary_dims != rope[0].rotary_dims) {
      return bad("layers differ in pairing or in rotary dims");
    }
    if (layout.rope_applied && r.rotary_dims == 0) return bad("a pairing without rotary dims");
  }
  return Status::ok();
}

bool write_rope(hid_t file, const std::vector<Rope>& rope, const CacheLayout& layout) {
  if (rope.empty() || rope == implied_rope(layout)) return true;
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  const Rope& first = rope[0];
  if (!write_string_attribute(root.id(), "rope_pairing",
                              kPairingNames[static_cast<int32_t>(first.pairing)])) {
    return false;
  }
  if (first.pairing == RopePairing::kNone) return true;
  std::vector<int64_t> shape = {first.rotary_dims / 2};
  if (rope.size() > 1) shape.insert(shape.begin(), static_cast<int64_t>(rope.size()));
  std::vector<float> all;
  for (const Rope& r : rope) all.insert(all.end(), r.inv_freq.begin(), r.inv_freq.end());
  const Handle d = create_dataset(file, "rope_inv_freq", H5T_IEEE_F32LE, shape, {});
  const bool written =
      d.ok() && H5Dwrite(d.id(), H5T_NATIVE_FLOAT, H5S_ALL, H5S_ALL, H5P_DEFAULT, all.data()) >= 0;
  return flushed(d, written) && write_int_attribute(root.id(), "rope_dims", first.rotary_dims);
}

}  // namespace tierkv::datasets
