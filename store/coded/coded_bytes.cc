#include "store/coded/coded_bytes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "codec/file/container_format.h"
#include "codec/format/byte_cursor.h"
#include "store/coded/coded_fixed.h"
#include "store/coded/coded_values.h"

namespace tierkv {
namespace {

constexpr uint32_t kMagic = 0x51455343;  // "CSEQ"
// Of a store with fixed-rate blocks, and of one without.
constexpr uint32_t kFixedExportVersion = 2, kCodedExportVersion = 1;

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

void put_checksum(size_t first, std::vector<uint8_t>* out) {
  const uint64_t sum = xxh3(out->data() + first, out->size() - first);
  ByteWriter(out).u64(sum);
}
// The bytes from `first` up to where the reader stands are followed by their checksum.
bool checksum_holds(const uint8_t* first, const uint8_t* end, ByteReader* reader) {
  const uint64_t sum = reader->u64();
  return reader->ok() && sum == xxh3(first, static_cast<size_t>(end - first));
}

// All that must agree between the stores: not capacities, nor where codebooks come from, nor which
// blocks are kept at a fixed rate.
std::vector<uint8_t> config_bytes(const KvStoreConfig& config, uint32_t version) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  const CacheLayout& layout = config.layout;
  for (const int32_t x :
       {layout.num_layers, layout.num_q_heads, layout.num_kv_heads, layout.head_dim,
        static_cast<int32_t>(layout.dtype), static_cast<int32_t>(layout.rope_applied)}) {
    w.i32(x);
  }
  w.f64(layout.rope_theta);
  w.f64(layout.sm_scale);
  w.i32(config.policy.window_tokens);
  w.i32(static_cast<int32_t>(config.coded.means));
  if (version == kCodedExportVersion) return out;
  w.i32(config.coded.fixed_format.k.type.bits());
  w.i32(config.coded.fixed_format.v.type.bits());
  return out;
}

bool same_bytes(ByteReader* reader, const std::vector<uint8_t>& expected) {
  const uint8_t* found = reader->take(expected.size());
  return found != nullptr && std::equal(expected.begin(), expected.end(), found);
}

Result<CodedBooks> read_books(const KvStoreConfig& config, ByteReader* reader) {
  std::vector<std::vector<Codebook>> lists;
  const uint32_t ready = reader->u32();
  for (int32_t i = 0; ready == 1 && i < 2 * config.layout.num_layers; ++i) {
    const uint32_t count = reader->u32();
    if (!reader->ok() || count < 1 || count > 256) return corrupt("codebooks of a layer");
    std::vector<Codebook> list;
    for (uint32_t j = 0; j < count; ++j) {
      const uint32_t size = reader->u32();
      const uint8_t* bytes = reader->take(size);
      if (bytes == nullptr) return corrupt("a codebook is cut off");
      Result<Codebook> book = parse_codebook(bytes, size);
      if (!book) return book.status();
      if (static_cast<int32_t>(book->component) != i % 2) return corrupt("component of a codebook");
      list.push_back(std::move(*book));
    }
    lists.push_back(std::move(list));
  }
  if (!reader->ok() || ready > 1) return corrupt("codebooks");
  return CodedBooks::of_lists(std::move(lists));
}

// One component of a row behind its means: blocks, then raw values.
Status split_component(const KvStoreConfig& config, const SequenceInfo& info, size_t component,
                       ByteReader* reader, CodedRowContent* row) {
  for (int32_t b = 0; b < info.window_first / kBlockTokens; ++b) {
    const uint64_t size = uint64_t{reader->u32()} * kBlockAlignment;
    const uint8_t* bytes = reader->take(size);
    if (bytes == nullptr) return corrupt("a block is cut off");
    row->blocks[component].emplace_back(bytes, bytes + size);
  }
  const int64_t raw = int64_t{info.num_tokens - info.window_first} * config.layout.head_dim;
  for (int64_t j = 0; j < raw && reader->ok(); ++j) row->raw[component].push_back(reader->u16());
  return reader->ok() ? Status::ok() : corrupt("a row is cut off");
}

// Decodes one component of row `within` and looks at every value.
Status read_component(const KvStoreConfig& config, const CodedSequenceContent& sequence,
                      int32_t within, Component c, ImportedCodedRow* out) {
  const int32_t dim = config.layout.head_dim, i = static_cast<int32_t>(c);
  const CodedRowContent& row = sequence.rows[within];
  const float step = row.steps[i];
  std::vector<int16_t> codes(static_cast<size_t>(kBlockTokens) * dim);
  std::vector<uint16_t> y(codes.size());
  for (const std::vector<uint8_t>& block : row.blocks[i]) {
    const auto size = static_cast<int64_t>(block.size());
    out->fixed[i].emplace_back();
    if (sequence.fixed && size >= kCodedBlockHeaderBytes && is_fixed_block(block.data())) {
      const int32_t bits = config.coded.fixed_format.of(c).type.bits();
      if (Status s = decode_fixed_block(block.data(), size, dim, c, bits, y.data()); !s) return s;
      out->fixed[i].back() = block;
      out->codes[i].resize(out->codes[i].size() + codes.size());
      continue;
    }
    if (Status s = sequence.books.decode(block.data(), size, dim,
                                         within / config.layout.num_kv_heads, c, codes.data());
        !s) {
      return s;
    }
    // Truncate may make them raw values, which a step codes again.
    for (const int16_t code : codes) {
      if (check_centred(coded_value(code, step), step) != StatusCode::kOk) return corrupt("a code");
    }
    out->codes[i].insert(out->codes[i].end(), codes.begin(), codes.end());
  }
  for (const uint16_t x : row.raw[i]) {
    if (check_centred(x, step) != StatusCode::kOk) return corrupt("a raw value");
  }
  out->raw[i] = row.raw[i];
  return Status::ok();
}

}  // namespace

