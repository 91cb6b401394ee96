// Sequences of coded stores: a page of the cold form is the block of 64 tokens of a row, keys and
// values, or as many raw tokens.
#include <algorithm>
#include <string>
#include <utility>

#include "codec/format/byte_cursor.h"
#include "codec/host/parallel.h"
#include "store/coded/coded_bytes.h"
#include "store/cold/cold_format.h"

namespace tierkv {
namespace {

constexpr int32_t kMaxFamily = 256;  // table ids

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

int32_t raw_pages(const SequenceInfo& info) {
  return pages_for(CodedView::raw_tokens(info), kBlockTokens);
}
// Tokens of raw page i.
int32_t raw_page_tokens(const SequenceInfo& info, int32_t i) {
  return smaller_of(kBlockTokens, CodedView::raw_tokens(info) - i * kBlockTokens);
}

std::vector<uint8_t> row_payload(const CodedRowContent& row) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  for (const float step : row.steps) w.f32(step);
  for (const std::vector<float>& means : row.means) {
    for (const float mean : means) w.u16(float_to_half(mean));
  }
  return out;
}

std::vector<uint8_t> block_payload(const CodedRowContent& row, int32_t block) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  for (const auto& blocks : row.blocks) w.u32(static_cast<uint32_t>(blocks[block].size()));
  w.u64(0);
  for (const auto& blocks : row.blocks) {
    out.insert(out.end(), blocks[block].begin(), blocks[block].end());
  }
  return out;
}

std::vector<uint8_t> raw_payload(const CodedRowContent& row, int32_t page, int32_t tokens,
                                 int32_t head_dim) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  for (const std::vector<uint16_t>& raw : row.raw) {
    const uint16_t* x = raw.data() + int64_t{page} * kBlockTokens * head_dim;
    for (int32_t i = 0; i < tokens * head_dim; ++i) w.u16(x[i]);
  }
  return out;
}

void add_layer(const KvStoreConfig& config, const CodedSequenceContent& content, int32_t layer,
               ChunkBlock* out) {
  for (uint8_t c = 0; c < 2 && content.books.ready(); ++c) {
    int32_t number = 0;
    for (const Codebook& book : content.books.of(layer, static_cast<Component>(c))) {
      std::vector<uint8_t> bytes;
      serialize_codebook(book, &bytes);
      out->add(cold_book_key(layer, c, kHighPart, number++), bytes);
    }
  }
  const SequenceInfo& info = content.info;
  for (int32_t h = 0; h < config.layout.num_kv_heads; ++h) {
    const int32_t within = layer * config.layout.num_kv_heads + h;
    const CodedRowContent& row = content.rows[within];
    const ChunkKey key = cold_row_key(layer, h);
    out->add(key, row_payload(row));
    for (int32_t b = 0; b < info.window_first / kBlockTokens; ++b) {
      out->add(cold_page_key(key, kHighPart, b), block_payload(row, b));
    }
    for (int32_t i = 0; i < raw_pages(info); ++i) {
      out->add(cold_page_key(key, kWindowPart, i),
               raw_payload(row, i, raw_page_tokens(info, i), config.layout.head_dim));
    }
  }
}

Status read_books(int32_t layer, Component c, ColdChunks* chunks, std::vector<Codebook>* list) {
  std::vector<uint8_t> bytes;
  for (int32_t number = 0; number < kMaxFamily; ++number) {
    const ChunkKey key = cold_book_key(layer, static_cast<uint8_t>(c), kHighPart, number);
    if (number > 0 && !chunks->has(key)) break;
    if (Status s = chunks->read(key, &bytes); !s) return s;
    Result<Codebook> book = parse_codebook(bytes.data(), static_cast<int64_t>(bytes.size()));
    if (!book) return chunks->at(key, book.status());
    if (book->component != c) return chunks->at(key, corrupt("is of the other component"));
    list->push_back(std::move(*book));
  }
  return Status::ok();
}

Status parse_row(const KvStoreConfig& config, int32_t within, const std::vector<uint8_t>& payload,
                 CodedRowContent* row) {
  ByteReader r(payload);
  for (float& step : row->steps) step = r.f32();
  for (std::vector<float>& means : row->means) {
    for (int32_t d = 0; d < config.layout.head_dim; ++d) means.push_back(half_to_float(r.u16()));
  }
  if (!r.at_end()) return corrupt("size disagrees with its fields");
  return check_coded_steps(config, within, row->steps);
}

