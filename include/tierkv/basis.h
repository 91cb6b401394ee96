// SPDX-License-Identifier: Apache-2.0
// Changes of coordinates before quantisation: y = T (x - mean), for keys and for values.
//
// Energy that sits in a few channels costs bits; in another basis it is spread (Hadamard) or
// centred (means). Attention runs on coordinates: with T the key basis, which is orthonormal,
//   q . k = (T q) . y + q . mean.
// So queries are mapped at read, and the constant q . mean goes to the LSE alone. The output is a
// mean of values with weights that add up to 1, so it is mapped back once. Exact but for rounding.
//
// Sources: QuaRot and KVQuant (docs/internals/architecture.md, "Quantisation").
#pragma once

#include <cstdint>
#include <vector>

#include "tierkv/export.h"
#include "tierkv/format.h"
#include "tierkv/layout.h"
#include "tierkv/status.h"

namespace tierkv {

// The basis of one component of one (layer, kv_head). Means may be empty (none) in every kind but
// kMean.
//
//   kMean      T is the identity
//   kHadamard  T = H diag(signs), orthonormal; a head_dim that is no power of two is cut into
//              powers of two in descending order (96 = 64 + 32)
struct TKV_API Basis {
  BasisKind kind = BasisKind::kNone;
  int32_t head_dim = 0;
  std::vector<float> mean;   // [head_dim] as stored (fp16 values)
  std::vector<float> signs;  // [head_dim] for kHadamard, 1 or -1

  static Basis none(int32_t head_dim);
  static Basis mean_removed(std::vector<float> mean);  // rounds the means to fp16
  // The library's signs; the means are rounded to fp16.
  static Basis hadamard(int32_t head_dim, std::vector<float> mean = {});

  // x [tokens, head_dim], in place.
  void apply(float* x, int64_t tokens) const;
  void undo(float* x, int64_t tokens) const;
  // q [queries, head_dim], in place. Afterwards the product of q with coordinates is the product of
  // the original q with x, less that with the mean.
  void apply_to_queries(float* q, int64_t queries) const;
  // What a sequence that carries its own basis pays for it: fp16 means.
  int64_t stored_bytes() const;

  friend bool operator==(const Basis& a, const Basis& b) {
    return a.kind == b.kind && a.head_dim == b.head_dim && a.mean == b.mean && a.signs == b.signs;
  }
  friend bool operator!=(const Basis& a, const Basis& b) { return !(a == b); }
};

// The bases of a whole cache. All rows of a component are of one kind, with means or without.
struct TKV_API CacheBasis {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  std::vector<Basis> keys;    // [num_layers, num_kv_heads]
  std::vector<Basis> values;  // likewise

  // XXH3-64 of everything, never 0. Sequences carry it, because pages of one basis mean nothing in
  // another.
  uint64_t identity() const;
};

}  // namespace tierkv