Status check_coded_info(const KvStoreConfig& config, const SequenceInfo& info) {
  if (info.num_tokens < 0) return corrupt("tokens");
  if (info.num_tokens > config.max_tokens) {
    return Status(StatusCode::kOutOfRange, "the sequence exceeds max_tokens");
  }
  const bool possible =
      info.window_first >= 0 && info.window_first <= info.num_tokens &&
      info.window_first % kBlockTokens == 0 &&
      info.num_tokens - info.window_first < config.policy.window_tokens + kBlockTokens &&
      info.prompt_tokens >= 0 && info.prompt_tokens <= info.num_tokens;
  return possible ? Status::ok() : corrupt("the window is not where it can be");
}

std::vector<uint8_t> export_coded_header(const KvStoreConfig& config, const CodedBooks& books,
                                         const SequenceInfo& info) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  const uint32_t version = config.coded.fixed_blocks ? kFixedExportVersion : kCodedExportVersion;
  w.u32(kMagic);
  w.u32(version);
  const std::vector<uint8_t> same = config_bytes(config, version);
  out.insert(out.end(), same.begin(), same.end());
  for (const int32_t x : {info.num_tokens, info.window_first, info.prompt_tokens}) w.i32(x);
  w.u32(books.ready() ? 1 : 0);
  for (int32_t i = 0; books.ready() && i < 2 * config.layout.num_layers; ++i) {
    const std::vector<Codebook>& list = books.of(i / 2, static_cast<Component>(i % 2));
    w.u32(static_cast<uint32_t>(list.size()));
    for (const Codebook& book : list) {
      w.u32(static_cast<uint32_t>(codebook_bytes(book)));
      serialize_codebook(book, &out);
    }
  }
  put_checksum(0, &out);
  return out;
}

Status check_coded_steps(const KvStoreConfig& config, int32_t within, const float (&steps)[2]) {
  for (const float step : steps) {
    if (!(step > 0 && step <= 2 * kMaxHalf)) return corrupt("a step");
  }
  const CodedConfig& coded = config.coded;
  if (coded.steps == StepSource::kPrompt ||
      (steps[0] == coded.key_steps[within] && steps[1] == coded.value_steps[within])) {
    return Status::ok();
  }
  return Status(StatusCode::kInvalidArgument, "the sequence has other steps");
}

void export_coded_row(const CodedRowContent& row, std::vector<uint8_t>* out) {
  const size_t first = out->size();
  ByteWriter w(out);
  for (const float step : row.steps) w.f32(step);
  for (const std::vector<float>& means : row.means) {
    for (const float mean : means) w.u16(float_to_half(mean));
  }
  for (int32_t i = 0; i < 2; ++i) {
    for (const std::vector<uint8_t>& block : row.blocks[i]) {
      w.u32(static_cast<uint32_t>(block.size() / kBlockAlignment));
      out->insert(out->end(), block.begin(), block.end());
    }
    for (const uint16_t x : row.raw[i]) w.u16(x);
  }
  put_checksum(first, out);
}

