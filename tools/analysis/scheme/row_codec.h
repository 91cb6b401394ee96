// SPDX-License-Identifier: Apache-2.0
// One row (sequence, layer, kv_head) under a scheme: which tokens go where, and the encoded
// segments of both components.
#pragma once

#include <functional>
#include <vector>

#include "codec/file/row_plan.h"
#include "datasets/row_data.h"
#include "tools/analysis/scheme/segment_encoder.h"

namespace tierkv::analysis {

// significance [tokens] is read only where the scheme has tiers; negative or not finite: refused.
Status plan_row(const Scheme& scheme, int64_t tokens, const std::vector<float>& significance,
                RowPlan* plan);

// What one row's encoding needs besides the scheme; one per component.
struct ComponentContext {
  Basis basis;
  float step = 0;
  const Codebook* codebooks[2] = {nullptr, nullptr};  // high, low
  const BlockCoder* blocks[2] = {nullptr, nullptr};   // high, low, of baseline coders
  // Weighted steps.
  const WeightedRow* weighted = nullptr;
  const BookFamily* family = nullptr;
  const uint8_t* book_of = nullptr;
  const int8_t* importance = nullptr;  // [tokens of the row]; null: none
};

class RowCodec {
 public:
  RowCodec(const Scheme& scheme, const RowPlan& plan, const RowInput& input,
           const ComponentContext* k, const ComponentContext* v);

  const Scheme& scheme() const { return scheme_; }
  const RowPlan& plan() const { return plan_; }
  const RowInput& input() const { return input_; }
  int32_t head_dim() const { return head_dim_; }
  SegmentCoding coding(Component c, Part part) const;
  // Calls visit(codes [tokens, head_dim], tokens) for the codes of every block of a body part; they
  // may be overwritten.
  // Not for weighted steps.
  using VisitCodes = std::function<void(int16_t*, int32_t)>;
  StatusCode visit_codes(Component c, Part part, const VisitCodes& visit) const;
  // Codes of the body of a component with weighted steps, [body tokens, head_dim], and its tokens'
  // exponents.
  Status weighted_codes(Component c, std::vector<int16_t>* codes,
                        std::vector<int8_t>* exponents) const;
  StatusCode encode();                             // every part of both components
  StatusCode encode_part(Component c, Part part);  // one of them
  const EncodedSegment& segment(Component c, Part part) const {
    return segments_[static_cast<int>(c)][static_cast<int>(part)];
  }
  int64_t stored_bytes() const;  // of this row's segments, without codebooks, means and steps
  int64_t body_bytes() const;    // the part of it outside window and sinks
  int64_t coded_bytes(Component c) const;  // blocks or zstd frames of coded codes
  int64_t coded_symbols(Component c) const;

  // Calls visit(part, token indices, k, v, n) for every stored token, at most kBlockTokens at a
  // time.
  using Visit = std::function<void(Part, const int64_t*, const float*, const float*, int32_t)>;
  StatusCode decode(const Visit& visit) const;
  // The same for forms that are not stored but that a moving window asks for (metric
  // attention_rel_error_online): tokens [begin, end) in the window's format (Part::kWindow), and
  // the key gap in its quantised form (Part::kKeyGap).
  StatusCode decode_recent(int64_t begin, int64_t end, const Visit& visit) const;
  StatusCode decode_gap_quantised(const Visit& visit) const;

 private:
  std::vector<int64_t> tokens_of(Component c, Part part) const {
    return part_tokens(plan_, c, part);
  }
  StatusCode encode_tokens(const SegmentCoding& f, Component c, const std::vector<int64_t>& tokens,
                           EncodedSegment* out) const;

  const Scheme& scheme_;
  const RowPlan& plan_;
  RowInput input_;
  const ComponentContext* context_[2];
  int32_t head_dim_;
  EncodedSegment segments_[2][kNumParts];
};

}  // namespace tierkv::analysis
