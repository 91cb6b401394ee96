// SPDX-License-Identifier: Apache-2.0
#include "tools/container/chunk_write.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "codec/format/byte_cursor.h"
#include "codec/host/convert.h"

namespace tierkv::analysis {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

// The rows of a page's tokens as the page codec takes them: as they are or, where one of the
// components has a basis, as coordinates in single precision.
struct PageRows {
  const void* of[2] = {nullptr, nullptr};
  std::vector<uint8_t> stored[2];  // where the tokens are no run of the row
  std::vector<float> coordinates[2];

  void gather(const StoredPageFormat& format, const PageSource& source, const PageTokens& tokens);
};

void PageRows::gather(const StoredPageFormat& format, const PageSource& source,
                      const PageTokens& tokens) {
  for (const Component c : kComponents) {
    const int i = static_cast<int>(c);
    const RowData& row = source.input.of(c);
    const int64_t bytes = row.head_dim * dtype_bytes(row.dtype);
    if (!format.has_basis()) {
      // Positions ascend.
      if (tokens.positions[tokens.count - 1] - tokens.positions[0] == tokens.count - 1) {
        of[i] = row.bytes.data() + tokens.positions[0] * bytes;
        continue;
      }
      stored[i].resize(tokens.count * bytes);
      of[i] = stored[i].data();
      for (int32_t t = 0; t < tokens.count; ++t) {
        std::memcpy(stored[i].data() + t * bytes, row.bytes.data() + tokens.positions[t] * bytes,
                    bytes);
      }
      continue;
    }
    const int64_t d = row.head_dim;
    coordinates[i].resize(tokens.count * d);
    of[i] = coordinates[i].data();
    for (int32_t t = 0; t < tokens.count; ++t) {
      row_to_float(row, tokens.positions[t], 1, coordinates[i].data() + t * d);
    }
    if (format.basis[i] != BasisKind::kNone) {
      source.basis[i]->apply(coordinates[i].data(), tokens.count);
    }
  }
}

}  // namespace

Result<std::vector<uint8_t>> serialize_segment(const SegmentFormat& format,
                                               const EncodedSegment& s) {
  if (s.data.size() > std::numeric_limits<uint32_t>::max()) {
    return Status(StatusCode::kUnsupported, "a segment of more than 4 GiB");
  }
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  const ComponentFormat& f = format.format;
  w.i32(f.type.bits());
  w.i32(static_cast<int32_t>(f.step_rule));
  w.i32(static_cast<int32_t>(f.unit));
  w.i32(f.group);
  w.f64(f.step);
  w.i32(static_cast<int32_t>(f.basis));
  w.i32(format.coded);
  w.i32(static_cast<int32_t>(format.raw_dtype));
  w.i32(format.head_dim);
  w.u64(static_cast<uint64_t>(s.tokens));
  w.u64(s.data.size());
  w.u64(s.params.size());
  w.u64(s.block_offsets.size());
  w.u64(s.raw_unit.size());
  w.u64(s.raw_values.size());
  w.u64(format.is_weighted() ? static_cast<uint64_t>(format.weighted.first_position) : 0);
  bytes.insert(bytes.end(), s.data.begin(), s.data.end());
  for (const QuantParams& p : s.params) {
    w.u16(p.scale);
    w.u16(p.zero_point);
  }
  for (const int64_t offset : s.block_offsets) w.u32(static_cast<uint32_t>(offset));
  for (size_t i = 0; i < s.raw_unit.size(); i += 8) {
    uint32_t flags = 0;
    for (size_t j = i; j < std::min(i + 8, s.raw_unit.size()); ++j)
      flags |= s.raw_unit[j] << (j - i);
    w.u8(flags);
  }
  for (const uint16_t v : s.raw_values) w.u16(v);
  return bytes;
}

