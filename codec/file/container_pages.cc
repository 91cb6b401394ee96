// SPDX-License-Identifier: Apache-2.0
#include "codec/file/container_pages.h"

#include <algorithm>
#include <cmath>

#include "codec/format/byte_cursor.h"
#include "codec/format/errors.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxPageTokens = kMaxPageBytes / kTileTokens;  // keeps layouts within int32_t

Status check_slots(const HostPage& page, const PageTokens& tokens) {
  for (int32_t i = 0; i < page.layout.tokens; ++i) {
    const bool used = i < tokens.count;
    if (page_position(page, i) != (used ? tokens.positions[i] : kNoPosition)) {
      return corrupt("slot " + std::to_string(i) + " holds another token than the row map says");
    }
    if (used ? !std::isfinite(page_score(page, i)) : page_score(page, i) != kNoScore) {
      return corrupt("slot " + std::to_string(i) + " has no proper score");
    }
  }
  return Status::ok();
}

}  // namespace

PageLayout StoredPageFormat::layout(int32_t tokens) const {
  PageShape s = shape;
  s.tokens = tile_count(tokens) * kTileTokens;
  return page_layout(s);
}

int64_t StoredPageFormat::bytes(int32_t tokens) const {
  const PageLayout p = layout(tokens);
  return has_scores ? p.used_bytes : p.scores;
}

Result<StoredPageFormat> parse_page_format(const std::vector<uint8_t>& bytes, int32_t head_dim) {
  StoredPageFormat f;
  ByteReader r(bytes);
  f.shape.head_dim = r.i32();
  f.shape.tokens = r.i32();
  const int32_t raw_dtype = r.i32(), segments = r.i32();
  CodeType type[2];
  int32_t groups[2], basis[2], rule[2];
  for (int c = 0; c < 2; ++c) {
    type[c] = CodeType::of_bits(r.i32());
    groups[c] = r.i32();
    basis[c] = r.i32();
    rule[c] = r.i32();
  }
  if (!r.at_end()) return corrupt("size disagrees with its fields");
  if (f.shape.head_dim != head_dim) return corrupt("head_dim is not the model's");
  if (raw_dtype != 0 && raw_dtype != 1) return corrupt("unknown raw dtype");
  if (segments != 4 && segments != 6) return corrupt("pages of neither 4 nor 6 segments");
  f.raw_dtype = static_cast<DType>(raw_dtype);
  f.has_scores = segments == 6;
  for (int c = 0; c < 2; ++c) {
    if (basis[c] < 0 || basis[c] > static_cast<int32_t>(BasisKind::kHadamard)) {
      return corrupt("unknown basis");
    }
    f.basis[c] = static_cast<BasisKind>(basis[c]);
    f.rule[c] = static_cast<StepRule>(rule[c]);
    if (!is_page_rule(f.rule[c], type[c])) {
      return corrupt("a step rule that no page of these bits has");
    }
    const bool possible =
        type[c].bits() > 0 && type[c].bits() <= 16 && groups[c] >= 0 && groups[c] <= head_dim;
    if (!possible) return corrupt("bits or groups that no page has");
    if (type[c].is_raw() && basis[c] != 0) return corrupt("a basis of raw values");
  }
  f.shape.k_type = type[0];
  f.shape.v_type = type[1];
  f.shape.k_groups = groups[0];
  f.shape.v_groups = groups[1];
  const bool sized = f.shape.tokens > 0 && f.shape.tokens <= kMaxPageTokens;
  if (!sized || !is_known_head_dim(head_dim) || !is_page_layout(page_layout(f.shape))) {
    return corrupt("no page has this shape");
  }
  return f;
}

Status decode_page(const StoredPageFormat& format, const std::vector<uint8_t>& bytes,
                   const PageTokens& tokens, const PageSink& sink) {
  const PageLayout layout = format.layout(tokens.count);
  if (static_cast<int64_t>(bytes.size()) != format.bytes(tokens.count)) {
    return corrupt("is not of the size of a page of " + std::to_string(tokens.count) + " tokens");
  }
  // The page codec only reads what it is asked for, so that a page may end before its scores.
  const HostPage page{const_cast<uint8_t*>(bytes.data()),
                      layout,
                      format.raw_dtype,
                      {format.rule[0], format.rule[1]}};
  if (format.has_scores) {
    if (Status s = check_slots(page, tokens); !s) return s;
  }
  TokenOutput out;
  out.count = tokens.count;
  if (!format.has_basis()) {
    out.k = sink.k;
    out.v = sink.v;
    out.rows = tokens.positions;
    return decode_tokens(page, 0, out);
  }
  const int64_t d = format.shape.head_dim;
  std::vector<float> x[2];
  for (std::vector<float>& side : x) side.resize(tokens.count * d);
  out.k = x[0].data();
  out.v = x[1].data();
  if (Status s = decode_tokens(page, 0, out); !s) return s;
  for (int c = 0; c < 2; ++c) {
    if (format.basis[c] != BasisKind::kNone) sink.basis[c]->undo(x[c].data(), tokens.count);
    float* to = c == 0 ? sink.k : sink.v;
    for (int32_t t = 0; t < tokens.count; ++t) {
      std::copy_n(x[c].data() + t * d, d, to + tokens.positions[t] * d);
    }
  }
  return Status::ok();
}

}  // namespace tierkv
