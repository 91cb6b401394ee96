// SPDX-License-Identifier: Apache-2.0
// The identity of the bases of a whole cache.
#include "codec/file/container_format.h"
#include "codec/format/byte_cursor.h"
#include "tierkv/basis.h"

namespace tierkv {
namespace {

// Numbers are hashed where they lie: little-endian, as everything that is stored.
uint64_t digest(const Basis& basis) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.i32(static_cast<int32_t>(basis.kind));
  w.i32(basis.head_dim);
  for (const std::vector<float>* x : {&basis.mean, &basis.signs}) {
    w.u64(xxh3(reinterpret_cast<const uint8_t*>(x->data()), x->size() * sizeof(float)));
  }
  return xxh3(bytes.data(), bytes.size());
}

}  // namespace

uint64_t CacheBasis::identity() const {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.i32(num_layers);
  w.i32(num_kv_heads);
  for (const std::vector<Basis>* rows : {&keys, &values}) {
    w.i32(static_cast<int32_t>(rows->size()));
    for (const Basis& basis : *rows) w.u64(digest(basis));
  }
  const uint64_t hash = xxh3(bytes.data(), bytes.size());
  return hash == 0 ? 1 : hash;
}

}  // namespace tierkv
