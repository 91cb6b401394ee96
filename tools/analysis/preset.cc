#include "tools/analysis/preset.h"

#include <charconv>
#include <cmath>
#include <map>

#include "tierkv/layout.h"

namespace tierkv::analysis {
namespace {

Status usage(const std::string& message) {
  return Status(StatusCode::kInvalidArgument, message);
}

constexpr std::pair<const char*, Coder> kStages[] = {{"huffman", Coder::kHuffman},
                                                     {"fse", Coder::kFse},
                                                     {"fixed", Coder::kFixed},
                                                     {"bitshuffle", Coder::kBitshuffle}};

// The parts of `NAME[:key=value,...][+suffix]...`, still text.
struct PresetText {
  std::string name;
  std::map<std::string, std::string> keys;
  Coder stage = Coder::kNone;  // of a suffix
  bool rotate = false;
};

Status read_suffix(std::string_view suffix, PresetText* parts) {
  const auto twice = [&] {
    return usage("suffix '+" + std::string(suffix) + "' is given twice, or after another stage");
  };
  if (suffix == "rot") {
    if (parts->rotate) return twice();
    parts->rotate = true;
    return Status::ok();
  }
  for (const auto& [name, coder] : kStages) {
    if (suffix != name) continue;
    if (parts->stage != Coder::kNone) return twice();
    parts->stage = coder;
    return Status::ok();
  }
  return usage("unknown suffix '+" + std::string(suffix) +
               "' (there are +huffman, +fse, +fixed, +bitshuffle and +rot)");
}

Result<PresetText> split(std::string_view text) {
  PresetText parts;
  std::string_view rest = text;
  const size_t plus = rest.find('+');
  std::string_view suffixes = plus == std::string_view::npos ? "" : rest.substr(plus);
  rest = rest.substr(0, plus);
  while (!suffixes.empty()) {
    suffixes.remove_prefix(1);
    const std::string_view suffix = suffixes.substr(0, suffixes.find('+'));
    suffixes.remove_prefix(suffix.size());
    if (Status status = read_suffix(suffix, &parts); !status) return status;
  }
  const size_t colon = rest.find(':');
  parts.name = std::string(rest.substr(0, colon));
  if (colon == std::string_view::npos) return parts;
  rest.remove_prefix(colon + 1);
  for (bool more = true; more;) {
    const size_t comma = rest.find(',');
    const std::string_view item = rest.substr(0, comma);
    const size_t equals = item.find('=');
    if (equals == std::string_view::npos || equals == 0) {
      return usage("'" + std::string(item) + "' is not key=value");
    }
    const std::string key(item.substr(0, equals));
    if (!parts.keys.emplace(key, std::string(item.substr(equals + 1))).second) {
      return usage("key '" + key + "' is given twice");
    }
    more = comma != std::string_view::npos;
    if (more) rest.remove_prefix(comma + 1);
  }
  return parts;
}

// Takes values out of the key map; the first failure is kept, what is left over at the end is
// unknown.
class KeyReader {
 public:
  explicit KeyReader(std::map<std::string, std::string> keys) : keys_(std::move(keys)) {}

  void number(const char* key, double* value, double low, double high) {
    std::string text;
    if (!take(key, &text)) return;
    double v = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
    if (error != std::errc() || end != text.data() + text.size() || !(v >= low && v <= high)) {
      fail(key, text, "a number from " + short_number(low) + " to " + short_number(high));
      return;
    }
    *value = v;
  }
  void count(const char* key, int32_t* value, int32_t low, int32_t high) {
    std::string text;
    if (!take(key, &text)) return;
    int32_t v = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
    if (error != std::errc() || end != text.data() + text.size() || v < low || v > high) {
      fail(key, text, "a whole number from " + std::to_string(low) + " to " + std::to_string(high));
      return;
    }
    *value = v;
  }
  void word(const char* key, std::string* value, const std::vector<std::string>& allowed) {
    std::string text;
    if (!take(key, &text)) return;
    std::string list;
    for (const std::string& a : allowed) {
      if (a == text) {
        *value = text;
        return;
      }
      list += (list.empty() ? "" : ", ") + a;
    }
    fail(key, text, "one of " + list);
  }
  void format(const char* key, TierFormat* value) {
    std::string text;
    if (!take(key, &text)) return;
    Result<TierFormat> parsed = parse_tier_format(text);
    if (!parsed) {
      fail(key, text, "a format such as k8v4");
      return;
    }
    *value = *parsed;
  }
  bool take(const char* key, std::string* value) {
    const auto it = keys_.find(key);
    if (it == keys_.end()) return false;
    *value = it->second;
    keys_.erase(it);
    return true;
  }
  Status finish(const std::string& name) const {
    if (!status_) return status_;
    if (!keys_.empty())
      return usage("preset '" + name + "' has no key '" + keys_.begin()->first + "'");
    return Status::ok();
  }

