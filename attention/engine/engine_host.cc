// SPDX-License-Identifier: Apache-2.0
// The reference of attention over an engine's blocks: the device's steps, in host memory and
// double.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/engine/engine.h"
#include "codec/format/element.h"
#include "codec/format/errors.h"
#include "codec/host/page_codec.h"

namespace tierkv {
namespace {

Status check_rows(const BlockRows& rows) {
  for (int32_t entry = 0; entry < rows.batch.count; ++entry) {
    const int32_t length = rows.length(entry);
    if (length < 0 || length > int64_t{rows.max_blocks} * rows.block_tokens) {
      return corrupt("token count " + std::to_string(length));
    }
    for (int32_t i = 0; i < rows.blocks(length); ++i) {
      if (rows.page(entry, i, 0) == kNoPage) return corrupt("page id " + std::to_string(kNoPage));
    }
  }
  return Status::ok();
}

// Attention over packed queries.
struct Answers {
  std::vector<double> out;  // [count, queries, num_q_heads, head_dim]; 0 where no token is seen
  std::vector<double> lse;  // [count, queries, num_q_heads]; -infinity likewise
};

// The tokens of a row of checked BlockRows.
struct RowValues {
  std::vector<float> k, v;  // [tokens, head_dim]

  RowValues(const BlockCache& cache, const BlockRows& rows, int32_t entry, int32_t kv_head) {
    const int32_t tokens = rows.length(entry), dim = cache.layout.head_dim();
    k.resize(int64_t{tokens} * dim);
    v.resize(int64_t{tokens} * dim);
    TokenCodes codes;
    for (int64_t t = 0; t < tokens; ++t) {
      const int64_t page = rows.page(entry, static_cast<int32_t>(t) / rows.block_tokens, kv_head);
      const HostPage from = {cache.base + page * cache.page_bytes, cache.layout, cache.raw_dtype};
      load_token(from, static_cast<int32_t>(t) % rows.block_tokens, &codes);
      dequantize_side(from, Component::kKey, codes.k, k.data() + t * dim);
      dequantize_side(from, Component::kValue, codes.v, v.data() + t * dim);
    }
  }
};

// One query over the first `tokens` tokens of a row; out is zeroed. Returns the lse.
double attend_query(const RowValues& row, int64_t tokens, const std::vector<float>& q,
                    double sm_scale, double* out) {
  const auto dim = static_cast<int64_t>(q.size());
  double largest = -std::numeric_limits<double>::infinity(), sum = 0;
  std::vector<double> logits(tokens < 0 ? 0 : tokens);
  for (size_t t = 0; t < logits.size(); ++t) {
    for (int64_t d = 0; d < dim; ++d) logits[t] += double{q[d]} * row.k[t * dim + d];
    logits[t] *= sm_scale;
    largest = std::fmax(largest, logits[t]);
  }
  if (std::isinf(largest) && largest < 0) return largest;
  for (double& logit : logits) sum += logit = std::exp(logit - largest);
  for (size_t t = 0; t < logits.size(); ++t) {
    const double p = logits[t] / sum;
    if (p == 0) continue;
    for (int64_t d = 0; d < dim; ++d) out[d] += p * row.v[t * dim + d];
  }
  return largest + std::log(sum);
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

void unpack_results(const EngineQueries& q, const Answers& packed) {
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

Answers attend_packed(const EngineQueries& q, const BlockCache& cache, double sm_scale,
                      const std::vector<uint16_t>& packed) {
  Answers answers{std::vector<double>(packed.size()), std::vector<double>(q.vectors())};
  const BlockRows& rows = q.rows;
  const int32_t group = q.num_q_heads / rows.num_kv_heads, dim = q.head_dim;
  std::vector<float> query(dim);
  for (int32_t row = 0; row < rows.batch.count * rows.num_kv_heads; ++row) {
    const int32_t entry = row / rows.num_kv_heads, kv_head = row % rows.num_kv_heads;
    const RowValues tokens(cache, rows, entry, kv_head);
    for (int32_t i = 0; i < q.queries() * group; ++i) {
      const int32_t j = i / group;
      const int64_t at = packed_vector(q, entry, j, kv_head * group + i % group);
      for (int32_t d = 0; d < dim; ++d) {
        query[d] = raw_to_float(q.packed_dtype, packed[at * dim + d]);
      }
      answers.lse[at] = attend_query(tokens, int64_t{rows.length(entry)} - (q.queries() - 1 - j),
                                     query, sm_scale, answers.out.data() + at * dim);
    }
  }
  return answers;
}

}  // namespace

Status engine_attend_host(const EngineConfig& config, const EngineAttend& call) {
  const Result<EngineQueries> queries = engine_queries(config, call);
  if (!queries) return queries.status();
  const Result<BlockCache> cache = block_cache(config, call.layer);
  if (!cache) return cache.status();
  if (Status s = check_rows(queries->rows); !s) return s;
  unpack_results(*queries,
                 attend_packed(*queries, *cache, config.sm_scale, pack_queries(*queries)));
  return Status::ok();
}

}  // namespace tierkv
