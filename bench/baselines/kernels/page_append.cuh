// SPDX-License-Identifier: Apache-2.0
// A token in its elements into a page, by one warp: append_tokens(), overwrite_token() and
// remove_token() of codec/host/page_codec.h on the device. The store quantises tokens for several
// pages at a time instead; these are to test and to time one.
#pragma once

#include "codec/gpu/pages/page_token.cuh"

namespace tierkv {

// A token to be written.
struct TokenInput {
  const void* k;  // dtype [head_dim], aligned to its elements
  const void* v;
  DType dtype;
  float score;
  int32_t position;
};

__device__ __forceinline__ StatusCode scalars_status(const TokenInput& input) {
  if (!is_finite(input.score)) return StatusCode::kNonFinite;
  return input.position < 0 ? StatusCode::kInvalidArgument : StatusCode::kOk;
}

// The greatest status in all lanes.
__device__ __forceinline__ StatusCode quantize_token(const PageRef& page, const TokenInput& input,
                                                     const LaneValues (&x)[2], LaneToken* token) {
  float lo[2], hi[2];
  row_extrema(x, page.layout->head_dim(), lo, hi);
  StatusCode code = scalars_status(input);
  code = greater(code, quantize_lane(page, Component::kKey, x[0], lo[0], hi[0], &token->k));
  code = greater(code, quantize_lane(page, Component::kValue, x[1], lo[1], hi[1], &token->v));
  token->score = input.score;
  token->position = input.position;
  return worst_of_warp(code);
}

// append_tokens() of one token into slot `slot` of a page of as many tokens: kNonFinite,
// kOutOfRange, kInvalidArgument as there, the greatest of them. (A tile that was opened for a token
// that is refused stays open: it holds no token.)
__device__ __forceinline__ StatusCode append_page_token(const PageRef& page, int32_t slot,
                                                        const TokenInput& input) {
  LaneValues x[2];  // asked for before anything waits for the page
  load_lane_values(input.k, input.dtype, page.layout->head_dim(), x[0]);
  load_lane_values(input.v, input.dtype, page.layout->head_dim(), x[1]);
  open_token_slot(page, slot);
  LaneToken token;
  const StatusCode code = quantize_token(page, input, x, &token);
  if (code == StatusCode::kOk) store_lane_token(page, slot, token);
  return code;
}

// append_page_token() by two warps, one for each component; the key's writes score and position.
// Half the time of one warp. What a warp refuses the other may have written: the token is not in
// use, and the status is the greater of the two.
__device__ __forceinline__ StatusCode append_page_side(const PageRef& page, int32_t slot,
                                                       Component c, const TokenInput& input) {
  const int32_t head_dim = page.layout->head_dim();
  LaneValues x[1];
  load_lane_values(c == Component::kKey ? input.k : input.v, input.dtype, head_dim, x[0]);
  if (slot % kTileTokens == 0) clear_tile_side(page, slot / kTileTokens, c);
  float lo[1], hi[1];
  row_extrema(x, head_dim, lo, hi);
  LaneSide side;
  StatusCode code = c == Component::kKey ? scalars_status(input) : StatusCode::kOk;
  code = worst_of_warp(greater(code, quantize_lane(page, c, x[0], lo[0], hi[0], &side)));
  __syncwarp();
  if (code != StatusCode::kOk) return code;
  store_side(page, slot, c, side);
  if (c == Component::kKey) store_scalars(page, slot, input.score, input.position);
  return code;
}

// overwrite_token(): likewise, over whatever the slot held.
__device__ __forceinline__ StatusCode overwrite_page_token(const PageRef& page, int32_t slot,
                                                           const TokenInput& input) {
  LaneValues x[2];
  load_lane_values(input.k, input.dtype, page.layout->head_dim(), x[0]);
  load_lane_values(input.v, input.dtype, page.layout->head_dim(), x[1]);
  LaneToken token;
  const StatusCode code = quantize_token(page, input, x, &token);
  if (code == StatusCode::kOk) store_lane_token(page, slot, token);
  return code;
}

// remove_token(): the tier's last token moves into the hole. Pages of one format.
__device__ __forceinline__ void remove_page_token(const PageRef& page, int32_t slot,
                                                  const PageRef& last, int32_t last_slot) {
  if (page.bytes != last.bytes || slot != last_slot) {
    LaneToken token;
    load_lane_token(last, last_slot, &token);
    store_lane_token(page, slot, token);
  }
  clear_page_token(last, last_slot);
}

}  // namespace tierkv
