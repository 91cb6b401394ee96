// SPDX-License-Identifier: Apache-2.0
#include "store/rows/coded/device_coded_rows.cuh"

namespace tierkv::store {

Result<std::unique_ptr<DeviceRowFormat>> make_device_coded_rows(const StoreConfig& config,
                                                                RowFormat* host) {
  auto* const coded = static_cast<CodedRows*>(host);
  if (coded->format().key_books > 1) {
    return Status(StatusCode::kUnsupported, "format.key_books: a device takes 1");
  }
  for (int32_t l = 0; l < config.layout.num_layers; ++l) {
    if (coded->is_raw_layer(l) || coded->needs_tokens(l)) continue;
    for (int32_t h = 0; h < config.layout.num_kv_heads; ++h) {
      const Result<WeightedRow> row = coded->fit_row(l, h, {});
      const Status s = row ? check_weighted_keys(*row) : row.status();
      if (!s) {
        return s.with_context("profile, layer " + std::to_string(l) + ", kv_head " +
                              std::to_string(h));
      }
    }
  }
  return std::unique_ptr<DeviceRowFormat>(std::make_unique<DeviceCodedRows>(config, coded));
}

}  // namespace tierkv::store
