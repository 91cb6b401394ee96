// SPDX-License-Identifier: Apache-2.0
// Opens a `.tkv` container and prints what every layer of its first sequence holds.
#include <cmath>
#include <cstdio>

#include "tierkv/tierkv.h"

namespace {

int fail(const tierkv::Status& status) {
  std::fprintf(stderr, "%s: %s\n", tierkv::status_name(status.code()), status.message().c_str());
  return 1;
}

double norm(const std::vector<float>& x) {
  double sum = 0;
  for (const float value : x) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  // [readme]
  const tierkv::Result<tierkv::CacheFile> cache = tierkv::CacheFile::open(argv[1]);
  if (!cache) return fail(cache.status());
  const tierkv::CacheLayout layout = cache->layout();
  std::printf("%s: %d layers, %d kv heads of %d\n", cache->preset().c_str(), layout.num_layers,
              layout.num_kv_heads, layout.head_dim);
  for (int32_t i = 0; i < layout.num_layers; ++i) {
    const tierkv::Result<tierkv::CacheLayer> layer = cache->decode_layer(0, i);
    if (!layer) return fail(layer.status());
    std::printf("layer %d: norm of keys %.9g, of values %.9g\n", i, norm(layer->k), norm(layer->v));
  }
  // [readme]
  return 0;
}
