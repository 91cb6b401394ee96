// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/segment_encoder.h"

#include <zstd.h>

#include <algorithm>

#include "codec/format/sound_halves.h"
#include "tools/analysis/scheme/step_quantize.h"

namespace tierkv::analysis {
namespace {

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

// What a zstd frame holds, or as much of it as is sound.
std::vector<uint8_t> without_zstd(const std::vector<uint8_t>& frame) {
  const std::unique_ptr<ZSTD_DCtx, size_t (*)(ZSTD_DCtx*)> context(ZSTD_createDCtx(),
                                                                   ZSTD_freeDCtx);
  std::vector<uint8_t> bytes;
  ZSTD_inBuffer in{frame.data(), frame.size(), 0};
  for (size_t left = frame.size(); left != 0;) {
    const size_t before = bytes.size();
    bytes.resize(before + ZSTD_DStreamOutSize());
    ZSTD_outBuffer out{bytes.data() + before, bytes.size() - before, 0};
    left = ZSTD_decompressStream(context.get(), &out, &in);
    bytes.resize(before + out.pos);
    if (ZSTD_isError(left) || (out.pos == 0 && in.pos == in.size)) break;
  }
  return bytes;
}

}  // namespace

void SegmentCoding::code_with(Coder c, const BlockCoder* b) {
  coder = c;
  blocks = b;
  stored.blocks = b;
  stored.coded = c == Coder::kHuffman || b != nullptr;
  // One byte a code, two where steps are absolute: their codes are signed, and one may not hold
  // them all.
  const bool wide = stored.format.step_rule == StepRule::kAbsolute;
  if (c == Coder::kZstd) stored.code_bits = wide ? 16 : 8;
}

Status quantize_weighted_chunk(const SegmentCoding& f, const float* x, int64_t token,
                               int64_t tokens, int8_t* exponents, int16_t* codes) {
  const WeightedSegment& w = f.stored.weighted;
  const WeightedTokens given = {x, static_cast<int32_t>(tokens), w.first_position + token};
  const int8_t* importance = f.importance == nullptr ? nullptr : f.importance + token;
  if (Status s = token_exponents(w.component, given, f.stored.head_dim, importance, exponents); !s)
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
  for_each_group(f, tokens, [&](int64_t first, int64_t n, int64_t stride) {
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

int64_t stored_bytes(const EncodedSegment& s) {
  const auto raw_units = std::count(s.raw_unit.begin(), s.raw_unit.end(), 1);
  return static_cast<int64_t>(s.data.size() + 4 * s.block_offsets.size() + 4 * s.params.size() +
                              2 * s.raw_values.size()) +
         4 * raw_units;
}

struct SegmentEncoder::Zstd {
  ZSTD_CCtx* context = ZSTD_createCCtx();
  std::vector<uint8_t> buffer = std::vector<uint8_t>(ZSTD_CStreamOutSize());
  ~Zstd() { ZSTD_freeCCtx(context); }

  // Appends what comes out of the frame so far, or all of it.
  StatusCode put(const std::vector<uint8_t>& bytes, bool last, std::vector<uint8_t>* to) {
    ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
    for (;;) {
      ZSTD_outBuffer out{buffer.data(), buffer.size(), 0};
      const size_t left =
          ZSTD_compressStream2(context, &out, &in, last ? ZSTD_e_end : ZSTD_e_continue);
      if (ZSTD_isError(left)) return StatusCode::kIo;
      to->insert(to->end(), buffer.begin(), buffer.begin() + static_cast<int64_t>(out.pos));
      if (last ? left == 0 : in.pos == in.size) return StatusCode::kOk;
    }
  }
};

SegmentEncoder::SegmentEncoder(const SegmentCoding& coding) : coding_(coding) {
  if (coding_.coder == Coder::kZstd) {
    zstd_ = std::make_unique<Zstd>();
    ZSTD_CCtx_setParameter(zstd_->context, ZSTD_c_compressionLevel, coding_.zstd_level);
  }
}
SegmentEncoder::~SegmentEncoder() = default;

StatusCode SegmentEncoder::append_bytes(const std::vector<uint8_t>& bytes) {
  if (zstd_ != nullptr) return zstd_->put(bytes, false, &out_.data);
  out_.data.insert(out_.data.end(), bytes.begin(), bytes.end());
  return StatusCode::kOk;
}

StatusCode SegmentEncoder::append_raw(const float* x, int64_t count) {
  bytes_.resize(2 * count);
  for (int64_t i = 0; i < count; ++i) {
    const bool bf16 = coding_.stored.raw_dtype == DType::kBFloat16;
    const uint16_t h = bf16 ? float_to_bfloat16(x[i]) : float_to_half(x[i]);
    if (!bf16 && !is_finite_half(h)) return StatusCode::kOutOfRange;
    store_u16(&bytes_[2 * i], h);
  }
  return append_bytes(bytes_);
}

StatusCode SegmentEncoder::append_codes(int64_t tokens) {
  const SegmentFormat& f = coding_.stored;
  if (f.coded) {
    for (int64_t t = 0; t < tokens; t += kBlockTokens) {
      const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, tokens - t));
      const int16_t* codes = chunk_.codes.data() + t * f.head_dim;
      out_.block_offsets.push_back(static_cast<int64_t>(out_.data.size()));
      const StatusCode s =
          coding_.blocks != nullptr
              ? coding_.blocks->encode(codes, n, f.head_dim, &out_.data)
              : encode_block({codes, nullptr, n, f.head_dim}, {f.codebook, 1}, nullptr, &out_.data)
                    .code();
      if (s != StatusCode::kOk) return s;
    }
    return StatusCode::kOk;
  }
  bytes_.clear();
  if (coding_.coder != Coder::kZstd) {
    pack_codes(chunk_.codes, f.format.type.bits(), &bytes_);
    return append_bytes(bytes_);
  }
  for (const int16_t c : chunk_.codes) {
    bytes_.push_back(static_cast<uint8_t>(c));
    if (f.code_bits == 16) bytes_.push_back(static_cast<uint8_t>(c >> 8));
  }
  return append_bytes(bytes_);
}

StatusCode SegmentEncoder::append_weighted(const float* x, int64_t tokens) {
  const int64_t token = out_.tokens;
  int8_t exponents[kBlockTokens];
  chunk_.codes.resize(tokens * coding_.stored.head_dim);
  if (Status s = quantize_weighted_chunk(coding_, x, token, tokens, exponents, chunk_.codes.data());
      !s) {
    return s.code();
  }
  out_.block_offsets.push_back(static_cast<int64_t>(out_.data.size()));
  out_.tokens += tokens;
  const BlockContent block = {chunk_.codes.data(), exponents, static_cast<int32_t>(tokens),
                              coding_.stored.head_dim};
  return encode_block(block, coding_.stored.weighted.family->books, coding_.book_of, &out_.data)
      .code();
}

StatusCode SegmentEncoder::append(float* x, int64_t tokens) {
  if (coding_.stored.is_weighted()) return append_weighted(x, tokens);
  const int64_t count = tokens * coding_.stored.head_dim;
  out_.tokens += tokens;
  if (coding_.stored.raw()) return append_raw(x, count);
  if (coding_.stored.basis != nullptr) coding_.stored.basis->apply(x, tokens);
  if (StatusCode s = quantize_chunk(coding_.stored, x, tokens, &chunk_); s != StatusCode::kOk)
    return s;
  if (StatusCode s = append_codes(tokens); s != StatusCode::kOk) return s;
  out_.params.insert(out_.params.end(), chunk_.params.begin(), chunk_.params.end());
  out_.raw_unit.insert(out_.raw_unit.end(), chunk_.raw_unit.begin(), chunk_.raw_unit.end());
  StatusCode status = StatusCode::kOk;
  size_t unit = 0;
  if (chunk_.raw_unit.empty()) return status;
  for_each_group(coding_.stored, tokens, [&](int64_t first, int64_t n, int64_t stride) {
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
  if (zstd_ != nullptr && out_.tokens > 0) {
    if (StatusCode s = zstd_->put({}, true, &out_.data); s != StatusCode::kOk) return s;
  }
  *out = std::move(out_);
  return StatusCode::kOk;
}

SegmentReader::SegmentReader(const SegmentCoding& coding, const EncodedSegment& segment)
    : decoder_(coding.stored, coding.coder == Coder::kZstd ? plain_ : segment) {
  if (coding.coder != Coder::kZstd) return;
  plain_ = segment;
  plain_.data = without_zstd(segment.data);
}

}  // namespace tierkv::analysis
