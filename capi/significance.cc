// SPDX-License-Identifier: Apache-2.0
// Significance and log-sum-exp of prompts.
#include "tierkv/significance.h"

#include "capi/tier_format.h"

namespace tierkv::capi {
namespace {

int64_t or_dense(int64_t given, int64_t dense) {
  return given != 0 ? given : dense;
}

Status read_prompts(const tkv_significance_call* in, tkv_significance_call* c,
                    SignificanceCall* p) {
  if (Status s = read_struct(in, "call", c); !s) return s;
  p->q = c->q;
  p->k = c->k;
  p->starts = c->starts;
  p->q_head_stride = or_dense(c->q_head_stride, c->head_dim);
  p->k_head_stride = or_dense(c->k_head_stride, c->head_dim);
  p->q_token_stride = or_dense(c->q_token_stride, int64_t{c->num_q_heads} * c->head_dim);
  p->k_token_stride = or_dense(c->k_token_stride, int64_t{c->num_kv_heads} * c->head_dim);
  p->num_sequences = c->num_sequences;
  p->max_tokens = c->max_tokens;
  p->total_tokens = c->total_tokens;
  p->num_q_heads = c->num_q_heads;
  p->num_kv_heads = c->num_kv_heads;
  p->head_dim = c->head_dim;
  if (c->query_stride != 0) p->query_stride = c->query_stride;
  p->sm_scale = read_sm_scale(c->sm_scale, c->head_dim);
  return read_dtype(c->dtype, &p->dtype);
}

// run(call, prompts): a Status.
template <class Run>
tkv_status run_prompts(const tkv_significance_call* call, tkv_error* error, const Run& run) {
  return guarded(error, [&]() -> Status {
    tkv_significance_call c;
    SignificanceCall p;
    if (Status s = read_prompts(call, &c, &p); !s) return s;
    return run(c, p);
  });
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;
using tierkv::GpuStream;
using tierkv::SignificanceCall;

extern "C" {

tkv_status tkv_prompt_significance(const tkv_significance_call* call, void* stream,
                                   tkv_error* error) {
  return capi::run_prompts(call, error,
                           [&](const tkv_significance_call& c, const SignificanceCall& p) {
                             return tierkv::prompt_significance(p, c.lse, c.significance,
                                                                static_cast<GpuStream>(stream));
                           });
}

tkv_status tkv_prompt_lse(const tkv_significance_call* call, void* stream, tkv_error* error) {
  return capi::run_prompts(call, error,
                           [&](const tkv_significance_call& c, const SignificanceCall& p) {
                             return tierkv::prompt_lse(p, c.lse, static_cast<GpuStream>(stream));
                           });
}

tkv_status tkv_prompt_significance_host(const tkv_significance_call* call, tkv_error* error) {
  return capi::run_prompts(call, error,
                           [&](const tkv_significance_call& c, const SignificanceCall& p) {
                             return tierkv::prompt_significance_host(p, c.significance);
                           });
}

tkv_status tkv_prompt_lse_host(const tkv_significance_call* call, tkv_error* error) {
  return capi::run_prompts(call, error,
                           [&](const tkv_significance_call& c, const SignificanceCall& p) {
                             return tierkv::prompt_lse_host(p, c.lse);
                           });
}

}  // extern "C"
