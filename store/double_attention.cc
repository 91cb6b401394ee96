#include "store/double_attention.h"

#include <algorithm>
#include <cmath>

#include "codec/element.h"
#include "store/host_store.h"

namespace tierkv {
namespace {

struct Query {
  std::vector<double> q;  // [head_dim]
  double sm_scale;
  int32_t tokens;  // that it sees: the row's first
  double sink;     // -infinity: none
};

// Probabilities of the query's tokens, and the lse.
double weigh(const std::vector<double>& k, const Query& query, std::vector<double>* p) {
  const auto head_dim = static_cast<int32_t>(query.q.size());
  p->assign(query.tokens, 0.0);
  double largest = query.sink;
  for (int32_t i = 0; i < query.tokens; ++i) {
    double dot = 0;
    for (int32_t d = 0; d < head_dim; ++d) dot += query.q[d] * k[i * head_dim + d];
    (*p)[i] = dot * query.sm_scale;
    largest = std::fmax(largest, (*p)[i]);
  }
  if (largest == -INFINITY) return largest;
  double sum = std::exp(query.sink - largest);
  for (double& x : *p) sum += x = std::exp(x - largest);
  for (double& x : *p) x /= sum;
  return largest + std::log(sum);
}

std::vector<double> values_of(const uint16_t* x, DType dtype, int32_t count) {
  std::vector<double> values;
  for (int32_t i = 0; i < count; ++i) values.push_back(raw_to_float(dtype, x[i]));
  return values;
}

// The output of a query with probabilities p: [head_dim] of the dtype.
void write_output(const std::vector<double>& p, const std::vector<double>& v, DType dtype,
                  int32_t head_dim, uint16_t* out) {
  for (int32_t d = 0; d < head_dim; ++d) {
    double sum = 0;
    for (size_t i = 0; i < p.size(); ++i) sum += p[i] * v[i * head_dim + d];
    out[d] = output_to_raw(dtype, static_cast<float>(sum));
  }
}

// A row, by its place in the request.
struct RequestedRow {
  int32_t entry, kv_head;
  std::vector<double> k, v;
};

void attend_row(const CacheLayout& layout, const AttendRequest& request, const RequestedRow& row) {
  const int32_t group = layout.group_size(), dim = layout.head_dim, heads = layout.num_kv_heads;
  const auto tokens = static_cast<int32_t>(row.k.size()) / dim;
  const auto* q = static_cast<const uint16_t*>(request.q);
  auto* out = static_cast<uint16_t*>(request.out);
  std::vector<double> p;
  for (int32_t query = 0; query < request.q_len; ++query) {
    std::vector<float> most(tokens);
    const int64_t line = int64_t{row.entry} * request.q_len + query;
    const int64_t first = (line * heads + row.kv_head) * group;
    for (int64_t head = first; head < first + group; ++head) {
      const double sink =
          request.sinks == nullptr ? -INFINITY : request.sinks[head % layout.num_q_heads];
      const int32_t seen = tokens - request.q_len + 1 + query;
      const std::vector<double> values = values_of(q + head * dim, request.dtype, dim);
      const double lse = weigh(row.k, {values, layout.sm_scale, seen, sink}, &p);
      for (size_t i = 0; i < p.size(); ++i) {
        most[i] = std::fmax(most[i], static_cast<float>(p[i]));
      }
      write_output(p, row.v, request.dtype, dim, out + head * dim);
      if (request.lse != nullptr) request.lse[head] = static_cast<float>(lse);
    }
    if (request.probabilities == nullptr) continue;
    const int64_t to = (int64_t{query} * request.sequences.count + row.entry) * heads + row.kv_head;
    std::copy(most.begin(), most.end(), request.probabilities + to * request.stride);
  }
}

}  // namespace

Status attend_in_double(const KvStoreConfig& config, const AttendRequest& request,
                        const Slots& slots, const ReadDecodedRow& read) {
  const CacheLayout& layout = config.layout;
  const int64_t queries = int64_t{request.sequences.count} * request.q_len * layout.num_q_heads;
  if (Status s = check_values(request.q, request.dtype, queries * layout.head_dim); !s) {
    return s.with_context("q");
  }
  if (Status s = check_sinks(request.sinks, layout.num_q_heads); !s) return s;
  for (int32_t r = 0; r < request.sequences.count * layout.num_kv_heads; ++r) {
    RequestedRow row = {r / layout.num_kv_heads, r % layout.num_kv_heads, {}, {}};
    if (Status s = read(slots[row.entry], row.kv_head, &row.k, &row.v); !s) return s;
    attend_row(layout, request, row);
  }
  return Status::ok();
}

}  // namespace tierkv
