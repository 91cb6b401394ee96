// SPDX-License-Identifier: Apache-2.0
// Codebooks and entropy-coded blocks.
#include "codec/host/coded/coded_block.h"

#include "capi/abi.h"
#include "capi/buffer.h"
#include "capi/codebook.h"
#include "tierkv/layout.h"

namespace tierkv::capi {
namespace {

Status build(const tkv_codebook_spec* spec, const int16_t* codes, int64_t tokens,
             tkv_codebook** out) {
  tkv_codebook_spec s;
  if (Status status = read_struct(spec, "spec", &s); !status) return status;
  if (out == nullptr || (codes == nullptr && tokens > 0))
    return invalid("codes or codebook is null");
  if (s.component != TKV_KEY && s.component != TKV_VALUE) return invalid("component is unknown");
  if (s.head_dim < 1 || s.head_dim > kMaxHeadDim) return invalid("head_dim must be 1 to 4096");
  if (tokens < 0) return invalid("tokens is negative");
  CodeHistogram histogram(static_cast<Component>(s.component), s.head_dim);
  histogram.add(codes, tokens);
  CodebookSpec book_spec;
  if (s.max_length != 0) book_spec.max_length = s.max_length;
  if (s.streams_per_lane != 0) book_spec.streams_per_lane = s.streams_per_lane;
  Result<Codebook> book = build_codebook(histogram, book_spec);
  if (book) *out = new tkv_codebook{std::move(*book)};
  return book.status();
}

Status parse(const uint8_t* bytes, size_t size, tkv_codebook** out) {
  if (out == nullptr || bytes == nullptr) return invalid("bytes or codebook is null");
  if (size > (size_t{1} << 20)) return invalid("no codebook has that many bytes");
  Result<Codebook> book = parse_codebook(bytes, static_cast<int64_t>(size));
  if (book) *out = new tkv_codebook{std::move(*book)};
  return book.status();
}

Status read_shape(const tkv_block_shape* in, tkv_block_shape* out) {
  if (Status s = read_struct(in, "shape", out); !s) return s;
  if (out->tokens < 1 || out->tokens > kBlockTokens) return invalid("tokens must be 1 to 64");
  if (out->head_dim < 1 || out->head_dim > kMaxHeadDim)
    return invalid("head_dim must be 1 to 4096");
  return Status::ok();
}

Status encode(const tkv_codebook* codebook, const tkv_block_shape* shape, const int16_t* codes,
              tkv_buffer* out) {
  tkv_block_shape b;
  if (Status s = read_shape(shape, &b); !s) return s;
  if (codebook == nullptr || codes == nullptr) return invalid("codebook or codes is null");
  std::vector<uint8_t> bytes;
  if (Status s = encode_block({codes, nullptr, b.tokens, b.head_dim}, {&codebook->book, 1}, nullptr,
                              &bytes);
      !s) {
    return s;
  }
  return fill(bytes, out);
}

Status decode(const tkv_codebook* codebook, const tkv_block_shape* shape, const tkv_buffer* in,
              int16_t* codes) {
  tkv_block_shape b;
  tkv_buffer bytes;
  if (Status s = read_shape(shape, &b); !s) return s;
  if (codebook == nullptr || codes == nullptr) return invalid("codebook or codes is null");
  if (Status s = read_struct(in, "buffer", &bytes); !s) return s;
  if (bytes.data == nullptr && bytes.size > 0) return invalid("buffer: data is null");
  return decode_block(bytes.data, static_cast<int64_t>(bytes.size), {&codebook->book, 1},
                      {codes, nullptr, b.tokens, b.head_dim});
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;

extern "C" {

tkv_status tkv_codebook_build(const tkv_codebook_spec* spec, const int16_t* codes, int64_t tokens,
                              tkv_codebook** codebook, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::build(spec, codes, tokens, codebook); });
}

tkv_status tkv_codebook_parse(const uint8_t* bytes, size_t size, tkv_codebook** codebook,
                              tkv_error* error) {
  return capi::guarded(error, [&] { return capi::parse(bytes, size, codebook); });
}

tkv_status tkv_codebook_serialize(const tkv_codebook* codebook, tkv_buffer* out, tkv_error* error) {
  return capi::guarded(error, [&]() -> tierkv::Status {
    if (codebook == nullptr) return capi::invalid("codebook is null");
    std::vector<uint8_t> bytes;
    tierkv::serialize_codebook(codebook->book, &bytes);
    return capi::fill(bytes, out);
  });
}

void tkv_codebook_destroy(tkv_codebook* codebook) {
  delete codebook;
}

size_t tkv_block_max_bytes(int32_t head_dim) {
  if (head_dim < 1 || head_dim > tierkv::kMaxHeadDim) return 0;
  return static_cast<size_t>(tierkv::slice_count(head_dim)) * tierkv::kMaxCodedBlockBytes;
}

tkv_status tkv_block_encode(const tkv_codebook* codebook, const tkv_block_shape* shape,
                            const int16_t* codes, tkv_buffer* out, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::encode(codebook, shape, codes, out); });
}

tkv_status tkv_block_decode(const tkv_codebook* codebook, const tkv_block_shape* shape,
                            const tkv_buffer* in, int16_t* codes, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::decode(codebook, shape, in, codes); });
}

}  // extern "C"
