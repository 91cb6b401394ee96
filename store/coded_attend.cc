// Attention of the host back end: in double over all that a row decodes to.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "codec/element.h"
#include "store/coded_fixed.h"
#include "store/coded_host.h"
#include "store/host_store.h"

namespace tierkv {
namespace {

// One component of all tokens of a row, [num_tokens, head_dim], the mean added back.
Status read_row(const CodedView& s, const CodedBooks& books, int32_t row, Component c, float step,
                std::vector<double>* x) {
  const SequenceInfo& info = s.infos[row / s.rows_per_sequence()];
  const bool prompt = info.window_origin == kInPrompt;
  const float* mean = s.means(c, row);
  std::vector<int16_t> codes(static_cast<size_t>(kBlockTokens) * s.head_dim);
  x->clear();
  std::vector<uint16_t> fixed(codes.size());
  for (int32_t b = 0; b < info.window_first / kBlockTokens; ++b) {
    if (is_fixed_block(s, row, b)) {
      if (Status status = read_block_values(s, books, row, c, b, fixed.data()); !status) {
        return status;
      }
      for (size_t i = 0; i < fixed.size(); ++i) {
        x->push_back(double{half_to_float(fixed[i])} + mean[i % s.head_dim]);
      }
      continue;
    }
    if (Status status = read_block(s, books, row, c, b, codes.data()); !status) return status;
    for (size_t i = 0; i < codes.size(); ++i) {
      x->push_back(static_cast<double>(step) * codes[i] + mean[i % s.head_dim]);
    }
  }
  std::vector<uint16_t> raw(s.head_dim);
  for (int32_t p = info.window_first; p < info.num_tokens; ++p) {
    get_raw_token(s, row, info, c, p, raw.data());
    for (int32_t d = 0; d < s.head_dim; ++d) {
      x->push_back(double{half_to_float(raw[d])} + (prompt ? 0.0 : mean[d]));
    }
  }
  return Status::ok();
}

std::vector<double> values_of(const uint16_t* x, DType dtype, int32_t count) {
  std::vector<double> values;
  for (int32_t i = 0; i < count; ++i) values.push_back(raw_to_float(dtype, x[i]));
  return values;
}

struct CodedQuery {
  std::vector<double> q;  // [head_dim]
  double sm_scale;
  int32_t tokens;  // that it sees: the row's first
  double sink;     // -infinity: none
};

// One query: probabilities of its tokens, and the lse.
double weigh(const std::vector<double>& k, const CodedQuery& query, std::vector<double>* p) {
  const auto head_dim = static_cast<int32_t>(query.q.size()), tokens = query.tokens;
  p->assign(tokens, 0.0);
  double largest = query.sink;
  for (int32_t i = 0; i < tokens; ++i) {
    double dot = 0;
    for (int32_t d = 0; d < head_dim; ++d) dot += query.q[d] * k[i * head_dim + d];
    (*p)[i] = dot * query.sm_scale;
    largest = std::fmax(largest, (*p)[i]);
  }
  if (largest == -std::numeric_limits<double>::infinity()) return largest;
  double sum = std::exp(query.sink - largest);
  for (double& x : *p) sum += x = std::exp(x - largest);
  for (double& x : *p) x /= sum;
  return largest + std::log(sum);
}

// The output of a query with probabilities p: [head_dim] of the dtype.
void write_output(const std::vector<double>& p, const std::vector<double>& v, DType dtype,
                  int32_t head_dim, uint16_t* out) {
  for (int32_t d = 0; d < head_dim; ++d) {
    double sum = 0;
    for (size_t i = 0; i < p.size(); ++i) sum += p[i] * v[i * head_dim + d];
    out[d] = float_to_raw(dtype, static_cast<float>(sum));
  }
}

}  // namespace

Status CodedHostStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table_.admit_attend(request);
  if (!slots) return slots.status();
  if (Status s = validate_coded_request(request); !s) return s;
  const CacheLayout& layout = config_.layout;
  const int32_t heads = layout.num_kv_heads, group = layout.group_size(), dim = layout.head_dim;
  const int32_t count = request.sequences.count, q_len = request.q_len;
  const auto* q = static_cast<const uint16_t*>(request.q);
  auto* out = static_cast<uint16_t*>(request.out);
  const int64_t queries = int64_t{count} * q_len * layout.num_q_heads;
  if (Status s = check_values(q, request.dtype, queries * dim); !s) return s.with_context("q");
  if (Status s = check_sinks(request.sinks, layout.num_q_heads); !s) return s;
  std::vector<double> k, v, p;
  std::vector<float> most;
  for (int32_t r = 0; r < count * heads; ++r) {
    const int32_t entry = r / heads, slot = (*slots)[entry];
    const int32_t at = view_.row_of(slot, request.layer, r % heads);
    Status read = read_row(view_, books_, at, Component::kKey, view_.step(Component::kKey, at), &k);
    if (!read) return read;
    read = read_row(view_, books_, at, Component::kValue, view_.step(Component::kValue, at), &v);
    if (!read) return read;
    const int32_t tokens = table_.info(slot).num_tokens;
    for (int32_t query = 0; query < q_len; ++query) {
      most.assign(tokens, 0.0f);
      const int64_t line = int64_t{entry} * q_len + query;
      const int64_t first = (line * heads + r % heads) * group;
      for (int64_t head = first; head < first + group; ++head) {
        const double sink = request.sinks == nullptr ? -std::numeric_limits<double>::infinity()
                                                     : request.sinks[head % layout.num_q_heads];
        const int32_t seen = tokens - q_len + 1 + query;
        const double lse = weigh(
            k, {values_of(q + head * dim, request.dtype, dim), layout.sm_scale, seen, sink}, &p);
        for (size_t i = 0; i < p.size(); ++i) {
          most[i] = std::fmax(most[i], static_cast<float>(p[i]));
        }
        write_output(p, v, request.dtype, dim, out + head * dim);
        if (request.lse != nullptr) request.lse[head] = static_cast<float>(lse);
      }
      if (request.probabilities != nullptr) {
        const int64_t to = int64_t{query} * count * heads + r;
        std::copy(most.begin(), most.end(), request.probabilities + to * request.stride);
      }
    }
  }
  return Status::ok();
}

}  // namespace tierkv
