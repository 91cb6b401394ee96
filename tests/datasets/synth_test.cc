// SPDX-License-Identifier: Apache-2.0
#include "datasets/synth.h"

#include <algorithm>
#include <numeric>

#include "datasets/portable_math.h"
#include "tests/datasets/dump_files.h"

namespace tierkv::datasets {
namespace {

class SynthTest : public DumpTest {
 protected:
  static SynthSpec small_spec() {
    SynthSpec spec;
    spec.layout = small_info(DType::kFloat16, 64).layout;
    spec.layout.sm_scale = 0;
    spec.tokens = {300, 1};
    spec.num_queries = 16;
    return spec;
  }
  DumpReader make(const SynthSpec& spec, const std::string& name) {
    const Status s = synthesize(spec, path(name), {});
    EXPECT_TRUE(s) << s.message();
    Result<DumpReader> dump = DumpReader::open(path(name));
    EXPECT_TRUE(dump) << dump.status().message();
    return std::move(*dump);
  }
  static std::vector<float> row(const DumpReader& dump, Component c) {
    RowData data;
    EXPECT_TRUE(dump.read_row(0, 1, 1, c, &data));
    std::vector<float> x(data.tokens * data.head_dim);
    row_to_float(data, 0, data.tokens, x.data());
    return x;
  }
  static uint64_t hash(uint64_t h, const std::vector<float>& x) {  // FNV-1a of the bit patterns
    for (const float v : x) h = (h ^ float_bits(v)) * 1099511628211ull;
    return h;
  }
};

TEST_F(SynthTest, PortableFunctionsAgreeWithTheLibrary) {
  std::uniform_real_distribution<double> unit(0, 1);
  for (int i = 0; i < 100000; ++i) {
    const double u = unit(rng_) + 0x1p-60, x = 200 * u - 100;
    // Within 4 ulp where the result is not near a zero of the function.
    EXPECT_NEAR(portable_log(u), std::log(u), 1e-15 * (1 + std::fabs(std::log(u)))) << u;
    EXPECT_NEAR(portable_exp(x) / std::exp(x), 1, 3e-14) << x;
    EXPECT_NEAR(portable_cos_turns(u), std::cos(4 * kHalfPi * u), 2e-15) << u;
  }
  EXPECT_EQ(portable_log(1), 0);
  EXPECT_EQ(portable_exp(0), 1);
  EXPECT_EQ(portable_cos_turns(0), 1);
}

// Pinned: a change here changes every synthetic dump that anyone has quoted numbers from.
TEST_F(SynthTest, ValuesArePinned) {
  const DumpReader dump = make(small_spec(), "a.h5");
  uint64_t h = 14695981039346656037ull;
  h = hash(h, row(dump, Component::kKey));
  h = hash(h, row(dump, Component::kValue));
  std::vector<float> q;
  ASSERT_TRUE(dump.read_queries(0, 0, 0, 4, &q));
  h = hash(h, q);
  EXPECT_EQ(h, 12320469094624254757ull);
}

TEST_F(SynthTest, TheSeedDecidesEverything) {
  SynthSpec spec = small_spec();
  make(spec, "a.h5");
  make(spec, "b.h5");
  EXPECT_EQ(file_bytes(path("a.h5")), file_bytes(path("b.h5")));
  spec.seed = 2;
  make(spec, "c.h5");
  EXPECT_NE(file_bytes(path("a.h5")), file_bytes(path("c.h5")));
}

TEST_F(SynthTest, EveryTypeAndPartIsReadable) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const SignificanceKind kind :
         {SignificanceKind::kNone, SignificanceKind::kExact, SignificanceKind::kSampled}) {
      SynthSpec spec = small_spec();
      spec.layout.dtype = dtype;
      spec.significance = kind;
      spec.num_queries = kind == SignificanceKind::kNone ? 0 : 1000;
      const DumpReader dump = make(spec, "a.h5");
      EXPECT_EQ(dump.info().layout.dtype, dtype);
      EXPECT_DOUBLE_EQ(dump.info().layout.sm_scale, 0.125);
      const LayerInfo& layer = dump.info().sequences[0].layers[0];
      EXPECT_EQ(layer.has_significance, kind != SignificanceKind::kNone);
      EXPECT_EQ(layer.num_queries, kind == SignificanceKind::kNone ? 0 : 300);
      const Status s = read_everything(dump);
      EXPECT_TRUE(s) << s.message();
    }
  }
}

