// SPDX-License-Identifier: Apache-2.0
// `.tkv` containers: what can be done with them without HDF5.
#include "capi/abi.h"
#include "codec/file/cache_decoder.h"
#include "codec/host/parallel.h"

struct tkv_container {
  tierkv::CacheDecoder decoder;
};

namespace tierkv::capi {
namespace {

Status open(Result<ContainerReader> reader, tkv_container** out) {
  if (!reader) return reader.status();
  Result<CacheDecoder> decoder = CacheDecoder::open(std::move(*reader));
  if (decoder) *out = new tkv_container{std::move(*decoder)};
  return decoder.status();
}

Status get_info(const tkv_container* container, tkv_container_info* out) {
  tkv_container_info info;
  if (Status s = read_struct(out, "info", &info); !s) return s;
  if (container == nullptr) return invalid("container is null");
  const ContainerModel& model = container->decoder.model();
  info.file_bytes = container->decoder.container().file_bytes();
  info.num_sequences = model.num_sequences;
  info.num_layers = model.layout.num_layers;
  info.num_q_heads = model.layout.num_q_heads;
  info.num_kv_heads = model.layout.num_kv_heads;
  info.head_dim = model.layout.head_dim;
  info.dtype = static_cast<tkv_dtype>(model.layout.dtype);
  info.rope_applied = model.layout.rope_applied ? 1 : 0;
  info.rope_theta = model.layout.rope_theta;
  info.sm_scale = model.layout.sm_scale;
  info.preset = model.preset.c_str();
  info.model_id = model.model_id.c_str();
  info.created_by = model.created_by.c_str();
  write_struct(info, out);
  return Status::ok();
}

Status check_sequence(const tkv_container* container, int32_t sequence) {
  if (container == nullptr) return invalid("container is null");
  const auto count = static_cast<int32_t>(container->decoder.sequences().size());
  if (sequence >= 0 && sequence < count) return Status::ok();
  return Status(StatusCode::kOutOfRange,
                "sequence " + std::to_string(sequence) + " is not one of " + std::to_string(count));
}

Status get_sequence(const tkv_container* container, int32_t sequence, tkv_sequence_info* out) {
  tkv_sequence_info info;
  if (Status s = read_struct(out, "info", &info); !s) return s;
  if (Status s = check_sequence(container, sequence); !s) return s;
  const ContainerSequence& stored = container->decoder.sequences()[sequence];
  info.num_tokens = static_cast<int64_t>(stored.tokens.size());
  info.id = stored.id.c_str();
  info.kind = stored.kind.c_str();
  info.tokens = stored.tokens.data();
  write_struct(info, out);
  return Status::ok();
}

Status decode_head(const CacheDecoder& decoder, const tkv_layer& layer, int32_t head) {
  DecodedRow row;
  if (Status s = decoder.decode_row(layer.sequence, layer.layer, head, &row); !s) return s;
  const size_t values = head * row.k.size();
  if (layer.k != nullptr) std::copy(row.k.begin(), row.k.end(), layer.k + values);
  if (layer.v != nullptr) std::copy(row.v.begin(), row.v.end(), layer.v + values);
  if (layer.pruned == nullptr) return Status::ok();
  std::copy(row.pruned.begin(), row.pruned.end(), layer.pruned + head * row.pruned.size());
  return Status::ok();
}

Status decode_layer(const tkv_container* container, const tkv_layer* layer) {
  tkv_layer l;
  int32_t threads = 0;
  if (Status s = read_struct(layer, "layer", &l); !s) return s;
  if (Status s = check_sequence(container, l.sequence); !s) return s;
  if (Status s = read_threads(l.threads, &threads); !s) return s;
  if (l.k == nullptr && l.v == nullptr && l.pruned == nullptr) {
    return invalid("k, v and pruned are all null");
  }
  const CacheLayout& layout = container->decoder.model().layout;
  if (l.layer < 0 || l.layer >= layout.num_layers) {
    return Status(StatusCode::kOutOfRange, "layer " + std::to_string(l.layer) + " is not one of " +
                                               std::to_string(layout.num_layers));
  }
  return try_parallel_for(layout.num_kv_heads, threads, [&](int64_t head) {
    return decode_head(container->decoder, l, static_cast<int32_t>(head));
  });
}

}  // namespace
}  // namespace tierkv::capi

namespace capi = tierkv::capi;

extern "C" {

tkv_status tkv_container_open(const char* path, tkv_container** container, tkv_error* error) {
  return capi::guarded(error, [&]() -> tierkv::Status {
    if (path == nullptr || container == nullptr) return capi::invalid("path or container is null");
    return capi::open(tierkv::ContainerReader::open(path), container);
  });
}

tkv_status tkv_container_open_bytes(const uint8_t* bytes, size_t size, const char* name,
                                    tkv_container** container, tkv_error* error) {
  return capi::guarded(error, [&]() -> tierkv::Status {
    if ((bytes == nullptr && size > 0) || name == nullptr || container == nullptr) {
      return capi::invalid("bytes, name or container is null");
    }
    return capi::open(
        tierkv::ContainerReader::from_bytes(std::vector<uint8_t>(bytes, bytes + size), name),
        container);
  });
}

void tkv_container_destroy(tkv_container* container) {
  delete container;
}

tkv_status tkv_container_get_info(const tkv_container* container, tkv_container_info* info,
                                  tkv_error* error) {
  return capi::guarded(error, [&] { return capi::get_info(container, info); });
}

tkv_status tkv_container_get_sequence(const tkv_container* container, int32_t sequence,
                                      tkv_sequence_info* info, tkv_error* error) {
  return capi::guarded(error, [&] { return capi::get_sequence(container, sequence, info); });
}

tkv_status tkv_container_decode_layer(const tkv_container* container, const tkv_layer* layer,
                                      tkv_error* error) {
  return capi::guarded(error, [&] { return capi::decode_layer(container, layer); });
}

tkv_status tkv_container_verify(const tkv_container* container, int32_t threads, tkv_error* error) {
  return capi::guarded(error, [&]() -> tierkv::Status {
    int32_t n = 0;
    if (container == nullptr) return capi::invalid("container is null");
    if (tierkv::Status s = capi::read_threads(threads, &n); !s) return s;
    return tierkv::verify(container->decoder, n, {});
  });
}

}  // extern "C"
