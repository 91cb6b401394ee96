// SPDX-License-Identifier: Apache-2.0
// Rows and layers of a dump as chunks of a container.
#pragma once

#include "tierkv/container.h"
#include "tools/analysis/layer_data.h"
#include "tools/analysis/scheme/layer_scheme.h"

namespace tierkv::analysis {

// Bases of a layer: the sequence's own; a profile's, which serve every sequence and are written
// with the first; or a profile's that are written already.
enum class SharedBases { kOfSequence, kOfAll, kWritten };

// What the rows of a layer share: bases, codebooks, page formats.
void encode_shared(const Scheme& scheme, const LayerData& data, const LayerScheme& shared,
                   SharedBases bases, ChunkBlock* out);

// The row of a kv_head: its map, pages and segments. Its significance is added where
// `with_significance` asks for it and `data` holds it. Messages do not name the file or the layer.
Status encode_row(const Scheme& scheme, const LayerData& data, const LayerScheme& shared,
                  int32_t head, bool with_significance, ChunkBlock* out);

// What a later analysis of the decompressed dump needs besides keys and values.
void encode_queries(const LayerData& data, const CacheLayout& layout, ChunkBlock* out);

}  // namespace tierkv::analysis
