// SPDX-License-Identifier: Apache-2.0
#include "codec/file/segment.h"

#include <zstd.h>

#include <algorithm>
#include <numeric>

#include "codec/format/sound_halves.h"

namespace tierkv {
namespace {

int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Groups of a chunk, as (first element, count, stride), visited in the order in which their
// parameters are stored.
template <class Visit>
void for_each_group(const ComponentFormat& f, int32_t head_dim, int64_t tokens,
                    const Visit& visit) {
  const int64_t d = head_dim;
  if (f.unit == Unit::kToken) {
    const int64_t group = f.group > 0 ? f.group : d;
    for (int64_t i = 0; i < tokens * d; i += group) visit(i, group, int64_t{1});
    return;
  }
  for (int64_t t = 0; t < tokens; t += f.group) {
    const int64_t n = std::min<int64_t>(f.group, tokens - t);
    if (f.unit == Unit::kBlock) {
      visit(t * d, n * d, int64_t{1});
    } else {
      for (int64_t c = 0; c < d; ++c) visit(t * d + c, n, d);
    }
  }
}

// Fixed-width codes, least significant bits first.
void pack_codes(const std::vector<int16_t>& codes, int32_t bits, std::vector<uint8_t>* out) {
  const size_t per_byte = 8 / bits;
  for (size_t i = 0; i < codes.size(); i += per_byte) {
    uint32_t byte = 0;
    for (size_t j = 0; j < per_byte && i + j < codes.size(); ++j)
      byte |= codes[i + j] << (j * bits);
    out->push_back(static_cast<uint8_t>(byte));
  }
}

}  // namespace

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

Status quantize_weighted_chunk(const SegmentFormat& f, const float* x, int64_t token,
                               int64_t tokens, int8_t* exponents, int16_t* codes) {
  const WeightedSegment& w = f.weighted;
  const WeightedTokens given = {x, static_cast<int32_t>(tokens), w.first_position + token};
  const int8_t* importance = w.importance == nullptr ? nullptr : w.importance + token;
  if (Status s = token_exponents(w.component, given, f.head_dim, importance, exponents); !s)
    return s;
  return quantize_weighted(*w.row, w.component, given, exponents, codes);
}

StatusCode quantize_chunk(const SegmentFormat& f, const float* y, int64_t tokens, ChunkCodes* out) {
  const int64_t count = tokens * f.head_dim;
  out->codes.resize(count);
  out->params.clear();
  out->raw_unit.clear();
  if (f.format.step_rule == StepRule::kAbsolute) {
    return quantize_absolute(y, count, f.step, out->codes.data());
  }
  StatusCode status = StatusCode::kOk;
  std::vector<uint8_t> codes(count);
  for_each_group(f.format, f.head_dim, tokens, [&](int64_t first, int64_t n, int64_t stride) {
    if (status != StatusCode::kOk) return;
    QuantParams p;
    if (f.format.step_rule == StepRule::kNorm) {
      status = quantize_norm(y + first, static_cast<int32_t>(n), &p, codes.data() + first);
    } else if (f.format.step_rule == StepRule::kMinMax) {
      status =
          quantize_minmax(y + first, n, stride, f.format.type.levels(), &p, codes.data() + first);
    } else {
      bool fits = true;
      status =
          quantize_relative(y + first, n, stride, f.format.step, &p, codes.data() + first, &fits);
      if (!fits) {
        for (int64_t i = 0; i < n; ++i) codes[first + i * stride] = 0;
      }
      out->raw_unit.push_back(!fits);
    }
    out->params.push_back(p);
  });
  std::copy(codes.begin(), codes.end(), out->codes.begin());
  return status;
}

void dequantize_chunk(const SegmentFormat& f, const ChunkCodes& chunk, int64_t tokens, float* y) {
  if (f.format.step_rule == StepRule::kAbsolute) {
    for (size_t i = 0; i < chunk.codes.size(); ++i) y[i] = mul_rn(f.step, chunk.codes[i]);
    return;
  }
  size_t g = 0;
  for_each_group(f.format, f.head_dim, tokens, [&](int64_t first, int64_t n, int64_t stride) {
    const float scale = half_to_float(chunk.params[g].scale);
    const float zero = half_to_float(chunk.params[g].zero_point);
    ++g;
    for (int64_t i = 0; i < n; ++i) {
      y[first + i * stride] = dequantize(chunk.codes[first + i * stride], scale, zero);
    }
  });
}

int64_t EncodedSegment::stored_bytes() const {
  const auto raw_units = std::count(raw_unit.begin(), raw_unit.end(), 1);
  return static_cast<int64_t>(data.size() + 4 * block_offsets.size() + 4 * params.size() +
                              2 * raw_values.size()) +
         4 * raw_units;
}

int64_t EncodedSegment::coded_bytes() const {
  return static_cast<int64_t>(data.size());
}

struct SegmentEncoder::Zstd {
  ZSTD_CCtx* context = ZSTD_createCCtx();
  std::vector<uint8_t> buffer = std::vector<uint8_t>(ZSTD_CStreamOutSize());
  ~Zstd() { ZSTD_freeCCtx(context); }
};

SegmentEncoder::SegmentEncoder(const SegmentFormat& format) : format_(format) {
  if (format_.coder == Coder::kZstd) {
    zstd_ = std::make_unique<Zstd>();
    ZSTD_CCtx_setParameter(zstd_->context, ZSTD_c_compressionLevel, format_.zstd_level);
  }
}
SegmentEncoder::~SegmentEncoder() = default;

StatusCode SegmentEncoder::append_zstd(const uint8_t* bytes, size_t size, bool last) {
  ZSTD_inBuffer in{bytes, size, 0};
  for (;;) {
    ZSTD_outBuffer out{zstd_->buffer.data(), zstd_->buffer.size(), 0};
    const size_t left =
        ZSTD_compressStream2(zstd_->context, &out, &in, last ? ZSTD_e_end : ZSTD_e_continue);
    if (ZSTD_isError(left)) return StatusCode::kIo;
    out_.data.insert(out_.data.end(), zstd_->buffer.begin(), zstd_->buffer.begin() + out.pos);
    if (last ? left == 0 : in.pos == in.size) return StatusCode::kOk;
  }
}

StatusCode SegmentEncoder::append_raw(const float* x, int64_t count) {
  bytes_.resize(2 * count);
  for (int64_t i = 0; i < count; ++i) {
    const bool bf16 = format_.raw_dtype == DType::kBFloat16;
    const uint16_t h = bf16 ? float_to_bfloat16(x[i]) : float_to_half(x[i]);
    if (!bf16 && !is_finite_half(h)) return StatusCode::kOutOfRange;
    bytes_[2 * i] = static_cast<uint8_t>(h);
    bytes_[2 * i + 1] = static_cast<uint8_t>(h >> 8);
  }
  if (format_.coder == Coder::kZstd) return append_zstd(bytes_.data(), bytes_.size(), false);
  out_.data.insert(out_.data.end(), bytes_.begin(), bytes_.end());
  return StatusCode::kOk;
}

StatusCode SegmentEncoder::append_codes(int64_t tokens) {
  if (format_.has_blocks()) {
    for (int64_t t = 0; t < tokens; t += kBlockTokens) {
      const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, tokens - t));
      out_.block_offsets.push_back(static_cast<int64_t>(out_.data.size()));
      if (format_.blocks != nullptr) {
        const StatusCode code = format_.blocks->encode(chunk_.codes.data() + t * format_.head_dim,
                                                       n, format_.head_dim, &out_.data);
        if (code != StatusCode::kOk) return code;
        continue;
      }
      const Status s = encode_block(chunk_.codes.data() + t * format_.head_dim, n, format_.head_dim,
                                    *format_.codebook, &out_.data);
      if (!s) return s.code();
    }
    return StatusCode::kOk;
  }
  if (format_.coder == Coder::kZstd) {
    // Codes of an absolute step are signed and take two bytes only where one does not hold them
    // all.
    const bool wide = format_.format.step_rule == StepRule::kAbsolute;
    bytes_.clear();
    for (const int16_t c : chunk_.codes) {
      bytes_.push_back(static_cast<uint8_t>(c));
      if (wide) bytes_.push_back(static_cast<uint8_t>(c >> 8));
    }
    return append_zstd(bytes_.data(), bytes_.size(), false);
  }
  pack_codes(chunk_.codes, format_.format.type.bits(), &out_.data);
  return StatusCode::kOk;
}

