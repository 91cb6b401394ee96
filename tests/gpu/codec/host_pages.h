// The codec's page jobs by plain loops over codec/host/page_codec.h: what the kernels of
// codec/gpu/pages/page_batch.h must equal, on batches whose pointers are all in host memory.
#pragma once

#include <algorithm>
#include <vector>

#include "codec/format/element.h"
#include "codec/gpu/pages/page_batch.h"
#include "codec/host/page_codec.h"

namespace tierkv::test {

inline void report(const PageBatch& b, const PageJob& job, StatusCode code) {
  StatusCode& status = b.status[job.row >= 0 && job.row < b.num_rows ? job.row : 0];
  status = std::max(status, code);
}

inline int32_t jobs_in_use(const PageBatch& b) {
  return b.num_used == nullptr ? b.num_jobs : std::clamp(*b.num_used, 0, b.num_jobs);
}

// The tokens of a job; false when one is negative.
inline bool job_tokens(const PageBatch& b, const PageJob& job, std::vector<int32_t>* tokens) {
  tokens->resize(job.count);
  for (int32_t i = 0; i < job.count; ++i) {
    const int64_t token = b.order == nullptr ? job.first + i : b.order[job.first + i];
    if (token < 0 || token > INT32_MAX) return false;
    (*tokens)[i] = static_cast<int32_t>(token);
  }
  return true;
}

inline HostPage job_page(const PageBatch& b, const PageJob& job) {
  return {b.pool.base + job.page * b.pool.page_bytes,
          b.formats.layout[job.format],
          b.formats.raw_dtype,
          {b.formats.rule_of(job.format, Component::kKey),
           b.formats.rule_of(job.format, Component::kValue)}};
}

// The status that a batch gets which append_tokens() refused.
inline StatusCode greatest_code(const HostPage& page, const TokenBatch& batch) {
  const int32_t head_dim = page.layout.head_dim();
  auto worst = StatusCode::kOk;
  const auto raise = [&worst](StatusCode code) { worst = std::max(worst, code); };
  float x[kMaxPageHeadDim];
  TokenCodes::Side side;
  for (int32_t i = 0; i < batch.count; ++i) {
    const int64_t row = batch.rows[i];
    if (batch.positions[row] < 0) raise(StatusCode::kInvalidArgument);
    if (!is_finite(batch.scores[row])) raise(StatusCode::kNonFinite);
    for (const Component c : {Component::kKey, Component::kValue}) {
      const void* from = c == Component::kKey ? batch.k : batch.v;
      for (int32_t d = 0; d < head_dim; ++d) {
        x[d] = load_element(from, batch.dtype, row * batch.row_stride + d);
      }
      raise(quantize_side(page, c, x, &side));
    }
  }
  return worst;
}

inline StatusCode encode_job(const PageEncode& e, const PageJob& job) {
  const PageBatch& b = e.batch;
  std::vector<int32_t> tokens, positions;
  if (!job_tokens(b, job, &tokens)) return StatusCode::kInvalidArgument;
  if (job.count == 0) return StatusCode::kOk;
  const int64_t offset = job.input * dtype_bytes(b.dtype);
  TokenBatch batch;
  batch.k = static_cast<const uint8_t*>(e.k) + offset;
  batch.v = static_cast<const uint8_t*>(e.v) + offset;
  batch.scores = e.scores + job.scalars;
  if (e.positions != nullptr) {
    batch.positions = e.positions + job.scalars;
  } else {
    positions.resize(1 + static_cast<size_t>(*std::max_element(tokens.begin(), tokens.end())));
    for (size_t t = 0; t < positions.size(); ++t) positions[t] = static_cast<int32_t>(t);
    batch.positions = positions.data();
  }
  batch.rows = tokens.data();
  batch.row_stride = b.token_stride;
  batch.count = job.count;
  batch.dtype = b.dtype;
  const HostPage page = job_page(b, job);
  const StatusCode code = append_tokens(page, job.first_slot, batch).code();
  return code == StatusCode::kOk ? code : greatest_code(page, batch);
}

inline StatusCode decode_job(const PageDecode& d, const PageJob& job) {
  const PageBatch& b = d.batch;
  std::vector<int32_t> tokens;
  if (!job_tokens(b, job, &tokens)) return StatusCode::kInvalidArgument;
  const int64_t offset = job.input * dtype_bytes(b.dtype);
  TokenOutput out;
  if (d.k != nullptr) out.k = static_cast<uint8_t*>(d.k) + offset;
  if (d.v != nullptr) out.v = static_cast<uint8_t*>(d.v) + offset;
  if (d.scores != nullptr) out.scores = d.scores + job.scalars;
  if (d.positions != nullptr) out.positions = d.positions + job.scalars;
  out.rows = tokens.data();
  out.row_stride = b.token_stride;
  out.count = job.count;
  out.dtype = b.dtype;
  return decode_tokens(job_page(b, job), job.first_slot, out).code();
}

template <class Batch, class DoJob>
Status for_each_job(const Batch& x, DoJob&& do_job) {
  if (Status s = x.validate(); !s) return s;
  for (int32_t i = 0; i < jobs_in_use(x.batch); ++i) {
    const PageJob& job = x.batch.jobs[i];
    StatusCode code = check_job(x.batch, job);
    if (code == StatusCode::kOk) code = do_job(x, job);
    report(x.batch, job, code);
  }
  return Status::ok();
}

// Errors as encode_pages() and decode_pages() report them.
inline Status encode_pages_host(const PageEncode& e) {
  return for_each_job(e, encode_job);
}
inline Status decode_pages_host(const PageDecode& d) {
  return for_each_job(d, decode_job);
}

}  // namespace tierkv::test
