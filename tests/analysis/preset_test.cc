// SPDX-License-Identifier: Apache-2.0
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
  EXPECT_EQ(small.high.k.step, 0.55);
  EXPECT_EQ(small.high.v.step, 0.5);
  EXPECT_EQ(small.own_k, 0.33);
  EXPECT_EQ(small.own_v, 0.28);
  EXPECT_EQ(small.books, 1);
  EXPECT_FALSE(small.needs_queries() || small.needs_significance());
  EXPECT_EQ(scheme("small:k=0.4,books=3").own_k, 0.4);
  EXPECT_FALSE(scheme("small:importance=off").importance);
  for (const char* text : {"small+fse", "small+rot", "small:predict=token", "small:books=5",
                           "small:importance=1", "zstd-codes:of=small"}) {
    EXPECT_FALSE(parse_preset(text).is_ok()) << text;
  }

  for (const std::string name : {"small", "step", "kvcomp"}) {
    const Scheme plain = scheme(name), named = scheme(name + "+huffman");
    EXPECT_EQ(named.coder, Coder::kHuffman);
    EXPECT_TRUE(named.high == plain.high && named.window == plain.window) << name;
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
  for (const char* p : {"fp16", "k8v4", "k4v2:window=64", "diffkv", "k16v4", "k4v2n"}) {
    EXPECT_TRUE(scheme(p).has_fixed_pages()) << p;
  }
  for (const char* p : {"kivi4", "zstd-fp16", "k8v4+huffman", "k1v1"})
    EXPECT_FALSE(scheme(p).has_fixed_pages()) << p;
  for (const char* p : {"step", "kvcomp"}) EXPECT_TRUE(scheme(p).has_coded_pages()) << p;
}

TEST(Preset, FastHasThreeClassesOfHeads) {
  const Scheme fast = scheme("fast");
  ASSERT_EQ(fast.classes.size(), 3u);
  EXPECT_EQ(fast.policy, (TierPolicy{1.0, 0.0, 64, 4}));
  EXPECT_EQ(fast.window, raw_tier());
  EXPECT_TRUE(fast.tiered && fast.key_means && fast.has_unlike_classes());
  EXPECT_TRUE(fast.has_fixed_pages());
  EXPECT_FALSE(fast.has_records() || fast.prunes());
  const auto bits = [](const TierFormat& f) { return 10 * f.k.type.bits() + f.v.type.bits(); };
  const int32_t high[] = {84, 44, 42}, low[] = {84, 42, 22};
  const double shares[] = {0.1, 0.375, 0.525};
  for (int32_t c = 0; c < 3; ++c) {
    const Scheme own = fast.of_class(c);
    EXPECT_EQ(bits(own.high), high[c]);
    EXPECT_EQ(bits(own.low), low[c]);
    EXPECT_EQ(own.tiered, c > 0);
    EXPECT_NEAR(fast.classes[c].share, shares[c], 1e-12);
    EXPECT_EQ(own.policy.alpha_high, 1.0);
    for (const ComponentFormat& f : {own.high.k, own.high.v, own.low.k, own.low.v}) {
      EXPECT_EQ(f.basis, BasisKind::kHadamard);
      EXPECT_EQ(f.step_rule, f.type.bits() == 2 ? StepRule::kNorm : StepRule::kMinMax);
    }
  }
  const Scheme plain = scheme("tiers:classes=k8v4/k4v2@3:0.1,rotate=off,window=9");
  EXPECT_EQ(plain.classes.size(), 1u);
  EXPECT_FALSE(plain.has_unlike_classes() || plain.key_means);
  EXPECT_TRUE(plain.prunes());
  EXPECT_EQ(plain.high.k.basis, BasisKind::kMean);
  EXPECT_EQ(plain.high.v.basis, BasisKind::kNone);
  EXPECT_EQ(plain.policy, (TierPolicy{3.0, 0.1, 9, 4}));
  EXPECT_FALSE(scheme("tiers:classes=0.5*k4v2/k2v2|0.5*k4v2/k2v2").has_unlike_classes());
  EXPECT_FALSE(scheme("tiers:classes=0.5*k8v4|k4v4").tiered);
}

TEST(Preset, ClassesThatMakeNoSenseAreNamed) {
  const std::pair<const char*, const char*> cases[] = {
      {"tiers", "needs classes="},
      {"fast:classes=k8v4", "no key 'classes'"},
      {"tiers:classes=", "class 1: a format is missing"},
      {"tiers:classes=0.1*k8v4|", "class 2: a format is missing"},
      {"tiers:classes=0.1*k8v4|k4v4/", "class 2: a format is missing"},
      {"tiers:classes=k8v4|k4v4", "class 1 has no share"},
      {"tiers:classes=0.5*k8v4|0.4*k4v4", "sum to 0.9"},
      {"tiers:classes=0.6*k8v4|0.6*k4v4", "sum to 1.2"},
      {"tiers:classes=0.6*k8v4|0.4*k4v4|k2v2", "nothing for the last"},
      {"tiers:classes=1.5*k8v4", "'1.5': a share"},
      {"tiers:classes=0*k8v4|k4v4", "'0': a share"},
      {"tiers:classes=nan*k8v4|k4v4", "'nan': a share"},
      {"tiers:classes=0.1*k8v4|k5v4", "class 2: 'k5v4'"},
      {"tiers:classes=k16v16", "8, 4 or 2 bits"},
      {"tiers:classes=k4v2/k8v4", "wider"},
      {"tiers:classes=k8v4/k4v2@x", "@ALPHA_H"},
      {"tiers:classes=k8v4/k4v2@1:2", "above alpha_h"},
      {"tiers:classes=.1*k8v4|.1*k8v4|.1*k8v4|.1*k8v4|k4v4", "more than 4 classes"},
      {"fast+huffman", "entropy stage"},
      {"fast+rot", "+rot"},
      {"fast:only=k", "no key 'only'"},
      {"zstd-codes:of=fast", "formats of their own"}};
  for (const auto& [text, words] : cases) {
    const Result<Preset> p = parse_preset(text);
    ASSERT_FALSE(p.is_ok()) << text;
    EXPECT_NE(p.status().message().find(words), std::string::npos)
        << text << ": " << p.status().message();
  }
}

TEST(Preset, EveryDefaultParses) {
  for (const std::string& p : default_presets()) EXPECT_TRUE(parse_preset(p).is_ok()) << p;
}

}  // namespace
}  // namespace tierkv::analysis
