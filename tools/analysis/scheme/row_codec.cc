// SPDX-License-Identifier: Apache-2.0
#include "tools/analysis/scheme/row_codec.h"

#include <algorithm>
#include <numeric>

#include "tools/analysis/scheme/tiering.h"

namespace tierkv::analysis {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};
constexpr Part kParts[] = {Part::kSinks, Part::kHigh, Part::kLow, Part::kKeyGap, Part::kWindow};

int index(Component c) {
  return static_cast<int>(c);
}
int index(Part p) {
  return static_cast<int>(p);
}

std::vector<int64_t> range(int64_t begin, int64_t end) {
  std::vector<int64_t> r(std::max<int64_t>(0, end - begin));
  std::iota(r.begin(), r.end(), begin);
  return r;
}

}  // namespace

Status plan_row(const Scheme& scheme, int64_t tokens, const std::vector<float>& significance,
                RowPlan* plan) {
  const TierPolicy& policy = scheme.policy;
  plan->tokens = tokens;
  plan->body_end = std::max<int64_t>(0, tokens - policy.window_tokens);
  plan->body_begin = std::min<int64_t>(policy.sink_tokens, plan->body_end);
  const ComponentFormat& k = scheme.high.k;
  const bool grouped = !k.is_raw() && (k.unit == Unit::kChannel || k.unit == Unit::kBlock);
  const int64_t group = grouped ? k.group : 1, body = plan->body_end - plan->body_begin;
  plan->key_body_end = plan->body_begin + body / group * group;
  plan->count = {tokens - body, body, 0, 0};
  if (!scheme.tiered) return Status::ok();
  plan->tiers.resize(tokens);
  int32_t count[kNumTiers];
  Status s = assign_prompt_tiers(policy, significance.data(), static_cast<int32_t>(tokens),
                                 plan->tiers.data(), count);
  std::copy(count, count + kNumTiers, plan->count.begin());
  return s;
}

RowCodec::RowCodec(const Scheme& scheme, const RowPlan& plan, const RowInput& input,
                   const ComponentContext* k, const ComponentContext* v)
    : scheme_(scheme), plan_(plan), input_(input), context_{k, v}, head_dim_(input.k->head_dim) {}

SegmentCoding RowCodec::coding(Component c, Part part) const {
  const ComponentContext& context = *context_[index(c)];
  SegmentCoding coding;
  coding.zstd_level = scheme_.zstd_level;
  SegmentFormat& f = coding.stored;
  f.head_dim = head_dim_;
  f.raw_dtype = input_.of(c).dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  const bool body = part == Part::kHigh || part == Part::kLow;
  if (body) f.format = (part == Part::kHigh ? scheme_.high : scheme_.low).of(c);
  if (part == Part::kWindow || part == Part::kSinks) f.format = scheme_.window.of(c);
  if (!f.raw() && f.format.basis != BasisKind::kNone) f.basis = &context.basis;
  f.step = context.step;
  // Windows and sinks are small and young: they are stored at fixed width.
  if (body && (scheme_.coder == Coder::kZstd || !f.raw())) {
    f.codebook = context.codebooks[part == Part::kLow];
    coding.code_with(scheme_.coder, context.blocks[part == Part::kLow]);
  }
  if (f.is_weighted()) {
    f.weighted = {c, context.weighted, context.family, plan_.body_begin};
    coding.book_of = context.book_of;
    if (context.importance != nullptr) coding.importance = context.importance + plan_.body_begin;
  }
  return coding;
}

StatusCode RowCodec::encode_tokens(const SegmentCoding& f, Component c,
                                   const std::vector<int64_t>& tokens, EncodedSegment* out) const {
  SegmentEncoder encoder(f);
  std::vector<float> x;
  const auto total = static_cast<int64_t>(tokens.size());
  int64_t n = 0;
  for (int64_t t = 0; t < total; t += n) {
    n = std::min(f.stored.chunk_at(t), total - t);
    x.resize(n * head_dim_);
    for (int64_t i = 0; i < n; ++i) {
      row_to_float(input_.of(c), tokens[t + i], 1, x.data() + i * head_dim_);
    }
    if (StatusCode s = encoder.append(x.data(), n); s != StatusCode::kOk) return s;
  }
  return encoder.finish(out);
}

