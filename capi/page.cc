// SPDX-License-Identifier: Apache-2.0
// Unified pages.
#include <numeric>
#include <vector>

#include "capi/abi.h"
#include "tierkv/codec.h"
#include "tierkv/page.h"

namespace tierkv::capi {
namespace {

Status read_format(const tkv_page_format* in, PageFormat* out) {
  tkv_page_format f;
  if (Status s = read_struct(in, "format", &f); !s) return s;
  out->tier.k = token_wise(f.k_bits, f.k_group);
  out->tier.v = token_wise(f.v_bits, f.v_group);
  out->head_dim = f.head_dim;
  out->page_bytes = f.page_bytes;
  if (f.raw_dtype != TKV_FLOAT16 && f.raw_dtype != TKV_BFLOAT16) {
    return invalid("raw_dtype must be TKV_FLOAT16 or TKV_BFLOAT16");
  }
  out->raw_dtype = static_cast<DType>(f.raw_dtype);
  return Status::ok();
}

Status read_tokens(const tkv_tokens* in, tkv_tokens* out) {
  if (Status s = read_struct(in, "tokens", out); !s) return s;
  if (out->dtype < TKV_FLOAT16 || out->dtype > TKV_FLOAT32) return invalid("dtype is unknown");
  return Status::ok();
}

Status choose(const tkv_page_format* formats, size_t count, tkv_page_choice* choice) {
  tkv_page_choice c;
  if (Status s = read_struct(choice, "choice", &c); !s) return s;
  if (formats == nullptr || count == 0 || count > 64) return invalid("1 to 64 formats are needed");
  std::vector<TierFormat> tiers;
  int32_t head_dim = 0;
  const auto* bytes = reinterpret_cast<const unsigned char*>(formats);
  for (size_t i = 0; i < count; ++i) {
    // A caller of another version has elements of another size.
    const auto* element =
        reinterpret_cast<const tkv_page_format*>(bytes + i * formats->struct_size);
    PageFormat format;
    if (Status s = read_format(element, &format); !s) return s;
    if (element->struct_size != formats->struct_size || (i > 0 && format.head_dim != head_dim)) {
      return invalid("formats differ in struct_size or head_dim");
    }
    head_dim = format.head_dim;
    tiers.push_back(format.tier);
  }
  PageSizing sizing;
  if (c.max_waste != 0) sizing.max_waste = c.max_waste;
  if (c.min_tokens != 0) sizing.min_tokens = c.min_tokens;
  const Result<PageChoice> chosen = choose_page_size(tiers, head_dim, sizing);
  if (!chosen) return chosen.status();
  c.page_bytes = chosen->page_bytes;
  c.worst_waste = chosen->worst_waste;
  c.within_limit = chosen->within_limit ? 1 : 0;
  write_struct(c, choice);
  return Status::ok();
}

Status encode(const tkv_page_format* format, void* page, int32_t used, const tkv_tokens* tokens) {
  PageFormat f;
  tkv_tokens t;
  if (Status s = read_format(format, &f); !s) return s;
  if (Status s = read_tokens(tokens, &t); !s) return s;
  const Result<int32_t> room = page_tokens(f);
  if (!room) return room.status();
  if (t.count < 0 || t.count > *room || used < 0 || used > *room - t.count) {
    return invalid("used and count exceed the page's " + std::to_string(*room) + " tokens");
  }
  std::vector<float> scores;
  std::vector<int32_t> positions;
  if (t.scores == nullptr) scores.assign(t.count, 0.0f);
  if (t.positions == nullptr) {
    positions.resize(t.count);
    std::iota(positions.begin(), positions.end(), used);
  }
  TokenBatch batch;
  batch.k = t.k;
  batch.v = t.v;
  batch.scores = t.scores != nullptr ? t.scores : scores.data();
  batch.positions = t.positions != nullptr ? t.positions : positions.data();
  batch.count = t.count;
  batch.dtype = static_cast<DType>(t.dtype);
  if (t.count == 0) return Status::ok();
  return encode_page(f, page, used, batch);
}

Status decode(const tkv_page_format* format, const void* page, int32_t first_slot,
              const tkv_tokens* tokens) {
  PageFormat f;
  tkv_tokens t;
  if (Status s = read_format(format, &f); !s) return s;
  if (Status s = read_tokens(tokens, &t); !s) return s;
  TokenOutput out;
  out.k = t.k;
  out.v = t.v;
  out.scores = t.scores;
  out.positions = t.positions;
  out.count = t.count;
  out.dtype = static_cast<DType>(t.dtype);
  return decode_page(f, page, first_slot, out);
}

}  // namespace
}  // namespace tierkv::capi

using tierkv::capi::guarded;

extern "C" {

tkv_status tkv_page_choose_size(const tkv_page_format* formats, size_t count,
                                tkv_page_choice* choice, tkv_error* error) {
  return guarded(error, [&] { return tierkv::capi::choose(formats, count, choice); });
}

tkv_status tkv_page_tokens(const tkv_page_format* format, int32_t* tokens, tkv_error* error) {
  return guarded(error, [&]() -> tierkv::Status {
    tierkv::PageFormat f;
    if (tokens == nullptr) return tierkv::capi::invalid("tokens is null");
    if (tierkv::Status s = tierkv::capi::read_format(format, &f); !s) return s;
    const tierkv::Result<int32_t> n = tierkv::page_tokens(f);
    if (n) *tokens = *n;
    return n.status();
  });
}

tkv_status tkv_page_encode(const tkv_page_format* format, void* page, int32_t used,
                           const tkv_tokens* tokens, tkv_error* error) {
  return guarded(error, [&] { return tierkv::capi::encode(format, page, used, tokens); });
}

tkv_status tkv_page_decode(const tkv_page_format* format, const void* page, int32_t first_slot,
                           const tkv_tokens* tokens, tkv_error* error) {
  return guarded(error, [&] { return tierkv::capi::decode(format, page, first_slot, tokens); });
}

}  // extern "C"
