#include "store/tiers/device_basis.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <utility>

#include "gpu/cuda_device.cuh"

namespace tierkv {
namespace {

bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0;
}

}  // namespace

Result<std::unique_ptr<DeviceBasisStore>> DeviceBasisStore::make(const KvStoreConfig& config,
                                                                 GpuStream stream) {
  if (Status s = config.validate(); !s) return s;
  Result<std::unique_ptr<DeviceStore>> inner =
      DeviceStore::make(coordinates_config(config), stream);
  if (!inner) return inner.status();
  std::unique_ptr<DeviceBasisStore> store(new DeviceBasisStore(config, std::move(*inner), stream));
  if (Status s = store->allocate(); !s) return s;
  return Result<std::unique_ptr<DeviceBasisStore>>(std::move(store));
}

DeviceBasisStore::~DeviceBasisStore() {
  (void)cudaStreamSynchronize(stream_);
  for (void* p : memory_) (void)cudaFree(p);
  (void)cudaFree(prompt_);
}

template <class T>
Status DeviceBasisStore::take(size_t count, T** memory) {
  void* p = nullptr;
  if (Status s = device_allocate(count * sizeof(T), "basis", &p); !s) return s;
  memory_.push_back(p);
  *memory = static_cast<T*>(p);
  return Status::ok();
}

template <class T>
Status DeviceBasisStore::put(const std::vector<T>& from, const T** to) {
  *to = nullptr;
  if (from.empty()) return Status::ok();
  T* memory = nullptr;
  if (Status s = take(from.size(), &memory); !s) return s;
  *to = memory;
  return cuda_status(
      cudaMemcpyAsync(memory, from.data(), from.size() * sizeof(T), cudaMemcpyDefault, stream_),
      "basis");
}

Status DeviceBasisStore::upload(Component c, BasisUse use, DType dtype, BasisOperand* operand) {
  const PackedBasis packed = pack_basis(basis().of(c), use, dtype);
  operand->kind = packed.kind;
  operand->use = packed.use;
  operand->head_dim = packed.head_dim;
  if (Status s = put(packed.signs, &operand->signs); !s) return s;
  if (Status s = put(packed.mean, &operand->mean); !s) return s;
  if (Status s = put(packed.unscale, &operand->unscale); !s) return s;
  if (Status s = put(packed.matrix, &operand->matrix); !s) return s;
  if (Status s = put(packed.parts, &operand->parts); !s) return s;
  // What was packed goes when this returns.
  return cuda_status(cudaStreamSynchronize(stream_), "basis");
}

Status DeviceBasisStore::allocate() {
  const CacheLayout& layout = config_.layout;
  const DType half = DType::kFloat16;
  for (const Component c : {Component::kKey, Component::kValue}) {
    BasisOperand* operand = &apply_[static_cast<int32_t>(c)];
    if (Status s = upload(c, BasisUse::kApply, layout.dtype, operand); !s) return s;
  }
  if (Status s = upload(Component::kKey, BasisUse::kQuery, half, &query_[0]); !s) return s;
  query_[1] = query_[0];  // parts alone depend on the type
  if (layout.dtype == DType::kBFloat16 && query_[0].kind == BasisKind::kMatrix) {
    const DType type = DType::kBFloat16;
    if (Status s = upload(Component::kKey, BasisUse::kQuery, type, &query_[1]); !s) return s;
  }
  if (Status s = upload(Component::kValue, BasisUse::kUndo, half, &undo_); !s) return s;
  const auto sequences = static_cast<size_t>(config_.max_sequences);
  const size_t queries = sequences * kMaxQueryTokens * layout.num_q_heads;
  const size_t tokens = sequences * kMaxStepTokens * layout.num_kv_heads;
  if (Status s = take(2 * tokens * layout.head_dim, &step_); !s) return s;
  if (Status s = take(queries * layout.head_dim, &q_); !s) return s;
  if (Status s = take(queries * layout.head_dim, &out_); !s) return s;
  if (Status s = take(queries, &lse_); !s) return s;
  return take(queries, &shift_);
}

