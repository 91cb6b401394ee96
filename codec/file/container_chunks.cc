// SPDX-License-Identifier: Apache-2.0
#include "codec/file/container_chunks.h"

#include <algorithm>
#include <cmath>

#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"
#include "codec/host/convert.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxUnitTokens = 1 << 20;
constexpr int64_t kMaxTokens = int64_t{1} << 40;  // tokens * kMaxHeadDim * 16 bits stays below 2^63

// Groups of parameters of a segment, as for_each_group() visits them.
int64_t group_count(const SegmentFormat& f, int64_t tokens) {
  if (f.raw() || f.format.step_rule == StepRule::kAbsolute || f.is_weighted()) return 0;
  if (f.format.unit == Unit::kToken) {
    return tokens * f.head_dim / (f.format.group > 0 ? f.format.group : f.head_dim);
  }
  const int64_t spans = (tokens + f.format.group - 1) / f.format.group;
  return f.format.unit == Unit::kChannel ? spans * f.head_dim : spans;
}

struct SegmentSizes {
  uint64_t data = 0, params = 0, blocks = 0, units = 0, raw_values = 0;
};

template <class Enum>
bool read_enum(ByteReader& r, int32_t count, Enum* out) {
  const int32_t x = r.i32();
  *out = static_cast<Enum>(x);
  return x >= 0 && x < count;
}

Status read_format(ByteReader& r, int32_t head_dim, SegmentFormat* f) {
  f->format.type = CodeType::of_bits(r.i32());
  if (!read_enum(r, 5, &f->format.step_rule)) return corrupt("unknown step rule");
  if (!read_enum(r, 4, &f->format.unit)) return corrupt("unknown unit");
  f->format.group = r.i32();
  f->format.step = r.f64();
  if (!read_enum(r, 3, &f->format.basis)) return corrupt("unknown basis");
  if (!read_enum(r, 2, &f->coded)) return corrupt("unknown coder");
  if (!read_enum(r, 2, &f->raw_dtype)) return corrupt("unknown raw dtype");
  f->head_dim = r.i32();
  if (f->head_dim != head_dim) return corrupt("head_dim is not the model's");
  if (Status s = f->format.validate(head_dim); !s) return corrupt(s.message());
  if (f->format.group > kMaxUnitTokens) return corrupt("group is too large");
  if (f->raw() ? f->coded : f->format.type.bits() == 0 && !f->coded) {
    return corrupt("coder does not fit the format");
  }
  if (f->format.unit == Unit::kGlobal && f->format.step_rule != StepRule::kAbsolute) {
    return corrupt("unit does not fit the step rule");
  }
  if (f->coded) f->format.entropy = Entropy::kHuffman;
  return Status::ok();
}

Status check_sizes(const SegmentFormat& f, int64_t tokens, const SegmentSizes& n) {
  const int64_t values = tokens * f.head_dim;
  if (n.params != static_cast<uint64_t>(group_count(f, tokens))) {
    return corrupt("wrong number of parameters");
  }
  const bool relative = !f.raw() && f.format.step_rule == StepRule::kRelative;
  if (n.units != (relative ? n.params : 0)) return corrupt("wrong number of unit flags");
  if (f.coded) {
    const int64_t before = f.is_weighted() ? f.weighted.first_position % kBlockTokens : 0;
    if (n.blocks != static_cast<uint64_t>((before + tokens + kBlockTokens - 1) / kBlockTokens)) {
      return corrupt("wrong number of blocks");
    }
    return Status::ok();
  }
  const int64_t bytes = f.raw() ? 2 * values : f.format.type.bytes_of(values);
  if (n.blocks != 0 || n.data != static_cast<uint64_t>(bytes))
    return corrupt("wrong size of codes");
  return Status::ok();
}

Status read_sections(ByteReader& r, const SegmentSizes& n, StoredSegment* out) {
  EncodedSegment& s = out->data;
  const uint8_t* data = r.take(n.data);
  s.data.assign(data, data + n.data);
  for (uint64_t i = 0; i < n.params; ++i) {
    const uint16_t scale = r.u16();
    s.params.push_back({scale, r.u16()});
  }
  for (uint64_t i = 0; i < n.blocks; ++i) {
    const int64_t offset = r.u32();
    const int64_t least = i == 0 ? 0 : s.block_offsets.back() + 1;
    if (offset < least || offset >= static_cast<int64_t>(n.data) || (i == 0 && offset != 0)) {
      return corrupt("block " + std::to_string(i) + " starts outside the blocks");
    }
    s.block_offsets.push_back(offset);
  }
  for (uint64_t i = 0; i < n.units; i += 8) {
    const uint32_t flags = r.u8();
    for (uint64_t j = i; j < i + 8; ++j) {
      const bool raw = (flags >> (j - i) & 1) != 0;
      if (j >= n.units) {
        if (raw) return corrupt("unit flags after the last unit");
        continue;
      }
      s.raw_unit.push_back(raw);
    }
  }
  uint64_t raw_values = 0;
  size_t unit = 0;
  if (n.units > 0) {
    for_each_group(out->format, s.tokens, [&](int64_t, int64_t values, int64_t) {
      if (s.raw_unit[unit++]) raw_values += static_cast<uint64_t>(values);
    });
  }
  if (raw_values != n.raw_values) return corrupt("wrong number of values of raw units");
  for (uint64_t i = 0; i < n.raw_values; ++i) s.raw_values.push_back(r.u16());
  return Status::ok();
}

}  // namespace

