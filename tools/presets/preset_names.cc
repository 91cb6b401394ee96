// SPDX-License-Identifier: Apache-2.0
#include "tools/presets/preset.h"

namespace tierkv::analysis {

std::vector<std::string> default_presets() {
  return {"fp16",
          "k8v8",
          "k8v4",
          "k4v4",
          "k4v2",
          "diffkv",
          "diffkv:low=k4v4",
          "kivi4:group=64",
          "kivi2",
          "kvcomp",
          "kvcomp:unit=channel,rel_k=0.15",
          "small",
          "small:books=4",
          "fast",
          "step",
          "zstd-fp16",
          "zstd-codes:of=k4v4"};
}

std::string preset_help() {
  return R"(Presets: NAME[:key=value,...][+STAGE][+rot]
  fp16             stored as is
  kXvY             token-wise min-max, X and Y of 16 8 4 2 1 bits          group_k= group_v=
                   or 2n, 2 bits clipped at the norm
  diffkv           tiers by significance                                   high=k8v4 low=k4v2 alpha_h=1 alpha_l=0
                                                                           window_format=high|raw
  fast             tiers by class of heads, rotated, 2 bits clipped        rotate=on means=on
                   at the norm; needs a profile with sensitivities         (0.1*k8v4|0.375*k4v4/k4v2@1|k4v2/k2v2@1)
  tiers            the same of classes of one's own, the most sensitive    classes=[SHARE*]HIGH[/LOW][@ALPHA_H[:ALPHA_L]]|...
                   heads first; one class needs no profile                 rotate=on|off means=on|off
  kivi4, kivi2     keys channel-wise, values token-wise, newest raw        group=128|32 residual=64 (its window)
  kvcomp           relative steps, Huffman                                 unit=block|channel rel_k=0.05 rel_v=0.15
                                                                           block=64
  small            keys before RoPE with a weight per channel, steps by     k=0.55 v=0.5 (0.33, 0.28 without a profile)
                   token, means removed, Huffman                           books=1 importance=on|off; a profile without
                                                                           sensitivities needs k= and v=
  step             one step per layer and head, Huffman                    k=0.3 v=0.25
                                                                           basis=mean|none|hadamard
  snapkv           prune to a share of each head, by the newest queries    keep=0.5 window=64 format=k16v16
  h2o              prune to a share of each head, by attention received    keep=0.5 format=k16v16
  zstd-fp16        zstd of the raw bytes                                   level=3
  zstd-codes       zstd of one byte per code of another preset             of=k8v4 level=3
  All but fp16, snapkv, h2o and zstd-fp16 keep the newest window=64 and the first sinks=4 tokens apart, raw but for
  diffkv. Where presets keep different numbers of them, their sizes and errors do not compare.
  Where there are codes: only=k|v leaves the other component raw; predict=token|channel|plane codes what is left of a
  Lorenzo predictor.
  +huffman, +fse (tANS as in zstd), +fixed (one width per token), +bitshuffle (with zstd): entropy stage; kvcomp, small and
  step have Huffman where none is named, small no other.  +rot: seeded Hadamard rotation before quantisation)";
}

}  // namespace tierkv::analysis