StatusCode RowCodec::visit_codes(Component c, Part part, const VisitCodes& visit) const {
  const SegmentFormat f = coding(c, part).stored;
  const std::vector<int64_t> tokens = tokens_of(c, part);
  const auto total = static_cast<int64_t>(tokens.size());
  std::vector<float> x;
  ChunkCodes chunk;
  for (int64_t t = 0; t < total; t += f.chunk_tokens()) {
    const int64_t n = std::min(f.chunk_tokens(), total - t);
    x.resize(n * head_dim_);
    for (int64_t i = 0; i < n; ++i) {
      row_to_float(input_.of(c), tokens[t + i], 1, x.data() + i * head_dim_);
    }
    if (f.basis != nullptr) f.basis->apply(x.data(), n);
    if (StatusCode s = quantize_chunk(f, x.data(), n, &chunk); s != StatusCode::kOk) return s;
    for (int64_t b = 0; b < n; b += kBlockTokens) {
      visit(chunk.codes.data() + b * head_dim_,
            static_cast<int32_t>(std::min<int64_t>(kBlockTokens, n - b)));
    }
  }
  return StatusCode::kOk;
}

Status RowCodec::weighted_codes(Component c, std::vector<int16_t>* codes,
                                std::vector<int8_t>* exponents) const {
  const SegmentCoding f = coding(c, Part::kHigh);
  const int64_t total = plan_.body_end - plan_.body_begin;
  codes->resize(total * head_dim_);
  exponents->resize(total);
  std::vector<float> x(kBlockTokens * head_dim_);
  for (int64_t t = 0; t < total; t += kBlockTokens) {
    const int64_t n = std::min<int64_t>(kBlockTokens, total - t);
    row_to_float(input_.of(c), plan_.body_begin + t, n, x.data());
    const Status s = quantize_weighted_chunk(f, x.data(), t, n, exponents->data() + t,
                                             codes->data() + t * head_dim_);
    if (!s) return s;
  }
  return Status::ok();
}

StatusCode RowCodec::encode_part(Component c, Part part) {
  return encode_tokens(coding(c, part), c, tokens_of(c, part), &segments_[index(c)][index(part)]);
}

StatusCode RowCodec::encode() {
  for (const Component c : kComponents) {
    for (const Part part : kParts) {
      if (StatusCode s = encode_part(c, part); s != StatusCode::kOk) return s;
    }
  }
  return StatusCode::kOk;
}

int64_t RowCodec::stored_bytes() const {
  int64_t bytes = 0;
  for (const auto& component : segments_) {
    for (const EncodedSegment& s : component) bytes += tierkv::analysis::stored_bytes(s);
  }
  return bytes;
}

int64_t RowCodec::body_bytes() const {
  int64_t bytes = 0;
  for (const auto& component : segments_) {
    for (const Part part : {Part::kHigh, Part::kLow, Part::kKeyGap})
      bytes += tierkv::analysis::stored_bytes(component[index(part)]);
  }
  return bytes;
}

int64_t RowCodec::coded_bytes(Component c) const {
  int64_t bytes = 0;
  for (const Part part : {Part::kHigh, Part::kLow}) {
    if (coding(c, part).coder != Coder::kNone)
      bytes += static_cast<int64_t>(segments_[index(c)][index(part)].data.size());
  }
  return bytes;
}

int64_t RowCodec::coded_symbols(Component c) const {
  int64_t symbols = 0;
  for (const Part part : {Part::kHigh, Part::kLow}) {
    const SegmentCoding f = coding(c, part);
    if (f.coder != Coder::kNone && !f.stored.raw())
      symbols += segments_[index(c)][index(part)].tokens * head_dim_;
  }
  return symbols;
}

StatusCode RowCodec::decode(const Visit& visit) const {
  std::vector<float> k(kBlockTokens * head_dim_), v(kBlockTokens * head_dim_);
  const auto decoder = [&](Component c, Part part) {
    return SegmentReader(coding(c, part), segments_[index(c)][index(part)]);
  };
  const auto emit = [&](Part label, SegmentReader& keys, SegmentReader& values,
                        const std::vector<int64_t>& tokens) {
    for (size_t t = 0; t < tokens.size(); t += kBlockTokens) {
      const auto n = static_cast<int32_t>(std::min<size_t>(kBlockTokens, tokens.size() - t));
      if (StatusCode s = keys.read(n, k.data()); s != StatusCode::kOk) return s;
      if (StatusCode s = values.read(n, v.data()); s != StatusCode::kOk) return s;
      visit(label, tokens.data() + t, k.data(), v.data(), n);
    }
    return StatusCode::kOk;
  };
  for (const Part part : {Part::kSinks, Part::kHigh, Part::kLow, Part::kWindow}) {
    SegmentReader keys = decoder(Component::kKey, part), values = decoder(Component::kValue, part);
    if (StatusCode s = emit(part, keys, values, tokens_of(Component::kKey, part));
        s != StatusCode::kOk)
      return s;
    if (part == Part::kHigh && plan_.key_body_end < plan_.body_end) {
      // The values of the key gap follow those of the body in the same segment.
      SegmentReader gap = decoder(Component::kKey, Part::kKeyGap);
      const StatusCode s =
          emit(Part::kKeyGap, gap, values, range(plan_.key_body_end, plan_.body_end));
      if (s != StatusCode::kOk) return s;
    }
  }
  return StatusCode::kOk;
}