Result<StoredSegment> parse_segment(const std::vector<uint8_t>& bytes, int32_t head_dim) {
  StoredSegment out;
  ByteReader r(bytes);
  if (Status s = read_format(r, head_dim, &out.format); !s) return s;
  const uint64_t tokens = r.u64();
  SegmentSizes n;
  n.data = r.u64();
  n.params = r.u64();
  n.blocks = r.u64();
  n.units = r.u64();
  n.raw_values = r.u64();
  const uint64_t first = r.u64();
  if (!r.ok()) return corrupt("header is cut short");
  if (first > (out.format.is_weighted() ? static_cast<uint64_t>(kMaxTokens) : 0)) {
    return corrupt("bad first position");
  }
  out.format.weighted.first_position = static_cast<int64_t>(first);
  if (tokens == 0 || tokens > static_cast<uint64_t>(kMaxTokens)) return corrupt("bad token count");
  out.data.tokens = static_cast<int64_t>(tokens);
  if (Status s = check_sizes(out.format, out.data.tokens, n); !s) return s;
  // Each count is at most the bytes there are, so that their sum cannot wrap.
  const uint64_t left = r.left();
  if (n.data > left || n.params > left || n.blocks > left || n.units > left ||
      n.raw_values > left ||
      n.data + 4 * n.params + 4 * n.blocks + (n.units + 7) / 8 + 2 * n.raw_values != left) {
    return corrupt("size disagrees with its fields");
  }
  if (Status s = read_sections(r, n, &out); !s) return s;
  return out;
}

Result<StoredBasis> parse_basis(const std::vector<uint8_t>& bytes, int32_t head_dim) {
  StoredBasis out;
  ByteReader r(bytes);
  BasisKind kind = BasisKind::kNone;
  if (!read_enum(r, 3, &kind)) return corrupt("unknown kind");
  if (r.i32() != head_dim) return corrupt("head_dim is not the model's");
  out.step = r.f32();
  if (!std::isfinite(out.step) || out.step < 0) return corrupt("step is negative or not finite");
  if (r.u32() != 0) return corrupt("reserved bytes are set");
  const bool means = kind == BasisKind::kMean || (kind == BasisKind::kHadamard && r.left() > 0);
  if (!r.ok() || static_cast<int64_t>(r.left()) != (means ? int64_t{2} * head_dim : 0)) {
    return corrupt("size disagrees with its fields");
  }
  bool finite = true;
  std::vector<float> mean(means ? head_dim : 0);
  for (float& x : mean) finite &= is_finite(x = half_to_float(r.u16()));
  if (!finite) return corrupt("a mean is not finite");
  out.basis = kind == BasisKind::kNone   ? Basis::none(head_dim)
              : kind == BasisKind::kMean ? Basis::mean_removed(std::move(mean))
                                         : Basis::hadamard(head_dim, std::move(mean));
  return out;
}

Result<WeightedRow> parse_weighted_row(const std::vector<uint8_t>& bytes, int32_t head_dim) {
  WeightedRow out;
  ByteReader r(bytes);
  out.head_dim = r.i32();
  if (!r.ok() || out.head_dim != head_dim) return corrupt("head_dim is not the model's");
  out.key_step = r.f32();
  out.value_step = r.f32();
  const uint32_t has = r.u32();
  const bool means = (has & 1) != 0, weights = (has & 2) != 0;
  if (has > 3) return corrupt("unknown flags");
  if (!r.ok() || static_cast<int64_t>(r.left()) != int64_t{head_dim} * (2 * means + 4 * weights)) {
    return corrupt("size disagrees with its fields");
  }
  for (int32_t d = 0; means && d < head_dim; ++d)
    out.key_mean.push_back(static_cast<uint16_t>(r.u16()));
  for (int32_t d = 0; weights && d < head_dim; ++d) out.key_weight.push_back(r.f32());
  if (Status s = out.validate(); !s) return corrupt(s.message());
  return out;
}

Result<std::vector<float>> parse_values(const std::vector<uint8_t>& bytes, int64_t count) {
  ByteReader r(bytes);
  DType dtype = DType::kFloat16;
  if (!read_enum(r, 3, &dtype)) return corrupt("unknown dtype");
  if (r.u32() != 0) return corrupt("reserved bytes are set");
  const uint64_t stated = r.u64();
  const auto width = static_cast<uint64_t>(dtype_bytes(dtype));
  if (!r.ok() || count < 0 || stated != static_cast<uint64_t>(count) ||
      stated != r.left() / width || r.left() % width != 0) {
    return corrupt("not the expected number of values");
  }
  std::vector<float> values(count);
  elements_to_float(dtype, bytes.data() + (bytes.size() - r.left()), count, values.data());
  for (const float x : values) {
    if (!is_finite(x)) return corrupt("a value is not finite");
  }
  return values;
}

}  // namespace tierkv
