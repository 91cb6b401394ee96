// SPDX-License-Identifier: Apache-2.0
// Entropy stages to compare the library's coded blocks with (KVComp section 3.3 names them as
// alternatives), and a predictor before any of them.
#pragma once

#include <memory>

#include "codec/format/codebook.h"
#include "tools/analysis/baselines/block_coder.h"
#include "tools/presets/preset.h"

namespace tierkv::analysis {

// Lorenzo predictors: codes minus what their neighbours in the block say.
//   kToken    the code of the same channel of the token before
//   kChannel  the code before it of the same token
//   kPlane    both, less the one they share: the two-dimensional predictor (KVComp section 3.1.3)
// The first token or channel of a block has no neighbour: 0 stands for it. What is left is taken
// modulo the number of codes, so that it needs no more bits than they do.
struct Predictor {
  Prediction kind = Prediction::kNone;
  int32_t bits = 16;  // of a code: unsigned below 16, signed for 16

  static Predictor of(Prediction kind, const ComponentFormat& format);
  // codes [tokens, head_dim], in place.
  void predict(int32_t tokens, int32_t head_dim, int16_t* codes) const;
  void undo(int32_t tokens, int32_t head_dim, int16_t* codes) const;
};

// One width per token of the block: its smallest code (12 bits), the bits that the others need
// above it (4 bits; 15: all codes raw in 16), then the codes.
std::unique_ptr<BlockCoder> make_fixed_length_coder();

// The bits of the block's codes transposed, all lowest bits first, then zstd. Two bytes a code.
std::unique_ptr<BlockCoder> make_bitshuffle_coder(int32_t zstd_level);

// The library's coded blocks.
std::unique_ptr<BlockCoder> make_huffman_coder(const Codebook* codebook);

std::unique_ptr<BlockCoder> make_predicting_coder(const Predictor& predictor,
                                                  std::unique_ptr<BlockCoder> coder);

}  // namespace tierkv::analysis
