// SPDX-License-Identifier: Apache-2.0
// The decoder's core, shared by coded and weighted blocks: a slice whose header and sizes have been
// checked, to codes.
//
// Functions return what is wrong with the bytes, or null.
#pragma once

#include <cstdint>

#include "codec/host/coded/slice_books.h"
#include "codec/host/coded/stream_decode.h"

namespace tierkv {

// Pointers into a block that has all the bytes they stand for.
struct OpenSlice {
  BlockMode mode = BlockMode::kRaw16;
  Component component = Component::kKey;
  int32_t tokens = 0, dims = 0;
  int32_t streams_per_lane = 1;
  int16_t base = 0;  // raw modes
  const uint8_t* low_plane = nullptr;
  const uint8_t* payload = nullptr;  // or raw tiles
  const uint8_t* exceptions = nullptr;
  int32_t exception_count = 0;
  uint32_t bounds[2 * kWarpLanes + 1] = {};  // coded modes, as in StreamSet, ascending
};

// What the headers of coded and of weighted blocks have in common.
template <class Header>
const char* check_block_fields(const Header& h) {
  if (static_cast<int32_t>(h.mode) >= kNumBlockModes) return "unknown mode";
  if (static_cast<int32_t>(h.component) > 1) return "unknown component";
  if (h.tokens < 1 || h.tokens > kBlockTokens) return "tokens out of range";
  if (h.dims < 1 || h.dims > kSliceDims) return "channels out of range";
  return nullptr;
}
// The slice of a block but for its base and bounds.
template <class Header, class Layout>
void open_parts(const Header& h, const Layout& at, const uint8_t* bytes, OpenSlice* to) {
  OpenSlice& slice = *to;
  slice.mode = h.mode;
  slice.component = h.component;
  slice.tokens = h.tokens;
  slice.dims = h.dims;
  slice.streams_per_lane = h.streams_per_lane;
  slice.low_plane = bytes + at.low_plane;
  slice.payload = bytes + at.payload;
  slice.exceptions = bytes + at.exceptions;
  slice.exception_count = h.exceptions;
}

// Checks that zeros follow the exceptions up to the end of the block, and the last stream in its
// word. Null where they do.
const char* check_padding(const OpenSlice& slice, const uint8_t* end, const uint8_t* block_end);

// The codes of the slice; where something is wrong, some of them.
const char* decode_open_slice(const OpenSlice& slice, const SliceBooks& books,
                              const SliceCodes& out);

}  // namespace tierkv