StatusCode SegmentEncoder::append_weighted(const float* x, int64_t tokens) {
  const int64_t token = out_.tokens;
  int8_t exponents[kBlockTokens];
  chunk_.codes.resize(tokens * format_.head_dim);
  if (Status s = quantize_weighted_chunk(format_, x, token, tokens, exponents, chunk_.codes.data());
      !s) {
    return s.code();
  }
  out_.block_offsets.push_back(static_cast<int64_t>(out_.data.size()));
  out_.tokens += tokens;
  const WeightedCodes block = {chunk_.codes.data(), exponents, static_cast<int32_t>(tokens),
                               format_.head_dim};
  return encode_weighted_block(block, *format_.weighted.family, format_.weighted.book_of,
                               &out_.data)
      .code();
}

StatusCode SegmentEncoder::append(float* x, int64_t tokens) {
  if (format_.is_weighted()) return append_weighted(x, tokens);
  const int64_t count = tokens * format_.head_dim;
  out_.tokens += tokens;
  if (format_.raw()) return append_raw(x, count);
  if (format_.basis != nullptr) format_.basis->apply(x, tokens);
  if (StatusCode s = quantize_chunk(format_, x, tokens, &chunk_); s != StatusCode::kOk) return s;
  if (StatusCode s = append_codes(tokens); s != StatusCode::kOk) return s;
  out_.params.insert(out_.params.end(), chunk_.params.begin(), chunk_.params.end());
  out_.raw_unit.insert(out_.raw_unit.end(), chunk_.raw_unit.begin(), chunk_.raw_unit.end());
  StatusCode status = StatusCode::kOk;
  size_t unit = 0;
  if (chunk_.raw_unit.empty()) return status;
  for_each_group(format_.format, format_.head_dim, tokens,
                 [&](int64_t first, int64_t n, int64_t stride) {
                   if (!chunk_.raw_unit[unit++]) return;
                   for (int64_t i = 0; i < n; ++i) {
                     const uint16_t h = float_to_half(x[first + i * stride]);
                     if (!is_finite_half(h)) status = StatusCode::kOutOfRange;
                     out_.raw_values.push_back(h);
                   }
                 });
  return status;
}

