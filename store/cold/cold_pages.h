// A page of a store in its cold form: packed (store/cold/sequence_bytes.h), as it is or with its
// codes entropy coded. The bytes are those of docs/reference/format.md, "Store page"; this is the
// one place that knows them.
//
// Codes are coded as they lie in the page: the fields of 8, 4 or 2 bits of its tiles, lowest bits
// of a byte first, head_dim of them a row but at most 128, at most 64 rows a coded block
// (codec/format/coded_block.h). Nothing has to be found in a tile, a tile is a multiple of 16 rows,
// which need no padding, and a lookup decodes two or four fields at once.
#pragma once

#include <cstdint>
#include <vector>

#include "codec/format/codebook.h"
#include "codec/format/page_layout.h"
#include "tierkv/status.h"

namespace tierkv {

// How the codes of a page are stored; the values are those of the file format.
enum class PageCoder : int32_t { kNone = 0, kBlocks = 1 };

// Codebooks of keys and of values; null: the codes are stored as they are.
struct PageBooks {
  const Codebook* of[2] = {nullptr, nullptr};
};

// Whether a component has codes to code: raw values do not.
inline bool has_coded_fields(const PageLayout& layout, Component c) {
  return !layout.tile(c).type.is_raw();
}
// Adds the fields of one component of a packed page with `used` tokens.
void count_page_fields(const PageLayout& layout, const uint8_t* packed, int32_t used, Component c,
                       CodeHistogram* histogram);
CodeHistogram make_field_histogram(const PageLayout& layout, Component c);
// The codebook of fields of `bits` bits that were counted, of 256 symbols whatever the bits are:
// one, two or four fields. *payload_bytes: what their code words take.
Result<Codebook> build_field_codebook(const CodeHistogram& histogram, int32_t bits,
                                      int64_t* payload_bytes);

// Appends the cold form of a packed page with `used` tokens.
void encode_cold_page(const PageLayout& layout, const uint8_t* packed, int32_t used,
                      const PageBooks& books, std::vector<uint8_t>* out);
// The inverse: appends the packed page. kCorrupt: the payload is not of a page with `used` tokens;
// what was appended is then not defined.
Status decode_cold_page(const PageLayout& layout, const std::vector<uint8_t>& payload, int32_t used,
                        const PageBooks& books, std::vector<uint8_t>* packed);

}  // namespace tierkv