Status parse_blocks(const std::vector<uint8_t>& payload, CodedRowContent* row) {
  ByteReader r(payload);
  const uint32_t bytes[2] = {r.u32(), r.u32()};
  const bool reserved_clear = r.u64() == 0;
  for (int32_t i = 0; i < 2; ++i) {
    const uint8_t* block = r.take(bytes[i]);
    if (block == nullptr || bytes[i] % kBlockAlignment != 0) return corrupt("sizes of its blocks");
    row->blocks[i].emplace_back(block, block + bytes[i]);
  }
  return r.at_end() && reserved_clear ? Status::ok() : corrupt("size disagrees with its fields");
}

Status parse_raw(const std::vector<uint8_t>& payload, int32_t values, CodedRowContent* row) {
  if (payload.size() != static_cast<size_t>(values) * 4) return corrupt("size of its values");
  ByteReader r(payload);
  for (std::vector<uint16_t>& raw : row->raw) {
    for (int32_t i = 0; i < values; ++i) raw.push_back(r.u16());
  }
  return Status::ok();
}

// Appends a row as an export has it.
Status read_row(const KvStoreConfig& config, const SequenceInfo& info, int32_t within,
                ColdChunks* chunks, std::vector<uint8_t>* out) {
  const int32_t heads = config.layout.num_kv_heads, dim = config.layout.head_dim;
  const ChunkKey key = cold_row_key(within / heads, within % heads);
  CodedRowContent row;
  std::vector<uint8_t> payload;
  if (Status s = chunks->read(key, &payload); !s) return s;
  if (Status s = parse_row(config, within, payload, &row); !s) return chunks->at(key, s);
  for (int32_t b = 0; b < info.window_first / kBlockTokens; ++b) {
    const ChunkKey page = cold_page_key(key, kHighPart, b);
    if (Status s = chunks->read(page, &payload); !s) return s;
    if (Status s = parse_blocks(payload, &row); !s) return chunks->at(page, s);
  }
  for (int32_t i = 0; i < raw_pages(info); ++i) {
    const ChunkKey page = cold_page_key(key, kWindowPart, i);
    if (Status s = chunks->read(page, &payload); !s) return s;
    if (Status s = parse_raw(payload, raw_page_tokens(info, i) * dim, &row); !s) {
      return chunks->at(page, s);
    }
  }
  export_coded_row(row, out);
  return Status::ok();
}

Status first_failure(const std::vector<Status>& all) {
  const auto failed = std::find_if(all.begin(), all.end(), [](const Status& s) { return !s; });
  return failed == all.end() ? Status::ok() : *failed;
}

}  // namespace

Result<std::vector<ChunkBlock>> cold_coded_chunks(const KvStoreConfig& config,
                                                  const std::vector<uint8_t>& exported,
                                                  const ColdOptions& options,
                                                  ColdSequence* sequence) {
  const Result<CodedSequenceContent> content =
      split_coded_sequence(config, exported.data(), exported.size());
  if (!content) return content.status();
  sequence->info = content->info;
  sequence->has_codebooks = content->books.ready();
  std::vector<ChunkBlock> blocks(config.layout.num_layers);
  parallel_for(config.layout.num_layers, options.threads, [&](int64_t layer) {
    add_layer(config, *content, static_cast<int32_t>(layer), &blocks[layer]);
  });
  return blocks;
}

Result<std::vector<uint8_t>> exported_coded_sequence(const KvStoreConfig& config,
                                                     const ColdSequence& sequence, int32_t threads,
                                                     ColdChunks* chunks) {
  const SequenceInfo& info = sequence.info;
  Status checked = check_coded_info(config, info);
  if (checked && info.window_origin != 0) checked = corrupt("the window is not where it can be");
  if (!checked) return chunks->at(cold_store_key(), checked);
  std::vector<std::vector<Codebook>> lists;
  for (int32_t i = 0; i < 2 * config.layout.num_layers && sequence.has_codebooks; ++i) {
    lists.emplace_back();
    const Status s = read_books(i / 2, static_cast<Component>(i % 2), chunks, &lists.back());
    if (!s) return s;
  }
  const int32_t heads = config.layout.num_kv_heads, layers = config.layout.num_layers;
  std::vector<std::vector<uint8_t>> rows(layers);
  std::vector<Status> status(layers);
  parallel_for(layers, threads, [&](int64_t layer) {
    for (int32_t h = 0; h < heads && status[layer]; ++h) {
      status[layer] =
          read_row(config, info, static_cast<int32_t>(layer) * heads + h, chunks, &rows[layer]);
    }
  });
  if (Status s = first_failure(status); !s) return s;
  KvStoreConfig source = config;
  source.coded.fixed_blocks = sequence.has_fixed;  // says which version the header is of
  std::vector<uint8_t> bytes =
      export_coded_header(source, CodedBooks::of_lists(std::move(lists)), info);
  for (const std::vector<uint8_t>& layer : rows) {
    bytes.insert(bytes.end(), layer.begin(), layer.end());
  }
  return bytes;
}

}  // namespace tierkv