StatusCode SegmentEncoder::finish(EncodedSegment* out) {
  if (format_.coder == Coder::kZstd && out_.tokens > 0) {
    if (StatusCode s = append_zstd(nullptr, 0, true); s != StatusCode::kOk) return s;
  }
  *out = std::move(out_);
  return StatusCode::kOk;
}

struct SegmentDecoder::Zstd {
  ZSTD_DCtx* context = ZSTD_createDCtx();
  ~Zstd() { ZSTD_freeDCtx(context); }
};

SegmentDecoder::SegmentDecoder(const SegmentFormat& format, const EncodedSegment& segment)
    : format_(format), segment_(segment) {
  if (format_.coder == Coder::kZstd) zstd_ = std::make_unique<Zstd>();
}
SegmentDecoder::~SegmentDecoder() = default;

// Fills bytes_ with the next `bytes_.size()` bytes of the segment's stream, through zstd where that
// is the coder.
static StatusCode next_bytes(const EncodedSegment& s, ZSTD_DCtx* zstd, size_t* pos,
                             std::vector<uint8_t>* bytes) {
  if (zstd == nullptr) {
    if (s.data.size() - *pos < bytes->size()) return StatusCode::kCorrupt;
    std::copy_n(s.data.begin() + static_cast<int64_t>(*pos), bytes->size(), bytes->begin());
    *pos += bytes->size();
    return StatusCode::kOk;
  }
  ZSTD_outBuffer out{bytes->data(), bytes->size(), 0};
  while (out.pos < out.size) {
    ZSTD_inBuffer in{s.data.data(), s.data.size(), *pos};
    const size_t before = out.pos, r = ZSTD_decompressStream(zstd, &out, &in);
    if (ZSTD_isError(r) || (out.pos == before && in.pos == *pos)) return StatusCode::kCorrupt;
    *pos = in.pos;
  }
  return StatusCode::kOk;
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
  const WeightedTarget target = {codes_.codes.data(), exponents, n, format_.head_dim};
  if (Status s = decode_weighted_block(bytes, size, *w.family, target); !s) return s.code();
  ++block_;
  const int64_t position = w.first_position + token_ - tokens;
  const WeightedSource source = {codes_.codes.data(), exponents, n, position};
  return dequantize_weighted(*w.row, w.component, source, chunk_.data()).code();
}