TEST_F(SynthTest, OutlierChannelsArePlanted) {
  for (const int32_t wanted : {0, 4, 64}) {
    SynthSpec spec = small_spec();
    spec.outlier_channels = wanted;
    spec.sink_tokens = 0;
    spec.heavy_fraction = 0;
    const std::vector<float> k = row(make(spec, "a.h5"), Component::kKey);
    int32_t found = 0;
    for (int32_t c = 0; c < 64; ++c) {
      double mean = 0;
      for (int64_t t = 0; t < 300; ++t) mean += k[t * 64 + c] / 300;
      // Outliers have means of 4 to 16, others of standard deviation 1/sqrt(300): 3 is 50 sigma
      // from one side and 17 from the other.
      found += std::fabs(mean) > 3;
      EXPECT_LT(std::fabs(mean), 17);
    }
    EXPECT_EQ(found, wanted);
  }
}

TEST_F(SynthTest, AttentionHasSinksAndAHeavyTail) {
  SynthSpec spec = small_spec();
  spec.tokens = {1500};
  const DumpReader dump = make(spec, "a.h5");
  std::vector<float> s;
  ASSERT_TRUE(dump.read_significance(0, 1, 1, &s));
  const double sinks = std::accumulate(s.begin(), s.begin() + 4, 0.0);
  const double total = std::accumulate(s.begin(), s.end(), 0.0);
  EXPECT_GT(sinks / 4, 20 * total / 1500);  // sinks weigh many times the mean token
  std::sort(s.begin() + 4, s.end(), std::greater<>());
  const double top = std::accumulate(s.begin() + 4, s.begin() + 4 + 150, 0.0);
  EXPECT_GT(top, 0.25 * (total - sinks));  // a tenth of the tokens, over a quarter of the rest
  const std::vector<float> v = row(dump, Component::kValue);
  std::vector<double> norms;
  for (int64_t t = 4; t < 1500; ++t) {
    norms.push_back(std::sqrt(
        std::inner_product(v.begin() + t * 64, v.begin() + (t + 1) * 64, v.begin() + t * 64, 0.0)));
  }
  std::sort(norms.begin(), norms.end());
  // Log-normal with sigma 0.4: the 95th percentile over the 5th is exp(1.32), 3.7.
  EXPECT_NEAR(std::log(norms[1420] / norms[75]), 1.32, 0.25);
}

// Sampling all positions of a short sequence is the exact definition.
TEST_F(SynthTest, SampledSignificanceOfAShortSequenceIsExact) {
  SynthSpec spec = small_spec();
  spec.tokens = {60};
  spec.significance = SignificanceKind::kExact;
  std::vector<float> exact, sampled;
  ASSERT_TRUE(make(spec, "a.h5").read_significance(0, 0, 1, &exact));
  spec.significance = SignificanceKind::kSampled;
  ASSERT_TRUE(make(spec, "b.h5").read_significance(0, 0, 1, &sampled));
  ASSERT_EQ(exact.size(), sampled.size());
  // Both in double, rounded to float once.
  for (size_t i = 0; i < exact.size(); ++i) EXPECT_NEAR(exact[i], sampled[i], 1e-6 * exact[i]);
}

TEST_F(SynthTest, BadSpecsAreNamedAndLeaveNothing) {
  const auto message = [&](const std::function<void(SynthSpec*)>& change) {
    SynthSpec spec = small_spec();
    change(&spec);
    const Status s = synthesize(spec, path("x.h5"), {});
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    return s.message();
  };
  using S = SynthSpec;
  EXPECT_NE(message([](S* s) { s->tokens = {}; }).find("tokens"), std::string::npos);
  EXPECT_NE(message([](S* s) { s->tokens = {0}; }).find("tokens"), std::string::npos);
  EXPECT_NE(message([](S* s) { s->layout.head_dim = 4097; }).find("head_dim"), std::string::npos);
  EXPECT_NE(message([](S* s) { s->outlier_channels = 65; }).find("outliers"), std::string::npos);
  EXPECT_NE(message([](S* s) { s->heavy_fraction = NAN; }).find("heavy"), std::string::npos);
  EXPECT_NE(message([](S* s) { s->num_queries = -1; }).find("queries"), std::string::npos);
  EXPECT_NE(message([](S* s) { s->sink_tokens = -1; }).find("sinks"), std::string::npos);
  EXPECT_EQ(files_in_dir(), 0);
}

}  // namespace
}  // namespace tierkv::datasets
