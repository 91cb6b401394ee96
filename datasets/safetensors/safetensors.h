// SPDX-License-Identifier: Apache-2.0
// safetensors: tensors in a file behind a JSON header, without code and without surprises; the safe
// way to take caches from strangers.
//
// The format, and what its reference implementation refuses: eight bytes with the header's length N
// (little-endian, at most 100 million), N bytes of JSON beginning with '{', then the data. Every
// tensor has a dtype, a shape and the offsets [begin, end) of its bytes in the data; sorted by them
// the tensors fill the data without overlap or hole, and shape times size of the type is their
// length. Refused beyond that: keys that are given twice or unknown, which readers would disagree
// about.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv::datasets {

inline constexpr uint64_t kMaxSafetensorsHeader = 100'000'000;

struct TensorInfo {
  std::string name;
  std::string dtype;  // as in the file: "F16", "BF16", "F32", "I32", ...
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes, counted from the start of the data

  uint64_t bytes() const { return end - begin; }
};

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;              // by place in the data
  std::map<std::string, std::string> metadata;  // "__metadata__"
  uint64_t data_start = 0;                      // byte of the file
};

// Bits of an element of a safetensors dtype, 0 for an unknown one.
int32_t safetensors_bits(const std::string& dtype);
const char* safetensors_name(DType t);  // "F16", "BF16", "F32"

// json [json_bytes]: the header; data_bytes: what follows it in the file. kCorrupt with what is
// wrong, naming the tensor.
Result<SafetensorsHeader> parse_safetensors_header(const char* json, size_t json_bytes,
                                                   uint64_t data_bytes);

class SafetensorsReader {
 public:
  static Result<SafetensorsReader> open(const std::string& path);
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;
  ~SafetensorsReader();

  const std::string& path() const;
  const SafetensorsHeader& header() const;
  // Bytes [offset, offset + count) of a tensor's data. kInvalidArgument outside of it, kIo.
  Status read(const TensorInfo& tensor, uint64_t offset, uint64_t count, void* out) const;

 private:
  struct Impl;
  explicit SafetensorsReader(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

// Writes under a temporary name and renames in finish().
class SafetensorsWriter {
 public:
  // Name, dtype and shape of the tensors are given; their places are chosen: types of more bytes
  // first, so that every tensor is aligned, else in the order given. kInvalidArgument for unknown
  // dtypes, negative extents, names that repeat or are "__metadata__".
  static Result<SafetensorsWriter> create(const std::string& path, std::vector<TensorInfo> tensors,
                                          const std::map<std::string, std::string>& metadata);
  SafetensorsWriter(SafetensorsWriter&&) noexcept;
  SafetensorsWriter& operator=(SafetensorsWriter&&) noexcept;
  ~SafetensorsWriter();

  // The next `count` bytes of the tensor `name`, whose parts come in order; tensors in any order.
  Status append(const std::string& name, const void* bytes, uint64_t count);
  // kInvalidArgument where a tensor is incomplete; kIo without `overwrite` where a file stands at
  // the path when finish() is called.
  Status finish(bool overwrite = true);

 private:
  struct Impl;
  explicit SafetensorsWriter(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace tierkv::datasets