 private:
  static std::string short_number(double v) {
    char buffer[32];
    const auto [end, error] = std::to_chars(buffer, buffer + sizeof(buffer), v);
    return error == std::errc() ? std::string(buffer, end) : "?";
  }
  void fail(const char* key, const std::string& text, const std::string& expected) {
    if (status_) status_ = usage(std::string(key) + "=" + text + ": expected " + expected);
  }

  std::map<std::string, std::string> keys_;
  Status status_;
};

constexpr int32_t kMaxTokens = 1 << 20;

void read_window(KeyReader& keys, Scheme* s) {
  keys.count("window", &s->policy.window_tokens, 0, kMaxTokens);
  keys.count("sinks", &s->policy.sink_tokens, 0, kMaxTokens);
}

// kXvY and fp16: every token the same; group_k, group_v are sub-groups of channels.
void read_uniform(KeyReader& keys, const TierFormat& format, Scheme* s) {
  s->high = format;
  s->policy.window_tokens = 0;
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

void read_kivi(KeyReader& keys, int32_t bits, Scheme* s) {
  int32_t group = bits == 4 ? 128 : 32;
  s->policy.window_tokens = 128;
  keys.count("group", &group, 1, kMaxTokens);
  keys.count("residual", &s->policy.window_tokens, 0, kMaxTokens);
  s->high = token_wise_tier(bits, bits);
  s->high.k.unit = Unit::kChannel;
  s->high.k.group = group;
  s->high.v.group = group;
}

ComponentFormat stepped(StepRule rule, Unit unit, int32_t group, double step) {
  ComponentFormat f;
  f.bits = 0;
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
  keys.word("basis", &basis, {"none", "mean", "hadamard", "matrix"});
  read_window(keys, s);
  s->high.k = stepped(StepRule::kAbsolute, Unit::kGlobal, 0, k);
  s->high.v = stepped(StepRule::kAbsolute, Unit::kGlobal, 0, v);
  static const std::map<std::string, BasisKind> kBases = {{"none", BasisKind::kNone},
                                                          {"mean", BasisKind::kMean},
                                                          {"hadamard", BasisKind::kHadamard},
                                                          {"matrix", BasisKind::kMatrix}};
  s->high.k.basis = s->high.v.basis = kBases.at(basis);
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
  s->policy.window_tokens = eviction == Eviction::kSnapKv ? 64 : 0;
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
  if (parsed->scheme.coder == Coder::kZstd) return usage("of=" + base + ": zstd of zstd");
  if (parsed->scheme.has_baseline_coder())
    return usage("of=" + base + ": its codes have a stage of their own");
  *s = parsed->scheme;
  for (TierFormat* f : {&s->high, &s->low, &s->window}) {
    f->k.entropy = f->v.entropy = Entropy::kNone;
  }
  s->coder = Coder::kZstd;
  return Status::ok();
}

}  // namespace

bool Scheme::has_fixed_pages() const {
  if (coder == Coder::kZstd || has_baseline_coder()) return false;
  const auto fixed = [](const ComponentFormat& f) {
    return f.unit == Unit::kToken && f.step_rule == StepRule::kMinMax &&
           f.entropy == Entropy::kNone && f.bits >= 2;
  };
  const auto both = [&](const TierFormat& f) { return fixed(f.k) && fixed(f.v); };
  return both(high) && both(window) && (!tiered || both(low));
}

Scheme Scheme::for_head_dim(int32_t head_dim) const {
  Scheme s = *this;
  if (s.high.k.unit == Unit::kChannel && s.high.v.unit == Unit::kToken && s.high.v.group > head_dim)
    s.high.v.group = 0;
  return s;
}

Status Scheme::validate(int32_t head_dim) const {
  if (Status s = high.validate(head_dim); !s) return s;
  if (Status s = window.validate(head_dim); !s) return s;
  if (tiered) {
    if (Status s = low.validate(head_dim); !s) return s;
  }
  return policy.validate();
}

namespace {

// The scheme that a name and its keys say, before suffixes.
Status read_named(const std::string& name, KeyReader& keys, Scheme* s) {
  if (name == "fp16") {
    read_uniform(keys, raw_tier(), s);
  } else if (name == "diffkv") {
    read_diffkv(keys, s);
  } else if (name == "kivi4" || name == "kivi2") {
    read_kivi(keys, name == "kivi4" ? 4 : 2, s);
  } else if (name == "kvcomp") {
    read_kvcomp(keys, s);
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
    return usage("unknown name '" + name + "' (see --help for the list)");
  }
  return Status::ok();
}

// What suffixes and common keys must not be asked of.
Status check_suffixes(const PresetText& parts, const Scheme& s, bool basis_given) {
  const std::string& name = parts.name;
  const bool always_coded = name == "kvcomp" || name == "step";
  const bool codes = s.coder != Coder::kZstd && s.high != raw_tier();
  if (parts.stage == Coder::kHuffman && always_coded)
    return usage("'" + name + "' is always Huffman coded; leave +huffman out");
  if (parts.stage == Coder::kHuffman && !codes) return usage("+huffman needs codes to work on");
  if (parts.stage != Coder::kNone && !codes)
    return usage("an entropy stage needs codes to work on");
  if (parts.rotate && !codes) return usage("+rot has no effect on raw values");
  if (parts.rotate && basis_given) return usage("+rot and basis= exclude each other");
  return Status::ok();
}

}  // namespace

Result<Preset> parse_preset(std::string_view text) {
  const auto fail = [&](const Status& s) {
    return s.with_context("preset '" + std::string(text) + "'");
  };
  Result<PresetText> parts = split(text);
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
  if (s.coder != Coder::kZstd && s.high != raw_tier()) read_common(keys, &s, &only);
  if (Status status = keys.finish(name); !status) return fail(status);
  if (Status status = check_suffixes(*parts, s, basis_given); !status) return fail(status);
  if (parts->rotate) set_rotation(&s);
  if (parts->stage != Coder::kNone) set_stage(parts->stage, &s);
  if (s.prediction != Prediction::kNone && s.coder == Coder::kNone)
    return fail(usage("predict= needs an entropy stage behind it (+huffman, ...)"));
  if (!only.empty()) keep_only(only, &s);
  if (s.high == raw_tier() && !only.empty())
    return fail(usage("only=: nothing is left to compress"));
  if (Status status = s.policy.validate(); !status) return fail(status);
  return preset;
}

std::vector<std::string> default_presets() {
  return {"fp16",
          "k8v8:window=64",
          "k8v4:window=64",
          "k4v4:window=64",
          "k4v2:window=64",
          "diffkv",
          "diffkv:low=k4v4",
          "kivi4:residual=64,group=64",
          "kivi2:residual=64",
          "kvcomp",
          "kvcomp:unit=channel,rel_k=0.15",
          "step",
          "step:k=0.4,v=0.3",
          "zstd-fp16",
          "zstd-codes:of=k4v4"};
}

std::string preset_help() {
  return R"(Presets: NAME[:key=value,...][+STAGE][+rot]
  fp16             stored as is                                            window= sinks=
  kXvY             token-wise min-max, X and Y of 16 8 4 2 1 bits          group_k= group_v= window= sinks=
  diffkv           tiers by significance                                   high=k8v4 low=k4v2 alpha_h=1 alpha_l=0
                                                                           window=64 sinks=0 window_format=high|raw
  kivi4, kivi2     keys channel-wise, values token-wise, newest raw        group=128|32 residual=128
  kvcomp           relative steps, Huffman                                 unit=block|channel rel_k=0.05 rel_v=0.15
                                                                           block=64 window=64 sinks=0
  step             one step per layer and head, Huffman                    k=0.3 v=0.25 window=64 sinks=0
                                                                           basis=mean|none|hadamard|matrix
  snapkv           prune to a share of each head, by the newest queries    keep=0.5 window=64 format=k16v16
  h2o              prune to a share of each head, by attention received    keep=0.5 format=k16v16
  zstd-fp16        zstd of the raw bytes                                   level=3
  zstd-codes       zstd of one byte per code of another preset             of=k8v4 level=3
  Where there are codes: only=k|v leaves the other component raw; predict=token|channel|plane codes what is left of a
  Lorenzo predictor.
  +huffman, +fse (tANS as in zstd), +fixed (one width per token), +bitshuffle (with zstd): entropy stage; kvcomp and step
  have Huffman where none is named.  +rot: seeded Hadamard rotation before quantisation)";
}

}  // namespace tierkv::analysis
