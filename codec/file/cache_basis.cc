// SPDX-License-Identifier: Apache-2.0
// The bases of a whole cache: what must agree between rows, and their identity.
#include <string>
#include <utility>

#include "codec/file/container_format.h"
#include "codec/format/byte_cursor.h"
#include "tierkv/basis.h"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}

Status check_rows(const std::vector<Basis>& rows, const CacheLayout& layout) {
  const int64_t expected = int64_t{layout.num_layers} * layout.num_kv_heads;
  if (static_cast<int64_t>(rows.size()) != expected) {
    return invalid(std::to_string(rows.size()) + " bases for " + std::to_string(expected) +
                   " rows");
  }
  for (size_t r = 0; r < rows.size(); ++r) {
    const Basis& basis = rows[r];
    const std::string where = "layer " + std::to_string(r / layout.num_kv_heads) + ", kv_head " +
                              std::to_string(r % layout.num_kv_heads);
    if (Status s = basis.validate(); !s) return s.with_context(where);
    if (basis.head_dim != layout.head_dim) return invalid(where + ": head_dim");
    if (basis.kind != rows[0].kind) return invalid(where + ": kind differs");
    if (basis.mean.empty() != rows[0].mean.empty()) return invalid(where + ": means of some rows");
  }
  return Status::ok();
}

// Matrices are hashed where they lie: little-endian, as everything that is stored.
uint64_t digest(const Basis& basis) {
  std::vector<uint8_t> bytes;
  ByteWriter w(&bytes);
  w.i32(static_cast<int32_t>(basis.kind));
  w.i32(basis.head_dim);
  for (const std::vector<float>* x : {&basis.mean, &basis.signs, &basis.forward, &basis.inverse}) {
    w.u64(xxh3(reinterpret_cast<const uint8_t*>(x->data()), x->size() * sizeof(float)));
  }
  return xxh3(bytes.data(), bytes.size());
}

}  // namespace

CacheBasis CacheBasis::hadamard(const CacheLayout& layout) {
  CacheBasis basis;
  basis.num_layers = layout.num_layers;
  basis.num_kv_heads = layout.num_kv_heads;
  basis.keys.assign(static_cast<size_t>(layout.num_layers) * layout.num_kv_heads,
                    Basis::hadamard(layout.head_dim));
  basis.values = basis.keys;
  return basis;
}

Status CacheBasis::validate(const CacheLayout& layout) const {
  if (Status s = layout.validate(); !s) return s.with_context("layout");
  if (layout.head_dim % 32 != 0 || layout.head_dim > 256) {
    return Status(StatusCode::kUnsupported, "a basis of head_dim " +
                                                std::to_string(layout.head_dim) +
                                                ": it must be a multiple of 32 up to 256");
  }
  if (num_layers != layout.num_layers || num_kv_heads != layout.num_kv_heads) {
    return invalid("bases of " + std::to_string(num_layers) + " layers and " +
                   std::to_string(num_kv_heads) + " kv heads");
  }
  if (Status s = check_rows(keys, layout); !s) return s.with_context("keys");
  if (Status s = check_rows(values, layout); !s) return s.with_context("values");
  return Status::ok();
}

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
