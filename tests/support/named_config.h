// Variations of the small store, by name, for the traces of both back ends.
#pragma once

#include <gtest/gtest.h>

#include <ostream>
#include <string>

#include "tests/support/small_store.h"

namespace tierkv::testing {

struct NamedConfig {
  const char* name;
  KvStoreConfig config;

  friend void PrintTo(const NamedConfig& c, std::ostream* os) { *os << to_json(c.config); }
};

inline KvStoreConfig varied(void (*change)(KvStoreConfig*)) {
  KvStoreConfig c = small_config();
  change(&c);
  return c;
}
inline std::string config_name(const ::testing::TestParamInfo<NamedConfig>& named) {
  return named.param.name;
}

inline NamedConfig raw_window_and_sinks() {
  return {"raw_window_sinks", varied([](KvStoreConfig* c) {
            c->window_format = raw_tier();
            c->policy.sink_tokens = 4;
            c->policy.window_tokens = 11;
            c->page_bytes = 4352;
            c->score_interval = 3;
            c->layout.dtype = DType::kBFloat16;
          })};
}
// alpha_l = 0, 32-bit input.
inline void keep_all(KvStoreConfig* c) {
  c->policy.alpha_low = 0;
  c->low_format = token_wise_tier(2, 2);
  c->layout.dtype = DType::kFloat32;
  c->policy.window_tokens = 16;
}

}  // namespace tierkv::testing
