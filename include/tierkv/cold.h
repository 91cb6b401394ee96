// The cold tier: a whole sequence of a store as the bytes of a `.tkv` container, page by page, to
// be kept in host memory, on a disk or elsewhere, and back.
//
//   Result<std::vector<uint8_t>> cold = save_sequence(*store, id);
//   store->release(id);
//   ...
//   Result<SequenceId> back = load_sequence(*store, cold->data(), cold->size());
//
// What comes back is the same state: tiers, pages, scores and window are what export_sequence()
// gives, byte for byte, and generation goes on as if the sequence had never left. Each page is a
// chunk with its actual length and a checksum (XXH3, 64 bits) and can be decoded with the
// sequence's own description alone (docs/reference/format.md, "Store page").
//
// Both calls go through export_sequence() and import_sequence(): they serve every back end, a
// device store through host memory, and every store of an equal config but for capacities, alphas
// and score_interval. A store with config().channel has no cold tier: kUnsupported.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tierkv/export.h"
#include "tierkv/status.h"
#include "tierkv/store.h"

namespace tierkv {

struct ColdOptions {
  // Huffman-codes the codes of tiered pages, with a codebook for each layer, tier and component
  // where that saves bytes: a few percent, as min-max codes fill their range (bench/REPORT.md).
  // Pages of a coded store are coded as they are.
  bool entropy_coded = false;
  int32_t threads = 1;  // at most so many work on the layers; the bytes do not depend on it
};

// The sequence must be past its prompt; it stays in the store. Equal states and entropy_coded give
// equal bytes. Statuses of export_sequence(); kInvalidArgument for threads below 1.
TKV_API Result<std::vector<uint8_t>> save_sequence(KvStore& store, SequenceId sequence,
                                                   const ColdOptions& options = {});

// Trusts nothing: bytes with any damage are refused, with the chunk's name, and the store is then
// as it was. Statuses of ContainerReader::open() and import_sequence(); kInvalidArgument also for a
// container of anything else.
TKV_API Result<SequenceId> load_sequence(KvStore& store, const uint8_t* bytes, size_t size,
                                         int32_t threads = 1);

}  // namespace tierkv
