// SPDX-License-Identifier: Apache-2.0
// The reference of attention over an engine's blocks: the device's steps, in host memory and
// double.
#include <vector>

#include "attention/core/reference.h"
#include "attention/engine/engine.h"
#include "codec/format/element.h"

namespace tierkv {
namespace {

struct HostTable {
  std::vector<SideCounts> tokens;
  std::vector<int32_t> slots;
};

HostTable fill_table(const BlockRows& rows) {
  const int32_t count = rows.batch.count * rows.num_kv_heads;
  HostTable t{std::vector<SideCounts>(count),
              std::vector<int32_t>(static_cast<size_t>(count) * rows.row_stride, kNoPage)};
  for (int32_t row = 0; row < count; ++row) {
    const int32_t entry = row / rows.num_kv_heads, length = rows.length(entry);
    t.tokens[row].of[0] = length;
    for (int32_t i = 0; i < rows.blocks(length); ++i) {
      t.slots[static_cast<size_t>(row) * rows.row_stride + i] =
          rows.page(entry, i, row % rows.num_kv_heads);
    }
  }
  return t;
}

// The index of an entry's query of a head among what is packed.
int64_t packed_vector(const EngineQueries& q, int32_t entry, int32_t j, int32_t head) {
  return (int64_t{entry} * q.queries() + j) * q.num_q_heads + head;
}

template <class Body>
void for_each_query(const EngineQueries& q, const Body& body) {
  for (int32_t entry = 0; entry < q.rows.batch.count; ++entry) {
    for (int32_t j = 0; j < q.queries(); ++j) {
      const int64_t token = q.token_of(entry, j);
      for (int32_t head = 0; head < q.num_q_heads && token >= 0; ++head) {
        body(packed_vector(q, entry, j, head), token, head);
      }
    }
  }
}

std::vector<float> load_query(const EngineQueries& q, int64_t token, int32_t head) {
  std::vector<float> x(q.head_dim);
  for (int32_t d = 0; d < q.head_dim; ++d) {
    x[d] = load_element(q.q, q.dtype, token * q.q_strides.token + head * q.q_strides.head + d);
  }
  return x;
}

std::vector<uint16_t> pack_queries(const EngineQueries& q) {
  const Basis basis = rotation_basis(q.rotation, q.head_dim);
  std::vector<uint16_t> packed(q.vectors() * q.head_dim, 0);
  for_each_query(q, [&](int64_t at, int64_t token, int32_t head) {
    std::vector<float> x = load_query(q, token, head);
    basis.apply_to_queries(x.data(), 1);
    reflect(q.reflection_of(head), q.head_dim, x.data());
    for (int32_t d = 0; d < q.head_dim; ++d) {
      packed[at * q.head_dim + d] = output_to_raw(q.packed_dtype, x[d]);
    }
  });
  return packed;
}

void unpack_results(const EngineQueries& q, const ReferenceOutput& packed) {
  const Basis basis = rotation_basis(q.out_rotation, q.head_dim);
  for_each_query(q, [&](int64_t at, int64_t token, int32_t head) {
    std::vector<float> x(packed.out.begin() + at * q.head_dim,
                         packed.out.begin() + (at + 1) * q.head_dim);
    basis.undo(x.data(), 1);
    for (int32_t d = 0; d < q.head_dim; ++d) {
      static_cast<uint16_t*>(q.out)[token * q.out_strides.token + head * q.out_strides.head + d] =
          output_to_raw(q.dtype, x[d]);
    }
    if (q.lse == nullptr) return;
    q.lse[token * q.lse_strides.token + head * q.lse_strides.head] =
        static_cast<float>(packed.lse[at]);
  });
}

}  // namespace

Status engine_attend_host(const EngineConfig& config, const EngineAttend& call) {
  const Result<EngineQueries> queries = engine_queries(config, call);
  if (!queries) return queries.status();
  const HostTable table = fill_table(queries->rows);
  const std::vector<uint16_t> packed = pack_queries(*queries);
  AttendCall attend;
  attend.table = {table_shape(config, call.batch), table.slots.data(), table.tokens.data(),
                  nullptr};
  attend.pages = page_view(config, call.layer);
  attend.batch = {nullptr, call.batch.count};
  attend.q = packed.data();
  const Result<ReferenceOutput> result =
      attend_reference(attention_config(config, call.batch.queries), attend);
  if (!result) return result.status();
  unpack_results(*queries, *result);
  return Status::ok();
}

}  // namespace tierkv
