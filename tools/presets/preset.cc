// SPDX-License-Identifier: Apache-2.0
#include "tools/presets/preset.h"

#include <map>

#include "codec/format/coded_block_format.h"
#include "codec/host/coded/weighted_rows.h"
#include "tierkv/layout.h"
#include "tools/presets/preset_classes.h"
#include "tools/presets/preset_text.h"

namespace tierkv::analysis {
namespace {

constexpr int32_t kMaxTokens = 1 << 20;
// The same for every preset, so that sizes and errors compare.
constexpr int32_t kDefaultWindow = 64, kDefaultSinks = 4;

void read_window(KeyReader& keys, Scheme* s, const char* window = "window") {
  s->policy.window_tokens = kDefaultWindow;
  s->policy.sink_tokens = kDefaultSinks;
  keys.count(window, &s->policy.window_tokens, 0, kMaxTokens);
  keys.count("sinks", &s->policy.sink_tokens, 0, kMaxTokens);
}

// kXvY and fp16: every token the same; group_k, group_v are sub-groups of channels.
void read_uniform(KeyReader& keys, const TierFormat& format, Scheme* s) {
  s->high = format;
  if (format.k.is_raw()) keys.refuse("group_k", "16-bit keys have no groups");
  if (format.v.is_raw()) keys.refuse("group_v", "16-bit values have no groups");
  keys.count("group_k", &s->high.k.group, 1, kMaxHeadDim);
  keys.count("group_v", &s->high.v.group, 1, kMaxHeadDim);
  read_window(keys, s);
}

void read_diffkv(KeyReader& keys, Scheme* s) {
  s->tiered = true;
  s->high = token_wise_tier(8, 4);
  s->low = token_wise_tier(4, 2);
  keys.format("high", &s->high);
  keys.format("low", &s->low);
  keys.number("alpha_h", &s->policy.alpha_high, 0, 1e9);
  keys.number("alpha_l", &s->policy.alpha_low, 0, 1e9);
  read_window(keys, s);
  std::string window_format = "high";
  keys.word("window_format", &window_format, {"high", "raw"});
  s->window = window_format == "high" ? s->high : raw_tier();
}

// Tiers by class of heads: `text` are the classes.
Status read_classes(KeyReader& keys, const std::string& text, Scheme* s) {
  std::string rotate = "on", means = "on";
  keys.word("rotate", &rotate, {"on", "off"});
  keys.word("means", &means, {"on", "off"});
  read_window(keys, s);
  Result<std::vector<HeadClass>> classes = parse_classes(text);
  if (!classes) return classes.status();
  s->key_means = means == "on" && rotate == "on";
  for (HeadClass& c : *classes) {
    for (TierFormat* f : {&c.high, &c.low}) {
      f->k.basis = rotate == "on"  ? BasisKind::kHadamard
                   : means == "on" ? BasisKind::kMean
                                   : BasisKind::kNone;
      f->v.basis = rotate == "on" ? BasisKind::kHadamard : BasisKind::kNone;
    }
  }
  s->classes = std::move(*classes);
  *s = s->of_class(0);
  for (const HeadClass& c : s->classes) s->tiered |= c.tiered();
  return Status::ok();
}

void read_kivi(KeyReader& keys, int32_t bits, Scheme* s) {
  int32_t group = bits == 4 ? 128 : 32;
  keys.count("group", &group, 1, kMaxTokens);
  read_window(keys, s, "residual");
  s->high = token_wise_tier(bits, bits);
  s->high.k.unit = Unit::kChannel;
  s->high.k.group = group;
  s->high.v.group = group;
}

ComponentFormat stepped(StepRule rule, Unit unit, int32_t group, double step) {
  ComponentFormat f;
  f.type = CodeType::uniform(0);
  f.step_rule = rule;
  f.unit = unit;
  f.group = group;
  f.step = step;
  f.entropy = Entropy::kHuffman;
  return f;
}

void read_kvcomp(KeyReader& keys, Scheme* s) {
  std::string unit = "block";
  int32_t block = 64;
  double rel_k = 0.05, rel_v = 0.15;
  keys.word("unit", &unit, {"block", "channel"});
  keys.number("rel_k", &rel_k, 1e-4, 1);
  keys.number("rel_v", &rel_v, 1e-4, 1);
  keys.count("block", &block, 1, 4096);
  read_window(keys, s);
  s->high.k =
      stepped(StepRule::kRelative, unit == "block" ? Unit::kBlock : Unit::kChannel, block, rel_k);
  s->high.v = stepped(StepRule::kRelative, Unit::kToken, 0, rel_v);
  s->coder = Coder::kHuffman;
}

void read_step(KeyReader& keys, Scheme* s) {
  double k = 0.3, v = 0.25;
  std::string basis = "mean";
  keys.number("k", &k, 1e-6, 1e3);
  keys.number("v", &v, 1e-6, 1e3);
  keys.word("basis", &basis, {"none", "mean", "hadamard"});
  read_window(keys, s);
  s->high.k = stepped(StepRule::kAbsolute, Unit::kGlobal, 0, k);
  s->high.v = stepped(StepRule::kAbsolute, Unit::kGlobal, 0, v);
  static const std::map<std::string, BasisKind> kBases = {
      {"none", BasisKind::kNone}, {"mean", BasisKind::kMean}, {"hadamard", BasisKind::kHadamard}};
  s->high.k.basis = s->high.v.basis = kBases.at(basis);
  s->coder = Coder::kHuffman;
}

// Weighted steps: without a profile k is a share of the keys' root mean square.
void read_small(KeyReader& keys, Scheme* s) {
  double k = 0, v = 0;  // 0: not given
  keys.number("k", &k, 1e-6, 1e3);
  keys.number("v", &v, 1e-6, 1e3);
  s->default_steps = k <= 0 || v <= 0;
  s->own_k = k > 0 ? k : kOwnSteps.k;
  s->own_v = v > 0 ? v : kOwnSteps.v;
  keys.count("books", &s->books, 1, kMaxFamilyBooks);
  std::string importance = "on";
  keys.word("importance", &importance, {"on", "off"});
  s->importance = importance == "on";
  read_window(keys, s);
  s->high.k = stepped(StepRule::kWeighted, Unit::kToken, 0, k > 0 ? k : kProfileSteps.k);
  s->high.v = stepped(StepRule::kWeighted, Unit::kToken, 0, v > 0 ? v : kProfileSteps.v);
  s->coder = Coder::kHuffman;
}

void set_rotation(Scheme* s) {
  for (TierFormat* f : {&s->high, &s->low}) {
    f->k.basis = f->v.basis = BasisKind::kHadamard;
  }
  // The window of a tiered scheme shares its basis; a raw one stays as it is.
  if (s->window != raw_tier()) s->window.k.basis = s->window.v.basis = BasisKind::kHadamard;
}

void set_stage(Coder stage, Scheme* s) {
  s->coder = stage;
  const Entropy entropy = stage == Coder::kHuffman ? Entropy::kHuffman : Entropy::kNone;
  for (TierFormat* f : {&s->high, &s->low, &s->window}) {
    for (Component c : {Component::kKey, Component::kValue}) {
      if (!f->of(c).is_raw()) f->of(c).entropy = entropy;
    }
  }
}

void read_eviction(KeyReader& keys, Eviction eviction, Scheme* s) {
  s->eviction = eviction;
  s->keep = 0.5;
  s->high = raw_tier();
  s->policy.window_tokens = eviction == Eviction::kSnapKv ? kDefaultWindow : 0;
  keys.number("keep", &s->keep, 1e-4, 1);
  if (eviction == Eviction::kSnapKv) {
    keys.count("window", &s->policy.window_tokens, 1, kMaxTokens);
  }
  keys.format("format", &s->high);
  s->window = s->high;
}

// Keys that every preset with codes understands: only=k or v leaves the other component raw,
// predict takes a prediction off the codes.
void read_common(KeyReader& keys, Scheme* s, std::string* only) {
  keys.word("only", only, {"k", "v"});
  std::string predict = "none";
  keys.word("predict", &predict, {"none", "token", "channel", "plane"});
  static const std::map<std::string, Prediction> kPredictions = {{"none", Prediction::kNone},
                                                                 {"token", Prediction::kToken},
                                                                 {"channel", Prediction::kChannel},
                                                                 {"plane", Prediction::kPlane}};
  s->prediction = kPredictions.at(predict);
}

void keep_only(const std::string& only, Scheme* s) {
  const Component other = only == "k" ? Component::kValue : Component::kKey;
  for (TierFormat* f : {&s->high, &s->low, &s->window}) f->of(other) = ComponentFormat();
}

Status read_zstd_codes(KeyReader& keys, Scheme* s) {
  std::string base = "k8v4";
  keys.take("of", &base);
  Result<Preset> parsed = parse_preset(base);
  if (!parsed) return parsed.status().with_context("of=" + base);
  if (parsed->scheme.coder == Coder::kZstd) return bad_preset("of=" + base + ": zstd of zstd");
  if (parsed->scheme.weighted()) return bad_preset("of=" + base + ": its codes have no zstd form");
  if (!parsed->scheme.classes.empty())
    return bad_preset("of=" + base + ": its rows have formats of their own");
  if (parsed->scheme.has_baseline_coder())
    return bad_preset("of=" + base + ": its codes have a stage of their own");
  if (parsed->scheme.high == raw_tier() && !parsed->scheme.tiered)
    return bad_preset("of=" + base + ": it has no codes");
  *s = parsed->scheme;
  for (TierFormat* f : {&s->high, &s->low, &s->window}) {
    f->k.entropy = f->v.entropy = Entropy::kNone;
  }
  s->coder = Coder::kZstd;
  return Status::ok();
}

// The scheme that a name and its keys say, before suffixes.
Status read_named(const std::string& name, KeyReader& keys, Scheme* s) {
  if (name == "fp16") {
    read_uniform(keys, raw_tier(), s);
  } else if (name == "diffkv") {
    read_diffkv(keys, s);
  } else if (name == "fast") {
    return read_classes(keys, std::string(kFastClasses), s);
  } else if (name == "tiers") {
    std::string classes;
    if (!keys.take("classes", &classes))
      return bad_preset("'tiers' needs classes=, such as " + std::string(kFastClasses));
    return read_classes(keys, classes, s);
  } else if (name == "kivi4" || name == "kivi2") {
    read_kivi(keys, name == "kivi4" ? 4 : 2, s);
  } else if (name == "kvcomp") {
    read_kvcomp(keys, s);
  } else if (name == "small") {
    read_small(keys, s);
  } else if (name == "step") {
    read_step(keys, s);
  } else if (name == "snapkv" || name == "h2o") {
    read_eviction(keys, name == "h2o" ? Eviction::kH2o : Eviction::kSnapKv, s);
  } else if (name == "zstd-fp16") {
    s->policy.window_tokens = 0;
    s->coder = Coder::kZstd;
  } else if (name == "zstd-codes") {
    if (Status status = read_zstd_codes(keys, s); !status) return status;
  } else if (Result<TierFormat> format = parse_tier_format(name); format && name[0] == 'k') {
    read_uniform(keys, *format, s);
  } else {
    return bad_preset("unknown name '" + name + "' (see --help for the list)");
  }
  return Status::ok();
}

// What suffixes and common keys must not be asked of.
Status check_suffixes(const PresetText& parts, const Scheme& s, bool basis_given) {
  const std::string& name = parts.name;
  const bool codes = s.coder != Coder::kZstd && s.high != raw_tier();
  if (!s.classes.empty() && parts.stage != Coder::kNone)
    return bad_preset("'" + name + "' has fixed widths; it takes no entropy stage");
  if (!s.classes.empty() && parts.rotate)
    return bad_preset("'" + name + "' is rotated as it is; leave +rot out");
  if (parts.stage == Coder::kHuffman && !codes)
    return bad_preset("+huffman needs codes to work on");
  if (parts.stage != Coder::kNone && !codes)
    return bad_preset("an entropy stage needs codes to work on");
  if (s.weighted() && parts.stage != Coder::kNone && parts.stage != Coder::kHuffman)
    return bad_preset("'small' has no other entropy stage");
  if (s.weighted() && parts.rotate)
    return bad_preset("'small' undoes RoPE, which +rot does not commute with");
  if (parts.rotate && !codes) return bad_preset("+rot has no effect on raw values");
  if (parts.rotate && basis_given) return bad_preset("+rot and basis= exclude each other");
  return Status::ok();
}

}  // namespace

Result<Preset> parse_preset(std::string_view text) {
  const auto fail = [&](const Status& s) {
    return s.with_context("preset '" + std::string(text) + "'");
  };
  Result<PresetText> parts = split_preset(text);
  if (!parts) return fail(parts.status());
  Preset preset;
  preset.text = std::string(text);
  Scheme& s = preset.scheme;
  const bool basis_given = parts->keys.count("basis") > 0;
  KeyReader keys(std::move(parts->keys));
  const std::string& name = parts->name;
  if (Status status = read_named(name, keys, &s); !status) return fail(status);
  if (s.coder == Coder::kZstd) keys.count("level", &s.zstd_level, 1, 22);
  std::string only;
  const bool has_common = s.coder != Coder::kZstd && s.high != raw_tier() && s.classes.empty();
  if (has_common) read_common(keys, &s, &only);
  if (s.weighted() && s.prediction != Prediction::kNone)
    return fail(bad_preset("'small' predicts nothing; leave predict= out"));
  if (Status status = keys.finish(name); !status) return fail(status);
  if (Status status = check_suffixes(*parts, s, basis_given); !status) return fail(status);
  if (parts->rotate) set_rotation(&s);
  if (parts->stage != Coder::kNone) set_stage(parts->stage, &s);
  if (s.prediction != Prediction::kNone && s.coder == Coder::kNone)
    return fail(bad_preset("predict= needs an entropy stage behind it (+huffman, ...)"));
  if (!only.empty()) keep_only(only, &s);
  if (s.high == raw_tier() && !only.empty())
    return fail(bad_preset("only=: nothing is left to compress"));
  if (Status status = s.policy.validate(); !status) return fail(status);
  return preset;
}

}  // namespace tierkv::analysis