StatusCode SegmentDecoder::unpack_codes(int64_t tokens) {
  const int32_t d = format_.head_dim;
  const int64_t count = tokens * d;
  codes_.codes.resize(count);
  if (format_.has_blocks()) {
    for (int64_t t = 0; t < tokens; t += kBlockTokens, ++block_) {
      const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, tokens - t));
      int64_t size = 0;
      const uint8_t* bytes = block_bytes(&size);
      int16_t* codes = codes_.codes.data() + t * d;
      const StatusCode s = format_.blocks != nullptr
                               ? format_.blocks->decode(bytes, size, n, d, codes)
                               : decode_block(bytes, size, n, d, *format_.codebook, codes).code();
      if (s != StatusCode::kOk) return s;
    }
    return StatusCode::kOk;
  }
  const bool wide = format_.format.step_rule == StepRule::kAbsolute;
  const int32_t bits = format_.coder == Coder::kZstd ? (wide ? 16 : 8) : format_.format.type.bits();
  bytes_.resize(ceil_div(count * bits, 8));
  if (StatusCode s = next_bytes(segment_, zstd_ ? zstd_->context : nullptr, &data_pos_, &bytes_);
      s != StatusCode::kOk) {
    return s;
  }
  for (int64_t i = 0; i < count; ++i) {
    if (bits == 16) {
      codes_.codes[i] = static_cast<int16_t>(bytes_[2 * i] | bytes_[2 * i + 1] << 8);
    } else {
      codes_.codes[i] =
          static_cast<int16_t>(bytes_[i * bits / 8] >> (i * bits % 8) & ((1 << bits) - 1));
    }
  }
  return StatusCode::kOk;
}

StatusCode SegmentDecoder::next_chunk() {
  const int32_t d = format_.head_dim;
  const int64_t tokens = std::min(format_.chunk_at(token_), segment_.tokens - token_);
  if (tokens <= 0) return StatusCode::kCorrupt;
  chunk_.resize(tokens * d);
  chunk_size_ = tokens;
  chunk_used_ = 0;
  token_ += tokens;
  if (format_.raw()) {
    bytes_.resize(2 * tokens * d);
    const StatusCode s =
        next_bytes(segment_, zstd_ ? zstd_->context : nullptr, &data_pos_, &bytes_);
    if (s != StatusCode::kOk) return s;
    for (size_t i = 0; i < chunk_.size(); ++i) {
      const auto h = static_cast<uint16_t>(bytes_[2 * i] | bytes_[2 * i + 1] << 8);
      chunk_[i] = format_.raw_dtype == DType::kBFloat16 ? bfloat16_to_float(h) : half_to_float(h);
    }
    return StatusCode::kOk;
  }
  if (format_.is_weighted()) return read_weighted(tokens);
  if (StatusCode s = unpack_codes(tokens); s != StatusCode::kOk) return s;
  int64_t groups = 0;
  if (format_.format.step_rule != StepRule::kAbsolute) {
    for_each_group(format_.format, d, tokens, [&](int64_t, int64_t, int64_t) { ++groups; });
  }
  codes_.params.assign(segment_.params.begin() + static_cast<int64_t>(param_pos_),
                       segment_.params.begin() + static_cast<int64_t>(param_pos_) + groups);
  param_pos_ += groups;
  dequantize_chunk(format_, codes_, tokens, chunk_.data());
  if (!segment_.raw_unit.empty()) {
    for_each_group(format_.format, d, tokens, [&](int64_t first, int64_t n, int64_t stride) {
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
