// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "datasets/hdf5/hdf5_util.h"
#include "datasets/safetensors/safetensors.h"

namespace tierkv::datasets {
namespace {

Status corrupt(const std::string& message) {
  return Status(StatusCode::kCorrupt, message);
}

// Takes the header's only possible structure out of JSON events; everything else stops the parser.
class HeaderParser {
 public:
  using number_integer_t = nlohmann::json::number_integer_t;
  using number_unsigned_t = nlohmann::json::number_unsigned_t;
  using number_float_t = nlohmann::json::number_float_t;
  using string_t = nlohmann::json::string_t;
  using binary_t = nlohmann::json::binary_t;

  SafetensorsHeader header;
  Status status;  // of the first failure

  bool null() { return unexpected("null"); }
  bool boolean(bool) { return unexpected("true or false"); }
  bool number_integer(number_integer_t) { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) {
    return unexpected("a number that is no integer, or too large");
  }
  bool binary(binary_t&) { return unexpected("bytes"); }
  bool number_unsigned(number_unsigned_t x) {
    if (place_ != Place::kShape && place_ != Place::kOffsets) return unexpected("a number");
    if (x > static_cast<uint64_t>(INT64_MAX)) return fail("a number is too large");
    if (place_ == Place::kShape) {
      if (tensor_.shape.size() == kMaxDimensions) return fail("too many dimensions");
      tensor_.shape.push_back(static_cast<int64_t>(x));
      return true;
    }
    if (offsets_ == 2) return fail("data_offsets are not two numbers");
    (offsets_++ == 0 ? tensor_.begin : tensor_.end) = x;
    return true;
  }
  bool string(string_t& text) {
    if (place_ == Place::kMetadata) {
      header.metadata[key_] = text;
      return true;
    }
    if (place_ != Place::kTensor || key_ != "dtype") return unexpected("a text");
    tensor_.dtype = text;
    return true;
  }
  bool start_object(size_t) {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop) {
      place_ = key_ == "__metadata__" ? Place::kMetadata : Place::kTensor;
      tensor_ = {};
      tensor_.name = key_;
      offsets_ = -1;
      fields_.clear();
    } else {
      return unexpected("an object");
    }
    return true;
  }
  bool end_object() {
    if (place_ == Place::kTop) {
      place_ = Place::kEnd;
      return true;
    }
    if (place_ == Place::kTensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (fields_.count(field) == 0) return fail(std::string("has no ") + field);
      }
      header.tensors.push_back(std::move(tensor_));
    }
    place_ = Place::kTop;
    return true;
  }
  bool start_array(size_t) {
    if (place_ != Place::kTensor || key_ == "dtype") return unexpected("a list");
    place_ = key_ == "shape" ? Place::kShape : Place::kOffsets;
    if (place_ == Place::kOffsets) offsets_ = 0;
    return true;
  }
  bool end_array() {
    if (place_ == Place::kOffsets && offsets_ != 2) {
      return fail("data_offsets are not two numbers");
    }
    place_ = Place::kTensor;
    return true;
  }
  bool key(string_t& text) {
    if (place_ == Place::kTop) {
      key_ = tensor_.name = text;
      if (!names_.insert(text).second) return fail("is given twice");
    } else if (place_ == Place::kMetadata) {
      if (header.metadata.count(text) > 0) return fail("'" + printable(text) + "' is given twice");
      key_ = text;
    } else {
      if (text != "dtype" && text != "shape" && text != "data_offsets") {
        return fail("has an unknown field '" + printable(text) + "'");
      }
      if (!fields_.insert(text).second) return fail(text + " is given twice");
      key_ = text;
    }
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) {
    status = corrupt("the header is no JSON (near byte " + std::to_string(position) + ")");
    return false;
  }

 private:
  static constexpr size_t kMaxDimensions = 64;
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };

  bool fail(const std::string& what) {
    status = corrupt("tensor '" + printable(tensor_.name) + "': " + what);
    return false;
  }
  bool unexpected(const std::string& what) {
    if (place_ == Place::kStart) {
      status = corrupt("the header is no JSON object");
      return false;
    }
    return fail("unexpected " + what + " at '" + printable(key_) + "'");
  }

  Place place_ = Place::kStart;
  std::string key_;
  TensorInfo tensor_;
  int offsets_ = -1;  // numbers seen in data_offsets
  std::set<std::string> fields_, names_;
};

// The bytes that shape and dtype ask for are those that the offsets give.
Status check_size(const TensorInfo& t) {
  const auto fail = [&](const std::string& what) {
    return corrupt("tensor '" + printable(t.name) + "': " + what);
  };
  const auto bits = static_cast<uint64_t>(safetensors_bits(t.dtype));
  if (bits == 0) return fail("unknown dtype '" + printable(t.dtype) + "'");
  if (t.end < t.begin) return fail("ends before it begins");
  uint64_t total = bits;
  bool overflow = false;
  for (const int64_t n : t.shape) {
    overflow |= __builtin_mul_overflow(total, static_cast<uint64_t>(n), &total);
  }
  if (overflow) return fail("its size overflows");
  if (total % 8 != 0 || total / 8 != t.bytes()) {
    return fail("has " + std::to_string(t.bytes()) + " bytes, its shape takes " +
                std::to_string(total / 8));
  }
  return Status::ok();
}

}  // namespace

int32_t safetensors_bits(const std::string& dtype) {
  static const std::map<std::string, int32_t> kBits = {
      {"BOOL", 8},    {"U8", 8},   {"I8", 8},      {"F8_E5M2", 8}, {"F8_E4M3", 8},
      {"F8_E8M0", 8}, {"F4", 4},   {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"I16", 16},
      {"U16", 16},    {"F16", 16}, {"BF16", 16},   {"I32", 32},    {"U32", 32},
      {"F32", 32},    {"F64", 64}, {"I64", 64},    {"U64", 64},    {"C64", 64}};
  const auto it = kBits.find(dtype);
  return it == kBits.end() ? 0 : it->second;
}

const char* safetensors_name(DType t) {
  return t == DType::kFloat16 ? "F16" : t == DType::kBFloat16 ? "BF16" : "F32";
}

Result<SafetensorsHeader> parse_safetensors_header(const char* json, size_t json_bytes,
                                                   uint64_t data_bytes) {
  if (json_bytes > kMaxSafetensorsHeader)
    return corrupt("the header is longer than 100 million bytes");
  if (json_bytes == 0 || json[0] != '{') return corrupt("the header does not begin with '{'");
  HeaderParser parser;
  const bool whole = nlohmann::json::sax_parse(json, json + json_bytes, &parser);
  if (!parser.status) return parser.status;
  if (!whole) return corrupt("the header is no JSON");
  SafetensorsHeader header = std::move(parser.header);
  header.data_start = 8 + json_bytes;
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
                   });
  uint64_t end = 0;
  for (const TensorInfo& t : header.tensors) {
    if (Status s = check_size(t); !s) return s;
    if (t.begin != end) {
      return corrupt("tensor '" + printable(t.name) + "': begins at " + std::to_string(t.begin) +
                     (t.begin < end ? ", inside another" : ", behind a hole") + " (expected " +
                     std::to_string(end) + ")");
    }
    end = t.end;
  }
  if (end != data_bytes) {
    return corrupt("the tensors take " + std::to_string(end) + " bytes, the file holds " +
                   std::to_string(data_bytes));
  }
  return header;
}

}  // namespace tierkv::datasets
