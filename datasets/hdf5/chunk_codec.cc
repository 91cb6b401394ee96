// SPDX-License-Identifier: Apache-2.0
#include "datasets/hdf5/chunk_codec.h"

#include <libdeflate.h>
#include <zstd.h>

#include <algorithm>
#include <memory>

namespace tierkv::datasets {
namespace {

Status corrupt(std::string message) {
  return Status(StatusCode::kCorrupt, std::move(message));
}

// Both decompressors return the number of bytes written, or -1 on damage or when `capacity` would
// be exceeded.
int64_t inflate_bytes(const std::vector<uint8_t>& in, uint8_t* out, int64_t capacity) {
  const std::unique_ptr<libdeflate_decompressor, decltype(&libdeflate_free_decompressor)> inflate(
      libdeflate_alloc_decompressor(), &libdeflate_free_decompressor);
  size_t size = 0;
  if (!inflate ||
      libdeflate_zlib_decompress(inflate.get(), in.data(), in.size(), out,
                                 static_cast<size_t>(capacity), &size) != LIBDEFLATE_SUCCESS) {
    return -1;
  }
  return static_cast<int64_t>(size);
}

int64_t unzstd_bytes(const std::vector<uint8_t>& in, uint8_t* out, int64_t capacity) {
  const size_t size = ZSTD_decompress(out, static_cast<size_t>(capacity), in.data(), in.size());
  return ZSTD_isError(size) ? -1 : static_cast<int64_t>(size);
}

Status decompress(Filter filter, int64_t capacity, std::vector<uint8_t>* data) {
  std::vector<uint8_t> out(capacity);
  const int64_t size = filter == Filter::kDeflate ? inflate_bytes(*data, out.data(), capacity)
                                                  : unzstd_bytes(*data, out.data(), capacity);
  if (size < 0) {
    return corrupt(std::string(filter == Filter::kDeflate ? "gzip" : "zstd") +
                   " data is damaged or longer than its chunk");
  }
  out.resize(size);
  *data = std::move(out);
  return Status::ok();
}

// Element i of planes [width, n], width known to the compiler so that it can interleave vectors.
template <size_t width>
void interleave(const uint8_t* planes, size_t n, uint8_t* out) {
  for (size_t i = 0; i < n; ++i) {
    for (size_t b = 0; b < width; ++b) out[i * width + b] = planes[b * n + i];
  }
}

// Byte b of element i is stored at b * n + i; bytes after the last whole element are not moved.
void unshuffle(int32_t element_bytes, std::vector<uint8_t>* data) {
  const size_t width = element_bytes, n = data->size() / width;
  std::vector<uint8_t> out(data->size());
  if (width == 2) {
    interleave<2>(data->data(), n, out.data());
  } else if (width == 4) {
    interleave<4>(data->data(), n, out.data());
  } else {
    for (size_t i = 0; i < n; ++i) {
      for (size_t b = 0; b < width; ++b) out[i * width + b] = (*data)[b * n + i];
    }
  }
  std::copy(data->begin() + static_cast<std::ptrdiff_t>(n * width), data->end(),
            out.begin() + static_cast<std::ptrdiff_t>(n * width));
  *data = std::move(out);
}

Status strip_fletcher32(std::vector<uint8_t>* data) {
  if (data->size() < 4) return corrupt("a chunk is too short for its checksum");
  const size_t n = data->size() - 4;
  uint32_t stored = 0;
  for (int b = 3; b >= 0; --b) stored = stored << 8 | (*data)[n + b];
  if (fletcher32(data->data(), n) != stored) return corrupt("a chunk's checksum does not match");
  data->resize(n);
  return Status::ok();
}

}  // namespace

bool is_known_filter(int64_t id) {
  return id == static_cast<int64_t>(Filter::kDeflate) ||
         id == static_cast<int64_t>(Filter::kShuffle) ||
         id == static_cast<int64_t>(Filter::kFletcher32) ||
         id == static_cast<int64_t>(Filter::kZstd);
}

uint32_t fletcher32(const uint8_t* data, size_t bytes) {
  uint32_t sum1 = 0, sum2 = 0;
  const auto fold = [](uint32_t s) { return (s & 0xffff) + (s >> 16); };
  for (size_t i = 0; i < bytes;) {
    // 360 words keep both sums below 2^32.
    const size_t end = std::min(bytes, i + 720);
    for (; i < end; i += 2) {
      sum1 += static_cast<uint32_t>(data[i]) << 8 | (i + 1 < bytes ? data[i + 1] : 0);
      sum2 += sum1;
    }
    sum1 = fold(sum1);
    sum2 = fold(sum2);
  }
  return fold(sum2) << 16 | fold(sum1);
}

Status decode_chunk(const ChunkPipeline& pipeline, uint32_t skipped, std::vector<uint8_t>* data) {
  for (size_t i = pipeline.filters.size(); i-- > 0;) {
    if (i < 32 && (skipped >> i & 1) != 0) continue;
    Status s;
    switch (pipeline.filters[i]) {
      case Filter::kDeflate:
      case Filter::kZstd:
        s = decompress(pipeline.filters[i], pipeline.max_stored_bytes(), data);
        break;
      case Filter::kShuffle:
        unshuffle(pipeline.element_bytes, data);
        break;
      case Filter::kFletcher32:
        s = strip_fletcher32(data);
        break;
    }
    if (!s) return s;
  }
  if (static_cast<int64_t>(data->size()) != pipeline.chunk_bytes) {
    return corrupt("a chunk decodes to " + std::to_string(data->size()) + " bytes, expected " +
                   std::to_string(pipeline.chunk_bytes));
  }
  return Status::ok();
}

}  // namespace tierkv::datasets
