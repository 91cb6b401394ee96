// SPDX-License-Identifier: Apache-2.0
// Appending, requantising and removing single tokens on the GPU: random traces, the host's bytes
// after every one. Tests named Small* are small enough for compute-sanitizer.
#include <cmath>

#include "bench/baselines/kernels/page_append.cuh"
#include "tests/gpu/device_array.cuh"
#include "tests/support/page_fixture.h"

namespace tierkv {
namespace {

using test::DeviceArray;

constexpr int32_t kPages = 3;  // of a warp, each in a format of its own

struct alignas(kPageAlignment) PoolBlock {
  uint8_t bytes[kPageAlignment];
};

enum class OpKind { kAppend, kOverwrite, kMove, kClear, kRemove, kAppendSides };

struct TokenOp {
  OpKind kind;
  int32_t page, slot;       // what is written; kRemove: the hole
  int32_t from, from_slot;  // kMove: the source; kRemove: the last token
  int32_t row;              // kAppend, kOverwrite: of the input
};

bool is_append(const TokenOp& op) {
  return op.kind == OpKind::kAppend || op.kind == OpKind::kAppendSides;
}

struct TraceShape {
  PageLayout layout[kPages];
  int64_t page_bytes;
  int32_t ops_per_warp, row_stride;
  DType dtype, raw_dtype;
};

struct Arrays {
  uint8_t* pool;         // [warps][kPages] pages
  const TokenOp* ops;    // [warps][ops_per_warp]
  const uint8_t *k, *v;  // dtype [rows, row_stride]
  const float* scores;
  const int32_t* positions;
  StatusCode* status;  // [warps][ops_per_warp]
};

__global__ void run_trace(const __grid_constant__ TraceShape shape, const Arrays a) {
  const int32_t warp = static_cast<int32_t>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  const auto page = [&](int32_t i) {
    return PageRef{a.pool + (warp * kPages + i) * shape.page_bytes, &shape.layout[i],
                   shape.raw_dtype};
  };
  for (int32_t n = 0; n < shape.ops_per_warp; ++n) {
    const TokenOp op = a.ops[warp * shape.ops_per_warp + n];
    const int64_t at = int64_t{op.row} * shape.row_stride * dtype_bytes(shape.dtype);
    const TokenInput input = {a.k + at, a.v + at, shape.dtype, a.scores[op.row],
                              a.positions[op.row]};
    StatusCode code = StatusCode::kOk;
    switch (op.kind) {
      case OpKind::kAppend:
        code = append_page_token(page(op.page), op.slot, input);
        break;
      case OpKind::kAppendSides:  // as two warps would, one after the other
        code = greater(append_page_side(page(op.page), op.slot, Component::kKey, input),
                       append_page_side(page(op.page), op.slot, Component::kValue, input));
        __syncwarp();
        break;
      case OpKind::kOverwrite:
        code = overwrite_page_token(page(op.page), op.slot, input);
        break;
      case OpKind::kMove:
        open_token_slot(page(op.page), op.slot);
        code = move_page_token(page(op.from), op.from_slot, page(op.page), op.slot);
        break;
      case OpKind::kClear:
        clear_page_token(page(op.page), op.slot);
        break;
      case OpKind::kRemove:
        remove_page_token(page(op.page), op.slot, page(op.from), op.from_slot);
        break;
    }
    if (threadIdx.x % 32 == 0) a.status[warp * shape.ops_per_warp + n] = code;
  }
}

class GpuTokens : public PageFixture {
 protected:
  // Random operations of `warps` warps on pages of three formats, on both sides.
  void run_and_compare(int32_t head_dim, const std::vector<TierFormat>& formats, DType dtype,
                       int32_t warps, int32_t ops) {
    make_shape(head_dim, formats, dtype, ops);
    const RandomTokens tokens = bad_tokens(random_tokens(64, head_dim, dtype));
    const TokenBatch batch = tokens.batch(0, 64);
    pool_.assign(warps * kPages * shape_.page_bytes / kPageAlignment, PoolBlock{});
    for (PoolBlock& block : pool_) {
      for (uint8_t& x : block.bytes) x = static_cast<uint8_t>(rng_());
    }
    const DeviceArray<PoolBlock> pool(pool_);
    std::vector<TokenOp> all;
    std::vector<StatusCode> expected;
    for (int32_t warp = 0; warp < warps; ++warp) {
      int32_t used[kPages] = {};
      for (int32_t n = 0; n < ops; ++n) {
        all.push_back(random_op(used));
        expected.push_back(run_on_host(warp, all.back(), batch, used));
        ASSERT_FALSE(HasFatalFailure());
      }
    }
    const size_t row_bytes = static_cast<size_t>(head_dim) * dtype_bytes(dtype);
    const auto bytes = [&](const void* x) {
      const auto* p = static_cast<const uint8_t*>(x);
      return std::vector<uint8_t>(p, p + 64 * row_bytes);
    };
    const DeviceArray<uint8_t> k(bytes(batch.k)), v(bytes(batch.v));
    const DeviceArray<float> scores(tokens.scores);
    const DeviceArray<int32_t> positions(tokens.positions);
    const DeviceArray<TokenOp> device_ops(all);
    const DeviceArray<StatusCode> status(std::vector<StatusCode>(all.size(), StatusCode::kCorrupt));
    const Arrays arrays = {pool.get()->bytes, device_ops.get(), k.get(),     v.get(),
                           scores.get(),      positions.get(),  status.get()};
    run_trace<<<warps / 2, 64>>>(shape_, arrays);
    EXPECT_EQ(status.read(), expected);
    const std::vector<PoolBlock> got = pool.read();
    EXPECT_EQ(memcmp(got.data(), pool_.data(), got.size() * sizeof(PoolBlock)), 0);
  }

