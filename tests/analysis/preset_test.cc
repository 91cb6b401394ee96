#include "tools/presets/preset.h"

#include <gtest/gtest.h>

namespace tierkv::analysis {
namespace {

Scheme scheme(const std::string& text) {
  Result<Preset> p = parse_preset(text);
  EXPECT_TRUE(p.is_ok()) << text << ": " << p.status().message();
  return p ? p->scheme : Scheme{};
}

TEST(Preset, DefaultsAreThoseOfTheDesign) {
  const Scheme uniform = scheme("k8v4");
  EXPECT_EQ(uniform.high, token_wise_tier(8, 4));
  EXPECT_FALSE(uniform.tiered);

  const Scheme diffkv = scheme("diffkv");
  EXPECT_EQ(diffkv.high, token_wise_tier(8, 4));
  EXPECT_EQ(diffkv.low, token_wise_tier(4, 2));
  EXPECT_EQ(diffkv.window, diffkv.high);
  EXPECT_EQ(diffkv.policy, (TierPolicy{1.0, 0.0, 64, 4}));
  EXPECT_FALSE(diffkv.prunes());
  EXPECT_TRUE(scheme("diffkv:alpha_l=0.02").prunes());

  const Scheme kivi = scheme("kivi2");
  EXPECT_EQ(kivi.high.k.unit, Unit::kChannel);
  EXPECT_EQ(kivi.high.k.group, 32);
  EXPECT_EQ(kivi.high.v.unit, Unit::kToken);
  EXPECT_EQ(kivi.high.v.group, 32);
  EXPECT_EQ(scheme("kivi4").high.k.group, 128);

  const Scheme kvcomp = scheme("kvcomp");
  EXPECT_EQ(kvcomp.high.k.unit, Unit::kBlock);
  EXPECT_EQ(kvcomp.high.k.step_rule, StepRule::kRelative);
  EXPECT_EQ(kvcomp.high.k.step, 0.05);
  EXPECT_EQ(kvcomp.high.v.step, 0.15);
  EXPECT_EQ(kvcomp.coder, Coder::kHuffman);
  EXPECT_EQ(scheme("kvcomp:unit=channel").high.k.unit, Unit::kChannel);

  const Scheme small = scheme("small");
  EXPECT_TRUE(small.weighted() && small.importance);
  EXPECT_EQ(small.high.k.step, 0.5);
  EXPECT_EQ(small.high.v.step, 0.45);
  EXPECT_EQ(small.own_k, 0.3);
  EXPECT_EQ(small.own_v, 0.25);
  EXPECT_EQ(small.books, 1);
  EXPECT_FALSE(small.needs_queries() || small.needs_significance());
  EXPECT_EQ(scheme("small:k=0.4,books=3").own_k, 0.4);
  EXPECT_FALSE(scheme("small:importance=off").importance);
  for (const char* text : {"small+huffman", "small+fse", "small+rot", "small:predict=token",
                           "small:books=5", "small:importance=1", "zstd-codes:of=small"}) {
    EXPECT_FALSE(parse_preset(text).is_ok()) << text;
  }

  const Scheme step = scheme("step");
  EXPECT_EQ(step.high.k.basis, BasisKind::kMean);
  EXPECT_EQ(step.high.v.step, 0.25);
  EXPECT_TRUE(step.needs_queries());
}

TEST(Preset, EveryPresetKeepsTheSameTokensApart) {
  for (const char* text :
       {"k8v4", "k1v1", "k4v4+huffman", "diffkv", "kivi4", "kivi2", "kvcomp", "kvcomp:unit=channel",
        "small", "step", "step+fse", "zstd-codes:of=k4v4", "zstd-codes:of=kivi2"}) {
    EXPECT_EQ(scheme(text).policy.window_tokens, 64) << text;
    EXPECT_EQ(scheme(text).policy.sink_tokens, 4) << text;
    EXPECT_FALSE(scheme(text).keeps_all_alike()) << text;
  }
  for (const char* text : {"fp16", "zstd-fp16", "snapkv", "h2o"})
    EXPECT_TRUE(scheme(text).keeps_all_alike()) << text;
  EXPECT_EQ(scheme("kivi2:residual=9,sinks=0").policy, (TierPolicy{1.0, 0.0, 9, 0}));
  EXPECT_EQ(scheme("k8v4:window=0,sinks=1").policy, (TierPolicy{1.0, 0.0, 0, 1}));
}

TEST(Preset, SuffixesCombine) {
  const Scheme s = scheme("k4v4:window=64+huffman+rot");
  EXPECT_EQ(s.coder, Coder::kHuffman);
  EXPECT_EQ(s.high.k.basis, BasisKind::kHadamard);
  EXPECT_EQ(s.high.v.entropy, Entropy::kHuffman);
  EXPECT_EQ(s.window, raw_tier());
  EXPECT_EQ(scheme("step+rot").high.k.basis, BasisKind::kHadamard);
  EXPECT_EQ(scheme("diffkv+rot").window.k.basis, BasisKind::kHadamard);
}

TEST(Preset, ZstdCodesTakeTheirBase) {
  const Scheme s = scheme("zstd-codes:of=k2v4,level=19");
  EXPECT_EQ(s.high, token_wise_tier(2, 4));
  EXPECT_EQ(s.coder, Coder::kZstd);
  EXPECT_EQ(s.zstd_level, 19);
}

TEST(Preset, KiviGroupsEndWithTheHead) {
  EXPECT_EQ(scheme("kivi4").for_head_dim(64).high.v.group, 0);
  EXPECT_EQ(scheme("kivi4").for_head_dim(64).high.k.group, 128);
  EXPECT_EQ(scheme("kivi2").for_head_dim(64).high.v.group, 32);
}

TEST(Preset, WhichSchemesHavePages) {
  for (const char* p : {"fp16", "k8v4", "k4v2:window=64", "diffkv", "k16v4"}) {
    EXPECT_TRUE(scheme(p).has_fixed_pages()) << p;
  }
  for (const char* p : {"kivi4", "zstd-fp16", "k8v4+huffman", "k1v1"})
    EXPECT_FALSE(scheme(p).has_fixed_pages()) << p;
  for (const char* p : {"step", "kvcomp"}) EXPECT_TRUE(scheme(p).has_coded_pages()) << p;
}

TEST(Preset, EveryDefaultParses) {
  for (const std::string& p : default_presets()) EXPECT_TRUE(parse_preset(p).is_ok()) << p;
}

}  // namespace
}  // namespace tierkv::analysis
