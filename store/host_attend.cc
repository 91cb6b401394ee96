#include <algorithm>
#include <cmath>
#include <vector>

#include "attention/reference.h"
#include "codec/element.h"
#include "store/attention_config.h"
#include "store/host_store.h"

namespace tierkv {
namespace {

// The heads of one query of a row.
struct RowQueries {
  const uint16_t* q;  // [group, head_dim] of dtype
  DType dtype;
  const double* lse;  // [group]
  int32_t group;
  double sm_scale;
  int32_t position;  // newer tokens are not seen
};

void read_key(const HostSlot& at, DType raw, std::vector<double>* k) {
  for (int32_t d = 0; d < at.page.layout.head_dim(); ++d) {
    (*k)[d] = page_value(at.page.layout, at.page.bytes, Component::kKey, at.slot, d, raw);
  }
}

void row_probabilities(const StoreView& s, int32_t row, const RowQueries& queries,
                       float* probabilities) {
  const int32_t head_dim = s.layouts[0].head_dim();
  std::vector<double> k(head_dim);
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (int32_t i = 0; i < s.allocator.tokens[row].of[side]; ++i) {
      const HostSlot at = row_slot(s, row, side, i);
      if (page_position(at.page, at.slot) > queries.position) continue;
      read_key(at, s.raw_dtype, &k);
      double largest = 0;
      for (int32_t g = 0; g < queries.group; ++g) {
        const uint16_t* q = queries.q + int64_t{g} * head_dim;
        double dot = 0;
        for (int32_t d = 0; d < head_dim; ++d) dot += value_of_bits(q[d], queries.dtype) * k[d];
        largest = std::fmax(largest, std::exp(dot * queries.sm_scale - queries.lse[g]));
      }
      probabilities[page_position(at.page, at.slot)] = static_cast<float>(largest);
    }
  }
}

}  // namespace

AttentionConfig attention_config(const KvStoreConfig& config, int64_t page_bytes) {
  AttentionConfig a;
  a.num_layers = config.layout.num_layers;
  a.num_q_heads = config.layout.num_q_heads;
  a.num_kv_heads = config.layout.num_kv_heads;
  a.head_dim = config.layout.head_dim;
  a.sm_scale = config.layout.sm_scale;
  a.page_bytes = page_bytes;
  a.num_tiers = kStoreSides;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const TierFormat& format = side_format(config, side);
    a.tiers[side] = {side, format};
  }
  return a;
}

Result<AttentionConfig> attention_config(AttentionConfig config, DType dtype, DType raw_dtype) {
  for (int32_t t = 0; t < config.num_tiers; ++t) {
    const TierFormat& format = config.tiers[t].format;
    if ((!format.k.is_raw() && !format.v.is_raw()) || dtype == raw_dtype) continue;
    return Status(StatusCode::kUnsupported, std::string("dtype ") + dtype_name(dtype) +
                                                " of q and out with raw tiers of " +
                                                dtype_name(raw_dtype));
  }
  config.dtype = dtype;
  return config;
}

AttentionTail window_tail(const KvStoreConfig& config, const int32_t* newest) {
  const TierPolicy& policy = config.policy;
  AttentionTail tail;
  tail.tier = kWindowSide;
  tail.newest = newest;
  if (policy.sink_tokens + policy.window_tokens > config.max_tokens) return tail;  // never full
  tail.ring_first = policy.sink_tokens;
  tail.ring_tokens = policy.window_tokens;
  return tail;
}

size_t count_scratch_bytes(const KvStoreConfig& config, int32_t sequences, int32_t tokens,
                           int32_t q_len) {
  AttentionConfig attention = attention_config(config, config.page_bytes);
  attention.q_len = q_len;
  return attention_score_bytes(attention, sequences, tokens);
}

Status check_sinks(const float* sinks, int32_t count) {
  for (int32_t i = 0; sinks != nullptr && i < count; ++i) {
    if (std::isfinite(sinks[i]) || sinks[i] == -INFINITY) continue;
    return Status(StatusCode::kNonFinite, "sinks: head " + std::to_string(i));
  }
  return Status::ok();
}

Status HostStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table_.admit_attend(request);
  if (!slots) return slots.status();
  const CacheLayout& layout = config_.layout;
  const int64_t queries = int64_t{request.sequences.count} * request.q_len * layout.num_q_heads;
  if (Status s = check_values(request.q, request.dtype, queries * layout.head_dim); !s) {
    return s.with_context("q");
  }
  if (Status s = check_sinks(request.sinks, layout.num_q_heads); !s) return s;
  Result<AttentionConfig> attention =
      attention_config(attention_config(config_, page_bytes()), request.dtype, view_.raw_dtype);
  if (!attention) return attention.status();
  attention->q_len = request.q_len;
  std::vector<int32_t> newest;
  for (const int32_t slot : *slots) {
    newest.push_back(newest_index(view_.policy, table_.info(slot)));
  }
  AttendCall call;
  call.table = view_.allocator.table();
  call.pages = view_.pages;
  call.batch = {slots->data(), request.sequences.count};
  call.layer = request.layer;
  call.q = request.q;
  call.sinks = request.sinks;
  call.tail = window_tail(config_, newest.data());
  const Result<ReferenceOutput> output = attend_reference(*attention, call);
  if (!output) return output.status();
  auto* out = static_cast<uint16_t*>(request.out);
  std::transform(output->out.begin(), output->out.end(), out,
                 [&](double x) { return output_to_raw(request.dtype, static_cast<float>(x)); });
  for (int64_t i = 0; request.lse != nullptr && i < queries; ++i) {
    request.lse[i] = static_cast<float>(output->lse[i]);
  }
  if (request.probabilities == nullptr && !request.count_query) return Status::ok();
  for (int32_t query = 0; query < request.q_len; ++query) {
    use_probabilities(request, *slots, query, output->lse.data());
  }
  return Status::ok();
}

// Hands out and counts what query `query` of each sequence saw; lse is [count, q_len, num_q_heads].
void HostStore::use_probabilities(const AttendRequest& request, const Slots& slots, int32_t query,
                                  const double* lse) {
  const CacheLayout& layout = config_.layout;
  const int32_t heads = layout.num_kv_heads, group = layout.group_size();
  const auto* q = static_cast<const uint16_t*>(request.q);
  std::vector<float> line;
  for (size_t r = 0; r < slots.size() * heads; ++r) {
    const size_t entry = r / heads, head = r % heads;
    const int32_t row = view_.row_of(slots[entry], request.layer, static_cast<int32_t>(head));
    const SequenceInfo& info = table_.info(slots[entry]);
    const int32_t position = info.num_tokens - request.q_len + query;
    const auto first =
        static_cast<int64_t>(((entry * request.q_len + query) * heads + head) * group);
    line.assign(info.num_tokens, 0.0f);
    row_probabilities(
        view_, row,
        {q + first * layout.head_dim, request.dtype, lse + first, group, layout.sm_scale, position},
        line.data());
    if (request.probabilities != nullptr) {
      const auto at = static_cast<int64_t>(query * slots.size() * heads + r);
      std::copy(line.begin(), line.end(), request.probabilities + at * request.stride);
    }
    const CountSchedule schedule = {info.prompt_tokens, view_.score_interval};
    if (request.count_query && schedule.is_counted(position)) {
      score_row(view_, row, info, position, line.data());
    }
  }
}

}  // namespace tierkv
