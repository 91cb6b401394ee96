// SPDX-License-Identifier: Apache-2.0
// tierkv in one include: every public C++ header, and CacheFile, which reads compressed caches.
//
// Where to look for what:
//   kv_store.h           the cache of many sequences, from prompt to attention, on host or GPU
//   profile.h            statistics of a model, for a store
//   format.h, policy.h   what a compressed token looks like, and which tier a token belongs to
//   page.h, codec.h      tokens into unified pages and back, on the host
//   allocator.h          which page belongs to which row of which sequence
//   attention.h          attention over the pages, on the GPU, without decompressing them to memory
//   engine.h             the cache of a serving engine that has block tables of its own
//   significance.h       how much later queries look at each token of a prompt
//   container.h          `.tkv` files chunk by chunk; CacheFile below decodes them whole
//   status.h             errors are values: nothing here throws, exits or prints
//
// C++17, free of CUDA headers. Link tierkv::tierkv (shared) or tierkv::tierkv_static. From C, or
// where the library's C++ ABI must not matter: tierkv_c.h.
//
//   Result<CacheFile> cache = CacheFile::open("cache.tkv");
//   if (!cache) return fail(cache.status().message());
//   Result<CacheLayer> layer = cache->decode_layer(0, 3);  // sequence 0, layer 3
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tierkv/allocator.h"
#include "tierkv/attention.h"
#include "tierkv/basis.h"
#include "tierkv/codec.h"
#include "tierkv/container.h"
#include "tierkv/engine.h"
#include "tierkv/format.h"
#include "tierkv/kv_store.h"
#include "tierkv/layout.h"
#include "tierkv/page.h"
#include "tierkv/policy.h"
#include "tierkv/profile.h"
#include "tierkv/sequence.h"
#include "tierkv/significance.h"
#include "tierkv/status.h"
#include "tierkv/tierkv_c.h"

namespace tierkv {

// A decoded layer; pruned tokens are zeros.
struct CacheLayer {
  std::vector<float> k;         // [num_kv_heads, num_tokens, head_dim]
  std::vector<float> v;         // likewise
  std::vector<uint8_t> pruned;  // [num_kv_heads, num_tokens]: 1 where the token was dropped
};

// A `.tkv` container that is open for reading. Several threads may decode from it at once.
class CacheFile {
 public:
  static Result<CacheFile> open(const std::string& path) {
    tkv_container* handle = nullptr;
    tkv_error error = new_struct<tkv_error>();
    if (Status s = to_status(tkv_container_open(path.c_str(), &handle, &error), error); !s)
      return s;
    return CacheFile(handle);
  }

  CacheLayout layout() const {
    const tkv_container_info i = info();
    CacheLayout layout;
    layout.num_layers = i.num_layers;
    layout.num_q_heads = i.num_q_heads;
    layout.num_kv_heads = i.num_kv_heads;
    layout.head_dim = i.head_dim;
    layout.dtype = static_cast<DType>(i.dtype);
    layout.rope_applied = i.rope_applied != 0;
    layout.rope_theta = i.rope_theta;
    layout.sm_scale = i.sm_scale;
    return layout;
  }
  std::string preset() const { return info().preset; }
  std::string model_id() const { return info().model_id; }
  int64_t file_bytes() const { return info().file_bytes; }
  int32_t num_sequences() const { return info().num_sequences; }

  // Id, kind and tokens. kOutOfRange where there is no such sequence.
  Result<ContainerSequence> sequence(int32_t index) const {
    tkv_sequence_info s = new_struct<tkv_sequence_info>();
    tkv_error error = new_struct<tkv_error>();
    if (Status status =
            to_status(tkv_container_get_sequence(handle_.get(), index, &s, &error), error);
        !status) {
      return status;
    }
    return ContainerSequence{s.id, s.kind, std::vector<int32_t>(s.tokens, s.tokens + s.num_tokens)};
  }

  // threads 0: all cores. kOutOfRange: no such sequence or layer; kCorrupt names the chunk.
  Result<CacheLayer> decode_layer(int32_t sequence, int32_t layer, int32_t threads = 0) const {
    tkv_sequence_info s = new_struct<tkv_sequence_info>();
    tkv_error error = new_struct<tkv_error>();
    if (Status status =
            to_status(tkv_container_get_sequence(handle_.get(), sequence, &s, &error), error);
        !status) {
      return status;
    }
    const tkv_container_info i = info();
    const auto tokens = static_cast<size_t>(s.num_tokens * i.num_kv_heads);
    CacheLayer out;
    out.k.resize(tokens * static_cast<size_t>(i.head_dim));
    out.v.resize(out.k.size());
    out.pruned.resize(tokens);
    tkv_layer request = new_struct<tkv_layer>();
    request.sequence = sequence;
    request.layer = layer;
    request.threads = threads;
    request.k = out.k.data();
    request.v = out.v.data();
    request.pruned = out.pruned.data();
    if (Status status =
            to_status(tkv_container_decode_layer(handle_.get(), &request, &error), error);
        !status) {
      return status;
    }
    return out;
  }

  // Every checksum, then everything decoded: the first thing that is wrong.
  Status verify(int32_t threads = 0) const {
    tkv_error error = new_struct<tkv_error>();
    return to_status(tkv_container_verify(handle_.get(), threads, &error), error);
  }

 private:
  struct Destroy {
    void operator()(tkv_container* c) const { tkv_container_destroy(c); }
  };

  explicit CacheFile(tkv_container* handle) : handle_(handle) {}

  template <class T>
  static T new_struct() {
    T s{};
    s.struct_size = sizeof(T);
    return s;
  }
  // TKV_INTERNAL keeps its number, which StatusCode does not name.
  static Status to_status(tkv_status code, const tkv_error& error) {
    return code == TKV_OK ? Status::ok() : Status(static_cast<StatusCode>(code), error.message);
  }
  tkv_container_info info() const {
    tkv_container_info i = new_struct<tkv_container_info>();
    // Fails for a null handle alone.
    tkv_container_get_info(handle_.get(), &i, nullptr);
    return i;
  }

  std::unique_ptr<tkv_container, Destroy> handle_;
};

}  // namespace tierkv
