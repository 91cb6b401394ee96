// Bases in device memory, for tests.
#pragma once

#include "codec/gpu/basis_batch.h"
#include "tests/gpu/device_array.cuh"

namespace tierkv::testing {

// How far a coordinate of a matrix may be from the host's (codec/gpu/basis_batch.h), with
// `magnitude` = sum_i |x_i m_i| + |mean_j|.
inline double basis_product_bound(double magnitude) {
  return magnitude * 0x1p-16;
}

struct UploadedBasis {
  explicit UploadedBasis(const PackedBasis& p)
      : signs(p.signs), mean(p.mean), unscale(p.unscale), matrix(p.matrix), parts(p.parts) {
    operand.kind = p.kind;
    operand.use = p.use;
    operand.head_dim = p.head_dim;
    operand.signs = p.signs.empty() ? nullptr : signs.get();
    operand.mean = p.mean.empty() ? nullptr : mean.get();
    operand.unscale = p.unscale.empty() ? nullptr : unscale.get();
    operand.matrix = p.matrix.empty() ? nullptr : matrix.get();
    operand.parts = p.parts.empty() ? nullptr : parts.get();
  }
  test::DeviceArray<float> signs, mean, unscale, matrix;
  test::DeviceArray<uint32_t> parts;
  BasisOperand operand;
};

}  // namespace tierkv::testing