Status DeviceBasisStore::coordinates_for(bool is_prompt, int64_t values, float** memory) {
  *memory = is_prompt ? prompt_ : step_;
  if (!is_prompt || values <= prompt_values_) return Status::ok();
  // The stream may still use the smaller one.
  if (Status s = cuda_status(cudaStreamSynchronize(stream_), "basis"); !s) return s;
  (void)cudaFree(prompt_);
  prompt_ = nullptr;
  prompt_values_ = 0;
  void* p = nullptr;
  if (Status s = device_allocate(2 * values * sizeof(float), "basis", &p); !s) return s;
  *memory = prompt_ = static_cast<float*>(p);
  prompt_values_ = values;
  return Status::ok();
}

BasisVectors DeviceBasisStore::vectors(const BasisOperand& operand, int32_t heads, int64_t tokens,
                                       int32_t layer) const {
  BasisVectors v;
  v.operand = operand;
  v.first_row = layer * config_.layout.num_kv_heads;
  v.kv_heads = config_.layout.num_kv_heads;
  v.heads = heads;
  v.tokens = tokens;
  v.sm_scale = static_cast<float>(config_.layout.sm_scale);
  return v;
}

Status DeviceBasisStore::append(const AppendCall& call) {
  const Result<Slots> slots = inner_->sequences().admit_append(call);
  if (!slots) return slots.status();
  if (!is_aligned(call.k) || !is_aligned(call.v)) {
    return Status(StatusCode::kInvalidArgument, "k or v is misaligned");
  }
  const CacheLayout& layout = config_.layout;
  const int64_t tokens = int64_t{call.sequences.count} * call.tokens;
  const int64_t values = tokens * layout.num_kv_heads * layout.head_dim;
  const bool is_prompt = inner_->sequences().phase(slots->front()) == SequencePhase::kPrompt;
  float* memory = nullptr;
  if (Status s = coordinates_for(is_prompt, values, &memory); !s) return s;
  const void* from[2] = {call.k, call.v};
  BasisBatch batch;
  batch.count = 2;
  for (int32_t c = 0; c < 2; ++c) {
    BasisVectors& v = batch.part[c];
    v = vectors(apply_[c], layout.num_kv_heads, tokens, call.layer);
    v.dtype = layout.dtype;
    v.x = from[c];
    v.y = memory + c * values;
  }
  if (Status s = map_basis(batch, stream_); !s) return s;
  AppendCall inner = call;
  inner.k = memory;
  inner.v = memory + values;
  return inner_->append(inner);
}

Status DeviceBasisStore::attend(const AttendRequest& request) {
  if (Status s = inner_->sequences().admit_attend(request).status(); !s) return s;
  if (Status s = check_query_dtype(config_, request.dtype); !s) return s;
  if (Status s = check_sinks_in(basis(), request.sinks); !s) return s;
  const int32_t count = request.sequences.count * request.q_len;
  const int32_t heads = config_.layout.num_q_heads;
  const bool is_bfloat16 = request.dtype == DType::kBFloat16;
  BasisVectors q = vectors(query_[is_bfloat16], heads, count, request.layer);
  q.dtype = request.dtype;
  q.x = request.q;
  q.y = q_;
  q.lse_shift = shift_;
  BasisVectors out = vectors(undo_, heads, count, request.layer);
  out.out_dtype = request.dtype;
  out.x = out_;
  out.y = request.out;
  out.lse_shift = query_[0].mean == nullptr ? nullptr : shift_;
  out.lse_in = lse_;
  out.lse_out = request.lse;
  if (Status s = out.validate(); !s) return s;
  if (Status s = map_basis({{q, {}}, 1}, stream_); !s) return s;
  AttendRequest inner = request;
  inner.dtype = DType::kFloat16;
  inner.q = q_;
  inner.out = out_;
  inner.lse = lse_;
  if (Status s = inner_->attend(inner); !s) return s;
  return map_basis({{out, {}}, 1}, stream_);
}

}  // namespace tierkv
