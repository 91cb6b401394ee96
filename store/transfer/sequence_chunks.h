// SPDX-License-Identifier: Apache-2.0
// A sequence as the chunks of a container (tierkv/container.h): the one form in which sequences
// leave a store and come in, to another store or from the cold tier. store/ENGINE.md, "Exported
// sequences", has the bytes.
#pragma once

#include <cstdint>
#include <vector>

#include "store/place/place.h"
#include "tierkv/kv_store.h"
#include "tierkv/status.h"

namespace tierkv::store {

// kBufferTooSmall where the target gives no memory. Where source.write() fails, its status.
// The target then has no header, so that nobody takes it for a sequence.
Status write_sequence(const StoreConfig& config, const std::vector<uint8_t>& identity,
                      const SequenceSource& source, const ExportTarget& target);
// Parts are views of the bytes, whose checksums the parts' verify() looks at. The counts are
// possible and every part is there. kCorrupt, kVersion; kInvalidArgument for a sequence of another
// layout, format or profile; kOutOfRange for more than max_tokens.
Result<SequenceParts> read_sequence(const StoreConfig& config, const TokenLaws& laws,
                                    const std::vector<uint8_t>& identity, const uint8_t* bytes,
                                    size_t size);

}  // namespace tierkv::store
