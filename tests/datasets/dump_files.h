// SPDX-License-Identifier: Apache-2.0
// Small dumps for the tests of datasets/: a directory of one test, valid dumps with random contents
// and the values they hold.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "datasets/dump.h"
#include "tests/support/fresh_random.h"
#include "tierkv/half.h"

namespace tierkv::datasets {

class DumpTest : public RandomTest {
 protected:
  DumpTest() {
    const auto* test = testing::UnitTest::GetInstance()->current_test_info();
    std::string name = std::string("tierkv_") + test->test_suite_name() + "_" + test->name() + "_" +
                       std::to_string(getpid());
    for (char& c : name) c = c == '/' ? '_' : c;
    dir_ = std::filesystem::temp_directory_path() / name;
    std::filesystem::create_directories(dir_);
  }
  ~DumpTest() override { std::filesystem::remove_all(dir_); }
  std::string path(const std::string& name) const { return (dir_ / name).string(); }
  int64_t files_in_dir() const {
    return std::distance(std::filesystem::directory_iterator(dir_),
                         std::filesystem::directory_iterator());
  }
  // Normal values that the type holds exactly.
  std::vector<float> values(int64_t n, DType t) {
    std::normal_distribution<float> normal(0.5f, 2.0f);
    std::vector<float> x(n);
    for (float& v : x) {
      v = normal(rng_);
      if (t == DType::kFloat16) v = half_to_float(float_to_half(v));
      if (t == DType::kBFloat16) v = bfloat16_to_float(float_to_bfloat16(v));
    }
    return x;
  }

  std::filesystem::path dir_;
};

inline DumpInfo small_info(DType dtype = DType::kFloat16, int32_t head_dim = 8) {
  DumpInfo info;
  info.layout.num_layers = 2;
  info.layout.num_q_heads = 4;
  info.layout.num_kv_heads = 2;
  info.layout.head_dim = head_dim;
  info.layout.dtype = dtype;
  info.layout.rope_theta = 10000;
  info.layout.sm_scale = 1 / std::sqrt(static_cast<double>(head_dim));
  info.model_id = "test/model";
  info.created_by = "test";
  return info;
}

// One sequence "a" of `tokens` tokens with q at the last two positions and significance, all values
// one quarter of their flat index modulo 64.
inline Status write_small(const std::string& path, int64_t tokens,
                          const DumpInfo& info = small_info()) {
  Result<DumpWriter> writer = DumpWriter::create(path, info);
  if (!writer) return writer.status();
  std::vector<float> x(tokens * info.layout.head_dim);
  for (size_t i = 0; i < x.size(); ++i) x[i] = 0.25f * static_cast<float>(i % 64);
  std::vector<int32_t> ids(tokens, 7), positions;
  for (int64_t t = std::max<int64_t>(0, tokens - 2); t < tokens; ++t) {
    positions.push_back(static_cast<int32_t>(t));
  }
  Status s = writer->begin_sequence("a", "text", ids);
  for (int32_t l = 0; s && l < info.layout.num_layers; ++l) {
    s = writer->begin_layer(positions, true);
    for (int32_t h = 0; s && h < info.layout.num_kv_heads; ++h) {
      s = writer->write_row(h, Component::kKey, x.data());
      if (s) s = writer->write_row(h, Component::kValue, x.data());
      if (s) s = writer->write_significance(h, x.data());
    }
    for (int32_t h = 0; s && h < info.layout.num_q_heads; ++h) {
      s = writer->write_queries(h, x.data());
    }
  }
  return s ? writer->finish() : s;
}

inline std::vector<char> file_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

// Everything a dump holds, read through the public interface; the first failure.
inline Status read_everything(const DumpReader& dump) {
  const DumpInfo& info = dump.info();
  RowData row;
  std::vector<float> x;
  std::vector<int32_t> ids;
  for (int32_t s = 0; s < static_cast<int32_t>(info.sequences.size()); ++s) {
    if (Status st = dump.read_tokens(s, &ids); !st) return st;
    for (int32_t l = 0; l < info.layout.num_layers; ++l) {
      const LayerInfo& layer = info.sequences[s].layers[l];
      for (int32_t h = 0; h < info.layout.num_kv_heads; ++h) {
        if (Status st = dump.read_row(s, l, h, Component::kKey, &row); !st) return st;
        if (Status st = dump.read_row(s, l, h, Component::kValue, &row); !st) return st;
        if (!layer.has_significance) continue;
        if (Status st = dump.read_significance(s, l, h, &x); !st) return st;
      }
      if (!layer.has_q) continue;
      if (Status st = dump.read_query_positions(s, l, &ids); !st) return st;
      if (Status st = dump.read_queries(s, l, 0, info.layout.num_q_heads, &x); !st) return st;
    }
  }
  return Status::ok();
}

}  // namespace tierkv::datasets
