#include "store/coded/coded_books.h"

#include "codec/format/coded_block.h"
#include "store/coded/coded_shape.h"

namespace tierkv {
namespace {

std::vector<uint8_t> bytes_of(const Codebook& book) {
  std::vector<uint8_t> bytes;
  serialize_codebook(book, &bytes);
  return bytes;
}

// Which codebook the first slice that is not raw names; 0 where none does: the decoder then says
// what is wrong.
size_t book_of(const uint8_t* bytes, int64_t size, const std::vector<Codebook>& list) {
  for (int64_t at = 0; size - at >= kCodedBlockHeaderBytes;) {
    const CodedBlockHeader header = load_header(bytes + at);
    if (is_raw_mode(header.mode) && header.units > 0) {
      at += int64_t{header.units} * kBlockAlignment;
      continue;
    }
    for (size_t i = 0; i < list.size(); ++i) {
      if (list[i].table_id == header.table_id) return i;
    }
    return 0;
  }
  return 0;
}

}  // namespace

CodedBooks CodedBooks::of_config(const KvStoreConfig& config) {
  CodedBooks books;
  if (config.coded.codebooks != CodebookSource::kGiven) return books;
  std::vector<Codebook> family[2];
  for (const std::vector<uint8_t>& bytes : config.coded.given) {
    Result<Codebook> book = parse_codebook(bytes.data(), static_cast<int64_t>(bytes.size()));
    if (book) family[static_cast<size_t>(book->component)].push_back(std::move(*book));
  }
  for (int32_t layer = 0; layer < config.layout.num_layers; ++layer) {
    for (const auto& list : family) books.lists_.push_back(list);
  }
  books.shared_ = true;
  return books;
}

Result<CodedBooks> CodedBooks::of_histograms(const KvStoreConfig& config,
                                             const std::vector<CodeHistogram>& histograms) {
  CodebookSpec spec;
  spec.mode = BlockMode::kPair;  // what attention decodes
  spec.max_length = config.coded.max_length;
  spec.streams_per_lane = config.coded.streams_per_lane;
  CodedBooks books;
  for (const CodeHistogram& histogram : histograms) {
    Result<Codebook> book = build_codebook(histogram, spec);
    if (!book) return book.status();
    books.lists_.push_back({std::move(*book)});
  }
  return books;
}

CodedBooks CodedBooks::of_lists(std::vector<std::vector<Codebook>> lists) {
  CodedBooks books;
  books.lists_ = std::move(lists);
  return books;
}

int64_t CodedBooks::stored_bytes() const {
  int64_t bytes = 0;
  const size_t lists = shared_ ? 2 : lists_.size();
  for (size_t i = 0; i < lists && i < lists_.size(); ++i) {
    for (const Codebook& book : lists_[i]) bytes += codebook_bytes(book);
  }
  return bytes;
}

void CodedBooks::encode(const int16_t* codes, int32_t head_dim, int32_t layer, Component c,
                        std::vector<uint8_t>* out) const {
  std::vector<uint8_t> best, next;
  for (const Codebook& book : of(layer, c)) {
    next.clear();
    (void)encode_block(codes, kBlockTokens, head_dim, book, &next,
                       most_coded_block_bytes(head_dim));
    if (best.empty() || next.size() < best.size()) best.swap(next);
  }
  out->insert(out->end(), best.begin(), best.end());
}

Status CodedBooks::decode(const uint8_t* bytes, int64_t size, int32_t head_dim, int32_t layer,
                          Component c, int16_t* codes) const {
  const std::vector<Codebook>& list = of(layer, c);
  return decode_block(bytes, size, kBlockTokens, head_dim, list[book_of(bytes, size, list)], codes);
}

bool operator==(const CodedBooks& a, const CodedBooks& b) {
  if (a.lists_.size() != b.lists_.size()) return false;
  for (size_t i = 0; i < a.lists_.size(); ++i) {
    if (a.lists_[i].size() != b.lists_[i].size()) return false;
    for (size_t j = 0; j < a.lists_[i].size(); ++j) {
      if (bytes_of(a.lists_[i][j]) != bytes_of(b.lists_[i][j])) return false;
    }
  }
  return true;
}

}  // namespace tierkv