Result<CodedSequenceContent> split_coded_sequence(const KvStoreConfig& config, const uint8_t* bytes,
                                                  size_t size) {
  if (bytes == nullptr && size > 0) return Status(StatusCode::kInvalidArgument, "bytes is null");
  ByteReader reader(bytes, size);
  if (reader.u32() != kMagic) return corrupt("not an exported coded sequence");
  const uint32_t version = reader.u32();
  if (!reader.ok()) return corrupt("the header is cut off");
  if (version != kCodedExportVersion && version != kFixedExportVersion) {
    return Status(StatusCode::kVersion, "coded sequence of version " + std::to_string(version));
  }
  CodedSequenceContent sequence;
  sequence.fixed = version == kFixedExportVersion;
  if (sequence.fixed && !config.coded.fixed_blocks) {
    return Status(StatusCode::kInvalidArgument,
                  "the sequence is of a store with fixed-rate blocks");
  }
  if (!same_bytes(&reader, config_bytes(config, version))) {
    return reader.ok() ? Status(StatusCode::kInvalidArgument, "the sequence is of another config")
                       : corrupt("the header is cut off");
  }
  sequence.info.num_tokens = reader.i32();
  sequence.info.window_first = reader.i32();
  sequence.info.prompt_tokens = reader.i32();
  sequence.info.window_origin = 0;
  Result<CodedBooks> books = read_books(config, &reader);
  if (!books) return books.status();
  sequence.books = std::move(*books);
  const auto here = [&] { return bytes + (size - reader.left()); };
  if (!checksum_holds(bytes, here(), &reader)) return corrupt("checksum of the header");
  if (Status s = check_coded_info(config, sequence.info); !s) return s;
  if (sequence.info.window_first > 0 && !sequence.books.ready()) return corrupt("no codebooks");
  const int32_t rows = config.layout.num_layers * config.layout.num_kv_heads;
  for (int32_t w = 0; w < rows; ++w) {
    const uint8_t* first = here();
    CodedRowContent row;
    for (float& step : row.steps) step = reader.f32();
    if (!reader.ok()) return corrupt("a row is cut off");
    if (Status s = check_coded_steps(config, w, row.steps); !s) return s;
    for (std::vector<float>& means : row.means) {
      for (int32_t d = 0; d < config.layout.head_dim; ++d) {
        means.push_back(half_to_float(reader.u16()));
        if (!is_finite(means.back())) return corrupt("a mean");
      }
    }
    for (size_t i = 0; i < 2; ++i) {
      if (Status s = split_component(config, sequence.info, i, &reader, &row); !s) return s;
    }
    if (!checksum_holds(first, here(), &reader)) return corrupt("checksum of a row");
    sequence.rows.push_back(std::move(row));
  }
  if (!reader.at_end()) return corrupt("bytes behind the last row");
  return sequence;
}

Result<ImportedCodedSequence> read_coded_sequence(const KvStoreConfig& config, const uint8_t* bytes,
                                                  size_t size) {
  Result<CodedSequenceContent> content = split_coded_sequence(config, bytes, size);
  if (!content) return content.status();
  ImportedCodedSequence sequence;
  sequence.info = content->info;
  for (size_t w = 0; w < content->rows.size(); ++w) {
    ImportedCodedRow row;
    std::copy_n(content->rows[w].steps, 2, row.steps);
    for (const Component c : {Component::kKey, Component::kValue}) {
      row.means[static_cast<size_t>(c)] = content->rows[w].means[static_cast<size_t>(c)];
      if (Status s = read_component(config, *content, static_cast<int32_t>(w), c, &row); !s) {
        return s;
      }
    }
    for (size_t b = 0; b < row.fixed[0].size(); ++b) {
      if (row.fixed[0][b].empty() != row.fixed[1][b].empty()) {
        return corrupt("a block is at a fixed rate in one of keys and values");
      }
    }
    sequence.rows.push_back(std::move(row));
  }
  sequence.books = std::move(content->books);
  return sequence;
}

}  // namespace tierkv
