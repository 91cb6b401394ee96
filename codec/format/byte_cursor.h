// SPDX-License-Identifier: Apache-2.0
// Little-endian fields written to and read from byte strings, independent of the machine's order.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace tierkv {

class ByteWriter {
 public:
  explicit ByteWriter(std::vector<uint8_t>* out) : out_(out) {}

  void put(uint64_t x, int32_t bytes) {
    for (int32_t i = 0; i < bytes; ++i) out_->push_back(static_cast<uint8_t>(x >> (8 * i)));
  }
  void u8(uint32_t x) { put(x, 1); }
  void u16(uint32_t x) { put(x, 2); }
  void u32(uint32_t x) { put(x, 4); }
  void i32(int32_t x) { put(static_cast<uint32_t>(x), 4); }
  void u64(uint64_t x) { put(x, 8); }
  void i64(int64_t x) { put(static_cast<uint64_t>(x), 8); }
  void f32(float x) {
    uint32_t u;
    std::memcpy(&u, &x, 4);
    u32(u);
  }
  void f64(double x) {
    uint64_t u;
    std::memcpy(&u, &x, 8);
    u64(u);
  }
  void bytes(const void* from, size_t count) {
    const auto* first = static_cast<const uint8_t*>(from);
    out_->insert(out_->end(), first, first + count);
  }
  // Length in bytes, then the bytes.
  void text(const std::string& s) {
    u32(static_cast<uint32_t>(s.size()));
    out_->insert(out_->end(), s.begin(), s.end());
  }

 private:
  std::vector<uint8_t>* out_;
};

// Reading past the end yields zeros and makes ok() false for good: read all fields, then ask once.
class ByteReader {
 public:
  ByteReader(const uint8_t* bytes, size_t size) : next_(bytes), left_(size) {}
  explicit ByteReader(const std::vector<uint8_t>& bytes) : ByteReader(bytes.data(), bytes.size()) {}

  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && left_ == 0; }
  size_t left() const { return left_; }

  // `count` bytes, or null when fewer are left.
  const uint8_t* take(uint64_t count) {
    if (!ok_ || count > left_) {
      ok_ = false;
      return nullptr;
    }
    const uint8_t* p = next_;
    next_ += count;
    left_ -= count;
    return p;
  }
  uint64_t get(int32_t bytes) {
    const uint8_t* p = take(static_cast<uint64_t>(bytes));
    uint64_t x = 0;
    for (int32_t i = 0; p != nullptr && i < bytes; ++i) x |= static_cast<uint64_t>(p[i]) << (8 * i);
    return x;
  }
  uint8_t u8() { return static_cast<uint8_t>(get(1)); }
  uint16_t u16() { return static_cast<uint16_t>(get(2)); }
  uint32_t u32() { return static_cast<uint32_t>(get(4)); }
  int32_t i32() { return static_cast<int32_t>(u32()); }
  uint64_t u64() { return get(8); }
  int64_t i64() { return static_cast<int64_t>(u64()); }
  float f32() {
    const uint32_t u = u32();
    float x;
    std::memcpy(&x, &u, 4);
    return x;
  }
  double f64() {
    const uint64_t u = u64();
    double x;
    std::memcpy(&x, &u, 8);
    return x;
  }
  std::string text() {
    const uint32_t n = u32();
    const uint8_t* p = take(n);
    return p == nullptr ? std::string() : std::string(p, p + n);
  }

 private:
  const uint8_t* next_;
  size_t left_;
  bool ok_ = true;
};

}  // namespace tierkv