 private:
  void make_shape(int32_t head_dim, const std::vector<TierFormat>& formats, DType dtype,
                  int32_t ops) {
    shape_.page_bytes = 0;
    for (int32_t i = 0; i < kPages; ++i) {
      shape_.layout[i] = layout_of(formats[i], head_dim, 32);
      shape_.page_bytes = std::max<int64_t>(shape_.page_bytes, shape_.layout[i].used_bytes);
    }
    shape_.page_bytes = (shape_.page_bytes + kPageAlignment - 1) / kPageAlignment * kPageAlignment;
    shape_.ops_per_warp = ops;
    shape_.row_stride = head_dim;
    shape_.dtype = dtype;
    shape_.raw_dtype = dtype == DType::kBFloat16 ? DType::kBFloat16 : DType::kFloat16;
  }

  static bool is_bad(int32_t row) { return row == 3 || row == 5 || row == 7 || row == 9; }
  // Some that no format can hold.
  RandomTokens bad_tokens(RandomTokens t) {
    const int32_t d = t.head_dim;
    t.half_k[3 * d + uniform(0, d - 1)] = 0x7f80 | 0x7c00;  // infinity or NaN in both types
    t.half_v[5 * d + uniform(0, d - 1)] = 0xffff;
    t.k[3 * d + uniform(0, d - 1)] = NAN;
    t.v[5 * d + uniform(0, d - 1)] = 1e30f;
    t.scores[7] = INFINITY;
    t.positions[9] = -2;
    return t;
  }

  TokenOp random_op(const int32_t (&used)[kPages]) {
    TokenOp op = {};
    op.row = uniform(0, 63);
    for (;;) {
      op.kind = static_cast<OpKind>(uniform(0, 5));
      op.page = uniform(0, kPages - 1);
      op.from = op.kind == OpKind::kMove ? uniform(0, kPages - 1) : op.page;
      const int32_t here = used[op.page];
      const bool has_room = here < shape_.layout[op.page].tokens;
      // What one side refuses the other may have written, so only good tokens come in sides.
      if (op.kind == OpKind::kAppendSides && is_bad(op.row)) continue;
      if (is_append(op) && has_room) {
        op.slot = here;
        return op;
      }
      if (op.kind == OpKind::kMove && has_room && used[op.from] > 0) {
        op.slot = here;
        op.from_slot = uniform(0, used[op.from] - 1);
        return op;
      }
      if (here == 0 || is_append(op) || op.kind == OpKind::kMove) continue;
      op.slot = op.kind == OpKind::kClear ? here - 1 : uniform(0, here - 1);
      op.from_slot = here - 1;
      return op;
    }
  }

  StatusCode run_on_host(int32_t warp, const TokenOp& op, const TokenBatch& tokens,
                         int32_t (&used)[kPages]) {
    const StatusCode code = apply(warp, op, tokens).code();
    const bool adds = is_append(op) || op.kind == OpKind::kMove;
    const bool takes = op.kind == OpKind::kClear || op.kind == OpKind::kRemove;
    if (code == StatusCode::kOk) used[op.page] += adds ? 1 : takes ? -1 : 0;
    return code;
  }
  Status apply(int32_t warp, const TokenOp& op, const TokenBatch& tokens) {
    const auto page = [&](int32_t i) {
      return HostPage{pool_[0].bytes + (warp * kPages + i) * shape_.page_bytes, shape_.layout[i],
                      shape_.raw_dtype};
    };
    TokenBatch batch = tokens;
    batch.rows = &op.row;
    batch.count = 1;
    if (is_append(op) || op.kind == OpKind::kMove) {
      EXPECT_TRUE(open_slot(page(op.page), op.slot));
    }
    switch (op.kind) {
      case OpKind::kMove:
        return move_token(page(op.from), op.from_slot, page(op.page), op.slot);
      case OpKind::kClear:
        return clear_token(page(op.page), op.slot);
      case OpKind::kRemove:
        return remove_token(page(op.page), op.slot, page(op.from), op.from_slot);
      default:
        return overwrite_token(page(op.page), op.slot, batch);
    }
  }

  TraceShape shape_;
  std::vector<PoolBlock> pool_;
};

TEST_F(GpuTokens, SmallTracesAreTheHosts) {
  run_and_compare(128, {token_wise_tier(8, 4), token_wise_tier(4, 2), raw_tier()}, DType::kFloat16,
                  2, 40);
}

TEST_F(GpuTokens, TracesOfEveryFormatAreTheHosts) {
  constexpr int32_t kBits[] = {16, 8, 4, 2};
  for (const int32_t head_dim : {64, 96, 128, 256}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      for (int32_t n = 0; n < 8; ++n) {
        std::vector<TierFormat> formats;
        for (int32_t i = 0; i < kPages; ++i) {
          TierFormat f;
          for (const Component c : {Component::kKey, Component::kValue}) {
            const int32_t groups[] = {0, 16, 32, head_dim / 2};
            const int32_t bits = kBits[uniform(0, 3)];
            f.of(c) = token_wise(bits, bits == 16 ? 0 : groups[uniform(0, 3)]);
          }
          formats.push_back(f);
        }
        SCOPED_TRACE(testing::Message() << "d " << head_dim << " " << to_string(formats[0]) << " "
                                        << to_string(formats[1]) << " " << to_string(formats[2])
                                        << " dtype " << static_cast<int>(dtype));
        run_and_compare(head_dim, formats, dtype, 8, 200);
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace tierkv
