// SPDX-License-Identifier: Apache-2.0
#include "tierkv/codec.h"

#include "codec/host/page_codec.h"

namespace tierkv {
namespace {

Result<HostPage> page_of(const PageFormat& format, void* bytes) {
  if (bytes == nullptr) return Status(StatusCode::kInvalidArgument, "page is null");
  Result<PageLayout> layout =
      make_page_layout(format.tier, format.head_dim, format.page_bytes, format.records);
  if (!layout) return layout.status();
  HostPage page{static_cast<uint8_t*>(bytes), *layout, format.raw_dtype};
  page.rule[0] = format.tier.k.step_rule;
  page.rule[1] = format.tier.v.step_rule;
  return page;
}

}  // namespace

Result<int32_t> page_tokens(const PageFormat& format) {
  const Result<PageLayout> layout =
      make_page_layout(format.tier, format.head_dim, format.page_bytes, format.records);
  if (!layout) return layout.status();
  return layout->tokens;
}

Status encode_page(const PageFormat& format, void* page, int32_t used, const TokenBatch& batch) {
  const Result<HostPage> host = page_of(format, page);
  return host ? append_tokens(*host, used, batch) : host.status();
}

Status decode_page(const PageFormat& format, const void* page, int32_t first_slot,
                   const TokenOutput& out) {
  // HostPage serves both directions; decode_tokens() does not write.
  const Result<HostPage> host = page_of(format, const_cast<void*>(page));
  return host ? decode_tokens(*host, first_slot, out) : host.status();
}

}  // namespace tierkv
