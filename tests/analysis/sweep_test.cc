// SPDX-License-Identifier: Apache-2.0
// A preset that fails on a dump is left out there; the others and the other dumps are measured.
#include "tools/analysis/sweep.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "tests/datasets/dump_files.h"

namespace tierkv::analysis {
namespace {

using testing::HasSubstr;

constexpr int32_t kTokens = 400, kDim = 64;

class SweepTest : public datasets::DumpTest {
 protected:
  // One layer of one head, q at `positions`; `largest` is one channel of token 200's key.
  datasets::DumpReader dump(const char* name, const std::vector<int32_t>& positions,
                            float largest = 1) {
    datasets::DumpInfo info = datasets::small_info(DType::kFloat16, kDim);
    info.layout.num_layers = info.layout.num_kv_heads = 1;
    info.layout.num_q_heads = 2;
    Result<datasets::DumpWriter> w = datasets::DumpWriter::create(path(name), info);
    std::vector<float> k = values(kTokens * kDim, DType::kFloat16), v = k;
    const std::vector<float> q =
        values(static_cast<int64_t>(positions.size()) * kDim, DType::kFloat16);
    k[200 * kDim + 3] = largest;
    EXPECT_TRUE(w->begin_sequence("a", "text", std::vector<int32_t>(kTokens, 1)));
    EXPECT_TRUE(w->begin_layer(positions, false));
    EXPECT_TRUE(w->write_row(0, Component::kKey, k.data()));
    EXPECT_TRUE(w->write_row(0, Component::kValue, v.data()));
    for (int32_t h = 0; h < 2; ++h) EXPECT_TRUE(w->write_queries(h, q.data()));
    EXPECT_TRUE(w->finish());
    return std::move(datasets::DumpReader::open(path(name)).value());
  }
  static AnalyzeOptions options(std::initializer_list<const char*> presets) {
    AnalyzeOptions out;
    out.threads = 2;
    out.details = true;
    for (const char* p : presets) out.presets.push_back(parse_preset(p).value());
    return out;
  }
  static std::vector<int32_t> newest(int32_t n) {
    std::vector<int32_t> out(n);
    for (int32_t i = 0; i < n; ++i) out[i] = kTokens - n + i;
    return out;
  }
};

TEST_F(SweepTest, QueriesThatAreNotTheNewestLeaveSnapKvOut) {
  std::vector<int32_t> spread;
  for (int32_t t = 0; t < kTokens; t += 4) spread.push_back(t);
  std::vector<datasets::DumpReader> readers;
  readers.push_back(dump("spread.h5", spread));
  const Result<SweepResult> r = sweep(readers, options({"k8v4", "snapkv"}), false);
  ASSERT_TRUE(r) << r.status().message();
  ASSERT_EQ(r->results.size(), 1u);
  EXPECT_EQ(r->results[0].preset, "k8v4");
  ASSERT_EQ(r->skipped.size(), 1u);
  EXPECT_EQ(r->skipped[0].preset, "snapkv");
  EXPECT_THAT(r->skipped[0].reason, HasSubstr("q of the newest"));
}

TEST_F(SweepTest, AValueThatOnePresetCannotHoldLeavesThatPresetOut) {
  const AnalyzeOptions o = options({"k8v4", "step", "fp16"});
  std::vector<datasets::DumpReader> readers;
  readers.push_back(dump("good.h5", newest(64)));
  readers.push_back(dump("outlier.h5", newest(64), 60000));
  const Result<SweepResult> r = sweep(readers, o, false);
  ASSERT_TRUE(r) << r.status().message();
  std::vector<std::string> got;
  for (const AnalyzeResult& x : r->results) {
    got.push_back(std::filesystem::path(x.file).filename().string() + " " + x.preset);
  }
  EXPECT_THAT(got, testing::ElementsAre("all k8v4", "all fp16", "good.h5 k8v4", "good.h5 step",
                                        "good.h5 fp16", "outlier.h5 k8v4", "outlier.h5 fp16"));
  ASSERT_EQ(r->skipped.size(), 1u);
  EXPECT_EQ(r->skipped[0].file, path("outlier.h5"));
  EXPECT_EQ(r->skipped[0].preset, "step");
  EXPECT_THAT(r->skipped[0].reason, HasSubstr("outlier.h5: /seq/a/layer/0: preset step: kv head"));

  // What the others measure does not depend on it.
  std::vector<datasets::DumpReader> alone;
  alone.push_back(std::move(readers[1]));
  const Result<SweepResult> same = sweep(alone, options({"k8v4"}), false);
  ASSERT_TRUE(same);
  EXPECT_EQ(bits_per_value(same->results[0].tally), bits_per_value(r->results[5].tally));
  EXPECT_EQ(attention_error(same->results[0].tally), attention_error(r->results[5].tally));
  // analyze() itself still ends.
  EXPECT_EQ(analyze(alone[0], o).status().code(), StatusCode::kOutOfRange);
}

TEST_F(SweepTest, ADamagedDumpEndsTheSweep) {
  std::vector<datasets::DumpReader> readers;
  readers.push_back(dump("good.h5", newest(64)));
  std::filesystem::resize_file(path("good.h5"), std::filesystem::file_size(path("good.h5")) / 2);
  EXPECT_FALSE(sweep(readers, options({"k8v4", "fp16"}), false));
}

}  // namespace
}  // namespace tierkv::analysis