std::vector<uint8_t> serialize_row(const RowPlan& plan) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.u64(static_cast<uint64_t>(plan.tokens));
  w.u64(static_cast<uint64_t>(plan.body_begin));
  w.u64(static_cast<uint64_t>(plan.key_body_end));
  w.u64(static_cast<uint64_t>(plan.body_end));
  w.u64(plan.tiers.empty() ? 0 : 1);
  for (size_t i = 0; i < plan.tiers.size(); i += 4) {
    uint32_t byte = 0;
    for (size_t j = i; j < std::min(i + 4, plan.tiers.size()); ++j) {
      byte |= static_cast<uint32_t>(plan.tiers[j]) << (2 * (j - i));
    }
    w.u8(byte);
  }
  return bytes;
}

std::vector<uint8_t> serialize_basis(const StoredBasis& stored) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  const Basis& b = stored.basis;
  w.i32(static_cast<int32_t>(b.kind));
  w.i32(b.head_dim);
  w.f32(stored.step);
  w.u32(0);
  for (const float x : b.mean) w.u16(float_to_half(x));
  return bytes;
}

std::vector<uint8_t> serialize_weighted_row(const WeightedRow& row) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.i32(row.head_dim);
  w.f32(row.key_step);
  w.f32(row.value_step);
  w.u32(static_cast<uint32_t>(!row.key_mean.empty()) |
        static_cast<uint32_t>(!row.key_weight.empty()) << 1);
  for (const uint16_t x : row.key_mean) w.u16(x);
  for (const float x : row.key_weight) w.f32(x);
  return bytes;
}

std::vector<uint8_t> serialize_values(const std::vector<float>& values) {
  const auto n = static_cast<int64_t>(values.size());
  std::vector<float> back(values.size());
  std::vector<uint8_t> elements;
  DType dtype = DType::kFloat16;
  for (; dtype != DType::kFloat32; dtype = static_cast<DType>(static_cast<int>(dtype) + 1)) {
    elements.resize(n * dtype_bytes(dtype));
    if (float_to_elements(dtype, values.data(), n, elements.data()) < n) continue;
    elements_to_float(dtype, elements.data(), n, back.data());
    if (back == values) break;
  }
  if (dtype == DType::kFloat32) {
    elements.resize(n * sizeof(float));
    float_to_elements(dtype, values.data(), n, elements.data());
  }
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.i32(static_cast<int32_t>(dtype));
  w.u32(0);
  w.u64(values.size());
  bytes.insert(bytes.end(), elements.begin(), elements.end());
  return bytes;
}

std::vector<uint8_t> serialize_page_format(const StoredPageFormat& f) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.i32(f.shape.head_dim);
  w.i32(f.shape.tokens);
  w.i32(static_cast<int32_t>(f.raw_dtype));
  w.i32(f.has_scores ? 6 : 4);
  const CodeType type[2] = {f.shape.k_type, f.shape.v_type};
  const int32_t groups[2] = {f.shape.k_groups, f.shape.v_groups};
  for (int c = 0; c < 2; ++c) {
    w.i32(type[c].bits());
    w.i32(groups[c]);
    w.i32(static_cast<int32_t>(f.basis[c]));
    w.i32(static_cast<int32_t>(f.rule[c]));
  }
  return bytes;
}

Status encode_page(const StoredPageFormat& format, const PageSource& source,
                   const PageTokens& tokens, std::vector<uint8_t>* bytes) {
  const PageLayout layout = format.layout(tokens.count);
  bytes->assign(layout.used_bytes, 0);
  std::vector<float> scores(tokens.count, 0.0f);
  for (int32_t i = 0; i < tokens.count && format.has_scores; ++i) {
    scores[i] = source.significance[tokens.positions[i]];
  }
  PageRows rows;
  rows.gather(format, source, tokens);
  TokenBatch batch;
  batch.k = rows.of[0];
  batch.v = rows.of[1];
  batch.scores = scores.data();
  batch.positions = tokens.positions;
  batch.count = tokens.count;
  batch.dtype = format.has_basis() ? DType::kFloat32 : source.input.k->dtype;
  const HostPage page{bytes->data(), layout, format.raw_dtype, {format.rule[0], format.rule[1]}};
  if (Status s = append_tokens(page, 0, batch); !s) return s;
  bytes->resize(format.bytes(tokens.count));
  return Status::ok();
}

}  // namespace tierkv::analysis