StatusCode RowCodec::decode_recent(int64_t begin, int64_t end, const Visit& visit) const {
  const SegmentCoding fk = coding(Component::kKey, Part::kWindow);
  const SegmentCoding fv = coding(Component::kValue, Part::kWindow);
  std::vector<float> k(kBlockTokens * head_dim_), v(kBlockTokens * head_dim_);
  for (int64_t t = begin; t < end; t += kBlockTokens) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, end - t));
    const std::vector<int64_t> tokens = range(t, t + n);
    EncodedSegment sk, sv;
    if (StatusCode s = encode_tokens(fk, Component::kKey, tokens, &sk); s != StatusCode::kOk)
      return s;
    if (StatusCode s = encode_tokens(fv, Component::kValue, tokens, &sv); s != StatusCode::kOk)
      return s;
    if (StatusCode s = SegmentReader(fk, sk).read(n, k.data()); s != StatusCode::kOk) return s;
    if (StatusCode s = SegmentReader(fv, sv).read(n, v.data()); s != StatusCode::kOk) return s;
    visit(Part::kWindow, tokens.data(), k.data(), v.data(), n);
  }
  return StatusCode::kOk;
}

StatusCode RowCodec::decode_gap_quantised(const Visit& visit) const {
  const int64_t gap = plan_.body_end - plan_.key_body_end;
  if (gap == 0) return StatusCode::kOk;
  const SegmentFormat fk = coding(Component::kKey, Part::kHigh).stored;
  const SegmentFormat fv = coding(Component::kValue, Part::kHigh).stored;
  const int64_t group_end = std::min(plan_.key_body_end + fk.unit_tokens(), plan_.tokens);
  std::vector<float> k((group_end - plan_.key_body_end) * head_dim_), v(gap * head_dim_);
  const auto round_trip = [&](const SegmentFormat& f, Component c, int64_t end, float* out) {
    const int64_t n = end - plan_.key_body_end;
    std::vector<float> x(n * head_dim_);
    row_to_float(input_.of(c), plan_.key_body_end, n, x.data());
    if (f.raw()) {
      std::copy(x.begin(), x.end(), out);
      return StatusCode::kOk;
    }
    if (f.basis != nullptr) f.basis->apply(x.data(), n);
    ChunkCodes codes;
    if (StatusCode s = quantize_chunk(f, x.data(), n, &codes); s != StatusCode::kOk) return s;
    dequantize_chunk(f, codes, n, out);
    // A relative step that needs more than a byte per code is stored raw as a unit; here the gap is
    // one unit.
    if (std::count(codes.raw_unit.begin(), codes.raw_unit.end(), 1) > 0)
      std::copy(x.begin(), x.end(), out);
    if (f.basis != nullptr) f.basis->undo(out, n);
    return StatusCode::kOk;
  };
  if (StatusCode s = round_trip(fk, Component::kKey, group_end, k.data()); s != StatusCode::kOk)
    return s;
  if (StatusCode s = round_trip(fv, Component::kValue, plan_.body_end, v.data());
      s != StatusCode::kOk)
    return s;
  for (int64_t t = 0; t < gap; t += kBlockTokens) {
    const auto n = static_cast<int32_t>(std::min<int64_t>(kBlockTokens, gap - t));
    const std::vector<int64_t> tokens = range(plan_.key_body_end + t, plan_.key_body_end + t + n);
    visit(Part::kKeyGap, tokens.data(), k.data() + t * head_dim_, v.data() + t * head_dim_, n);
  }
  return StatusCode::kOk;
}

}  // namespace tierkv::analysis
