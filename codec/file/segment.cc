// SPDX-License-Identifier: Apache-2.0
#include "codec/file/segment.h"

#include <numeric>

#include "codec/host/convert.h"

namespace tierkv {

int64_t SegmentFormat::unit_tokens() const {
  const bool grouped = format.unit == Unit::kChannel || format.unit == Unit::kBlock;
  return !raw() && grouped ? format.group : 1;
}

int64_t SegmentFormat::chunk_tokens() const {
  return std::lcm(unit_tokens(), static_cast<int64_t>(kBlockTokens));
}

int64_t SegmentFormat::chunk_at(int64_t token) const {
  if (!is_weighted()) return chunk_tokens();
  return kBlockTokens - (weighted.first_position + token) % kBlockTokens;
}

void dequantize_chunk(const SegmentFormat& f, const ChunkCodes& chunk, int64_t tokens, float* y) {
  if (f.format.step_rule == StepRule::kAbsolute) {
    for (size_t i = 0; i < chunk.codes.size(); ++i) y[i] = mul_rn(f.step, chunk.codes[i]);
    return;
  }
  size_t g = 0;
  for_each_group(f, tokens, [&](int64_t first, int64_t n, int64_t stride) {
    const float scale = half_to_float(chunk.params[g].scale);
    const float zero = half_to_float(chunk.params[g].zero_point);
    ++g;
    for (int64_t i = 0; i < n; ++i) {
      y[first + i * stride] = dequantize(chunk.codes[first + i * stride], scale, zero);
    }
  });
}

const uint8_t* SegmentDecoder::take(int64_t bytes) {
  if (static_cast<int64_t>(segment_.data.size() - data_pos_) < bytes) return nullptr;
  const uint8_t* at = segment_.data.data() + data_pos_;
  data_pos_ += bytes;
  return at;
}

const uint8_t* SegmentDecoder::block_bytes(int64_t* size) const {
  const std::vector<int64_t>& offsets = segment_.block_offsets;
  const int64_t end = block_ + 1 < offsets.size() ? offsets[block_ + 1]
                                                  : static_cast<int64_t>(segment_.data.size());
  *size = end - offsets[block_];
  return segment_.data.data() + offsets[block_];
}

// The next block into chunk_.
StatusCode SegmentDecoder::read_weighted(int64_t tokens) {
  const WeightedSegment& w = format_.weighted;
  const auto n = static_cast<int32_t>(tokens);
  int8_t exponents[kBlockTokens];
  codes_.codes.resize(tokens * format_.head_dim);
  int64_t size = 0;
  const uint8_t* bytes = block_bytes(&size);
  const BlockTarget target = {codes_.codes.data(), exponents, n, format_.head_dim};
  if (Status s = decode_block(bytes, size, w.family->books, target); !s) return s.code();
  ++block_;
  const int64_t position = w.first_position + token_ - tokens;
  const WeightedSource source = {codes_.codes.data(), exponents, n, position};
  return dequantize_weighted(*w.row, w.component, source, chunk_.data()).code();
}

StatusCode SegmentDecoder::read_blocks(int64_t tokens) {
  const int32_t d = format_.head_dim;
  for (int64_t t = 0; t < tokens; t += kBlockTokens, ++block_) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, tokens - t));
    int64_t size = 0;
    const uint8_t* bytes = block_bytes(&size);
    int16_t* codes = codes_.codes.data() + t * d;
    const StatusCode s =
        format_.blocks != nullptr
            ? format_.blocks->decode(bytes, size, n, d, codes)
            : decode_block(bytes, size, {format_.codebook, 1}, {codes, nullptr, n, d}).code();
    if (s != StatusCode::kOk) return s;
  }
  return StatusCode::kOk;
}

StatusCode SegmentDecoder::unpack(int64_t count) {
  const int32_t bits = format_.code_bits != 0 ? format_.code_bits : format_.format.type.bits();
  const uint8_t* bytes = take((count * bits + 7) / 8);
  if (bytes == nullptr) return StatusCode::kCorrupt;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = bits == 16 ? load_u16(bytes + 2 * i)
                                     : bytes[i * bits / 8] >> (i * bits % 8) & ((1u << bits) - 1u);
    codes_.codes[i] = static_cast<int16_t>(code);
  }
  return StatusCode::kOk;
}

StatusCode SegmentDecoder::next_chunk() {
  const int64_t tokens = std::min(format_.chunk_at(token_), segment_.tokens - token_);
  if (tokens <= 0) return StatusCode::kCorrupt;
  const int64_t count = tokens * format_.head_dim;
  chunk_.resize(count);
  chunk_size_ = tokens;
  chunk_used_ = 0;
  token_ += tokens;
  if (format_.is_weighted()) return read_weighted(tokens);
  if (format_.raw()) {
    const uint8_t* bytes = take(2 * count);
    if (bytes == nullptr) return StatusCode::kCorrupt;
    elements_to_float(format_.raw_dtype, bytes, count, chunk_.data());
    return StatusCode::kOk;
  }
  codes_.codes.resize(count);
  if (StatusCode s = format_.coded ? read_blocks(tokens) : unpack(count); s != StatusCode::kOk) {
    return s;
  }
  int64_t groups = 0;
  if (format_.format.step_rule != StepRule::kAbsolute) {
    for_each_group(format_, tokens, [&](int64_t, int64_t, int64_t) { ++groups; });
  }
  const auto params = segment_.params.begin() + static_cast<int64_t>(param_pos_);
  codes_.params.assign(params, params + groups);
  param_pos_ += groups;
  dequantize_chunk(format_, codes_, tokens, chunk_.data());
  if (!segment_.raw_unit.empty()) {
    for_each_group(format_, tokens, [&](int64_t first, int64_t n, int64_t stride) {
      if (!segment_.raw_unit[unit_pos_++]) return;
      for (int64_t i = 0; i < n; ++i) {
        chunk_[first + i * stride] = half_to_float(segment_.raw_values[raw_pos_++]);
      }
    });
  }
  if (format_.basis != nullptr) format_.basis->undo(chunk_.data(), tokens);
  return StatusCode::kOk;
}

StatusCode SegmentDecoder::read(int64_t tokens, float* x) {
  const int64_t d = format_.head_dim;
  while (tokens > 0) {
    if (chunk_used_ == chunk_size_) {
      if (StatusCode s = next_chunk(); s != StatusCode::kOk) return s;
    }
    const int64_t n = std::min(tokens, chunk_size_ - chunk_used_);
    std::copy_n(chunk_.begin() + chunk_used_ * d, n * d, x);
    chunk_used_ += n;
    tokens -= n;
    x += n * d;
  }
  return StatusCode::kOk;
}

}  // namespace tierkv
