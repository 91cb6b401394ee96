// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/baselines/baseline_coders.h"

#include <zstd.h>

#include <algorithm>
#include <bit>

#include "codec/host/coded/coded_block.h"

namespace tierkv::analysis {
namespace {

int16_t wrap(int32_t x) {
  return static_cast<int16_t>(static_cast<uint16_t>(x));
}

// What the neighbours of (token, channel) say, where the codes before it are the original ones.
int32_t neighbours_say(Prediction kind, int32_t head_dim, const int16_t* codes, int32_t t,
                       int32_t c) {
  const int16_t* at = codes + static_cast<int64_t>(t) * head_dim + c;
  const int32_t above = t > 0 ? at[-head_dim] : 0, left = c > 0 ? at[-1] : 0;
  const int32_t corner = t > 0 && c > 0 ? at[-head_dim - 1] : 0;
  switch (kind) {
    case Prediction::kNone:
      return 0;
    case Prediction::kToken:
      return above;
    case Prediction::kChannel:
      return left;
    case Prediction::kPlane:
      return above + left - corner;
  }
  return 0;
}

class FixedLengthCoder : public BlockCoder {
 public:
  StatusCode encode(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    std::vector<uint8_t>* out) const override {
    for (int32_t t = 0; t < tokens; ++t, codes += head_dim) {
      const auto [low, high] = std::minmax_element(codes, codes + head_dim);
      int32_t width = std::bit_width(static_cast<uint32_t>(*high - *low)), base = *low;
      if (width >= kRawWidth || base < kLowest || base > -kLowest - 1) {
        width = kRawWidth;
        base = 0;
      }
      const auto header = static_cast<uint16_t>((base & 0xfff) | width << 12);
      out->push_back(static_cast<uint8_t>(header));
      out->push_back(static_cast<uint8_t>(header >> 8));
      uint64_t held = 0;
      int32_t count = 0;
      for (int32_t c = 0; c < head_dim; ++c) {
        held |= static_cast<uint64_t>(static_cast<uint16_t>(codes[c] - base)) << count;
        for (count += bits_of(width); count >= 8; count -= 8, held >>= 8)
          out->push_back(static_cast<uint8_t>(held));
      }
      if (count > 0) out->push_back(static_cast<uint8_t>(held));
    }
    return StatusCode::kOk;
  }

  StatusCode decode(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    int16_t* codes) const override {
    for (int32_t t = 0; t < tokens; ++t, codes += head_dim) {
      if (size < 2) return StatusCode::kCorrupt;
      const int32_t header = bytes[0] | bytes[1] << 8, bits = bits_of(header >> 12);
      const int32_t base =
          (header & 0xfff) >= -kLowest ? (header & 0xfff) - 0x1000 : header & 0xfff;
      const int64_t used = (static_cast<int64_t>(bits) * head_dim + 7) / 8;
      bytes += 2;
      if ((size -= 2) < used) return StatusCode::kCorrupt;
      uint64_t held = 0;
      int32_t count = 0;
      for (int32_t c = 0, at = 0; c < head_dim; ++c) {
        for (; count < bits; count += 8) held |= static_cast<uint64_t>(bytes[at++]) << count;
        codes[c] = wrap(base + static_cast<int32_t>(held & ((1u << bits) - 1)));
        held >>= bits;
        count -= bits;
      }
      bytes += used;
      size -= used;
    }
    return size == 0 ? StatusCode::kOk : StatusCode::kCorrupt;
  }

 private:
  static constexpr int32_t kRawWidth = 15, kLowest = -2048;
  static int32_t bits_of(int32_t width) { return width == kRawWidth ? 16 : width; }
};

class BitshuffleCoder : public BlockCoder {
 public:
  explicit BitshuffleCoder(int32_t level) : level_(level) {}

  StatusCode encode(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    std::vector<uint8_t>* out) const override {
    const int32_t count = tokens * head_dim;
    std::vector<uint8_t> planes(plane_bytes(count) * kBits);
    for (int32_t i = 0; i < count; ++i) {
      for (int32_t b = 0; b < kBits; ++b) {
        const uint32_t bit = static_cast<uint16_t>(codes[i]) >> b & 1u;
        planes[b * plane_bytes(count) + i / 8] |= static_cast<uint8_t>(bit << (i % 8));
      }
    }
    const size_t start = out->size();
    out->resize(start + ZSTD_compressBound(planes.size()));
    const size_t n = ZSTD_compress(out->data() + start, out->size() - start, planes.data(),
                                   planes.size(), level_);
    if (ZSTD_isError(n)) return StatusCode::kIo;
    out->resize(start + n);
    return StatusCode::kOk;
  }

  StatusCode decode(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    int16_t* codes) const override {
    const int32_t count = tokens * head_dim;
    std::vector<uint8_t> planes(plane_bytes(count) * kBits);
    if (ZSTD_decompress(planes.data(), planes.size(), bytes, size) != planes.size())
      return StatusCode::kCorrupt;
    for (int32_t i = 0; i < count; ++i) {
      uint32_t code = 0;
      for (int32_t b = 0; b < kBits; ++b)
        code |= (planes[b * plane_bytes(count) + i / 8] >> (i % 8) & 1u) << b;
      codes[i] = static_cast<int16_t>(code);
    }
    return StatusCode::kOk;
  }

 private:
  static constexpr int32_t kBits = 16;
  static int64_t plane_bytes(int32_t count) { return (count + 7) / 8; }

  int32_t level_;
};

class HuffmanCoder : public BlockCoder {
 public:
  explicit HuffmanCoder(const Codebook* codebook) : codebook_(*codebook) {}
  StatusCode encode(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    std::vector<uint8_t>* out) const override {
    return encode_block({codes, nullptr, tokens, head_dim}, {&codebook_, 1}, nullptr, out).code();
  }
  StatusCode decode(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    int16_t* codes) const override {
    return decode_block(bytes, size, {&codebook_, 1}, {codes, nullptr, tokens, head_dim}).code();
  }

 private:
  const Codebook& codebook_;  // billed where it is kept
};

class PredictingCoder : public BlockCoder {
 public:
  PredictingCoder(const Predictor& predictor, std::unique_ptr<BlockCoder> coder)
      : predictor_(predictor), coder_(std::move(coder)) {}
  StatusCode encode(const int16_t* codes, int32_t tokens, int32_t head_dim,
                    std::vector<uint8_t>* out) const override {
    std::vector<int16_t> rest(codes, codes + static_cast<int64_t>(tokens) * head_dim);
    predictor_.predict(tokens, head_dim, rest.data());
    return coder_->encode(rest.data(), tokens, head_dim, out);
  }
  StatusCode decode(const uint8_t* bytes, int64_t size, int32_t tokens, int32_t head_dim,
                    int16_t* codes) const override {
    const StatusCode s = coder_->decode(bytes, size, tokens, head_dim, codes);
    if (s == StatusCode::kOk) predictor_.undo(tokens, head_dim, codes);
    return s;
  }
  int64_t table_bytes() const override { return coder_->table_bytes(); }

 private:
  Predictor predictor_;
  std::unique_ptr<BlockCoder> coder_;
};

}  // namespace

Predictor Predictor::of(Prediction kind, const ComponentFormat& format) {
  const bool wide = format.step_rule == StepRule::kAbsolute;
  return {kind, wide ? 16 : format.step_rule == StepRule::kRelative ? 8 : format.type.bits()};
}

// From the last code to the first, so that neighbours are still the original ones.
void Predictor::predict(int32_t tokens, int32_t head_dim, int16_t* codes) const {
  const int32_t half = 1 << (bits - 1), mask = 2 * half - 1;
  for (int32_t t = tokens; t-- > 0 && kind != Prediction::kNone;) {
    for (int32_t c = head_dim; c-- > 0;) {
      int16_t& code = codes[static_cast<int64_t>(t) * head_dim + c];
      const int32_t rest = code - neighbours_say(kind, head_dim, codes, t, c);
      code = static_cast<int16_t>(((rest + half) & mask) - half);
    }
  }
}

void Predictor::undo(int32_t tokens, int32_t head_dim, int16_t* codes) const {
  for (int32_t t = 0; t < tokens && kind != Prediction::kNone; ++t) {
    for (int32_t c = 0; c < head_dim; ++c) {
      int16_t& code = codes[static_cast<int64_t>(t) * head_dim + c];
      const int32_t sum = code + neighbours_say(kind, head_dim, codes, t, c);
      code = bits == 16 ? wrap(sum) : static_cast<int16_t>(sum & ((1 << bits) - 1));
    }
  }
}

std::unique_ptr<BlockCoder> make_fixed_length_coder() {
  return std::make_unique<FixedLengthCoder>();
}
std::unique_ptr<BlockCoder> make_bitshuffle_coder(int32_t zstd_level) {
  return std::make_unique<BitshuffleCoder>(zstd_level);
}
std::unique_ptr<BlockCoder> make_huffman_coder(const Codebook* codebook) {
  return std::make_unique<HuffmanCoder>(codebook);
}
std::unique_ptr<BlockCoder> make_predicting_coder(const Predictor& predictor,
                                                  std::unique_ptr<BlockCoder> coder) {
  return std::make_unique<PredictingCoder>(predictor, std::move(coder));
}

}  // namespace tierkv::analysis
