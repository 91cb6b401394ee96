// Balanced steps: nothing with fewer bits has as small an error, and a calibrated profile has them.
#include "tools/analysis/step_balance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <numeric>
#include <random>

#include "datasets/synth.h"
#include "tools/analysis/analyze.h"
#include "tools/analysis/calibrate.h"

namespace tierkv::analysis {
namespace {

class StepBalanceTest : public testing::Test {
 protected:
  StepBalanceTest() : seed_(std::random_device{}()), random_(seed_) {
    RecordProperty("seed", std::to_string(seed_));
  }
  // Log-uniform in [low, high].
  double spread(double low, double high) {
    return std::exp(std::uniform_real_distribution<>(std::log(low), std::log(high))(random_));
  }
  // Codes of normal values at every step, and errors of some sequences.
  RowRates random_row(int32_t sequences) {
    RowRates row;
    for (std::vector<CodeSample>& samples : row.codes) {
      const double deviation = spread(0.2, 4);
      for (const double step : step_grid()) {
        const auto last = static_cast<int32_t>(std::ceil(4 * deviation / step));
        samples.push_back({-last, {}});
        for (int32_t code = -last; code <= last; ++code) {
          const double x = code * step / deviation;
          samples.back().counts.push_back(static_cast<uint32_t>(1 + 1e6 * std::exp(-x * x / 2)));
        }
      }
    }
    for (int32_t s = 0; s < sequences; ++s)
      row.errors.push_back({spread(0.01, 0.6), spread(0.01, 0.6)});
    return row;
  }
  unsigned seed_;
  std::mt19937 random_;
};

struct Cost {
  double bits = 0, error = 0;
};

using Choice = std::vector<std::array<size_t, 2>>;  // of every row the steps of keys and values

// With a codebook for every component and `heads` rows.
Cost cost_of(const std::vector<RowRates>& rows, size_t heads, const Choice& choice) {
  const std::vector<double> grid = step_grid();
  Cost sum;
  for (size_t r = 0; r < rows.size(); ++r) {
    double error = 0;
    for (const auto& e : rows[r].errors) {
      const double k = e[0] * grid[choice[r][0]], v = e[1] * grid[choice[r][1]];
      error += std::sqrt(k * k + v * v);
    }
    sum.error += error / static_cast<double>(rows[r].errors.size() * rows.size());
  }
  for (size_t first = 0; first < rows.size(); first += heads) {
    for (size_t c = 0; c < 2; ++c) {
      std::map<int32_t, double> shares;
      for (size_t r = first; r < first + heads; ++r) {
        const CodeSample& sample = rows[r].codes[c][choice[r][c]];
        const double n = std::accumulate(sample.counts.begin(), sample.counts.end(), 0.0);
        for (size_t i = 0; i < sample.counts.size(); ++i)
          shares[sample.lowest + static_cast<int32_t>(i)] += sample.counts[i] / n;
      }
      for (const auto& [code, share] : shares) {
        if (share > 0) sum.bits -= share * std::log2(share / static_cast<double>(heads));
      }
    }
  }
  return sum;
}

size_t grid_index(double step) {
  const std::vector<double> grid = step_grid();
  return std::find(grid.begin(), grid.end(), step) - grid.begin();
}

Choice choice_of(const BalancedSteps& balanced) {
  Choice choice;
  for (const auto& step : balanced.steps)
    choice.push_back({grid_index(step[0]), grid_index(step[1])});
  return choice;
}

TEST_F(StepBalanceTest, NothingElseHasFewerBitsAtThatError) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  for (int32_t round = 0; round < 20; ++round) {
    std::vector<RowRates> rows;
    for (int32_t r = 0; r < 7; ++r) rows.push_back(random_row(1 + round % 3));
    const double target = spread(0.02, 0.05);
    const Result<BalancedSteps> balanced = balance_rows(rows, 1, target);
    ASSERT_TRUE(balanced) << balanced.status().message();
    ASSERT_EQ(balanced->steps.size(), rows.size());
    EXPECT_LE(balanced->error, target);
    const Choice chosen = choice_of(*balanced);
    const Cost best = cost_of(rows, 1, chosen);
    EXPECT_NEAR(best.error, balanced->error, 1e-12);
    // The same steps for all, and the choice with a few steps moved.
    const size_t n = step_grid().size();
    std::vector<Choice> others;
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < n; ++j) others.push_back(Choice(rows.size(), {i, j}));
    }
    for (int32_t k = 0; k < 2000; ++k) {
      others.push_back(chosen);
      for (int32_t move = 0; move < 3; ++move) {
        size_t& moved = others.back()[random_() % rows.size()][random_() % 2];
        moved = std::min(n - 1, std::max<size_t>(moved + random_() % 7, 3) - 3);
      }
    }
    for (const auto& other : others) {
      const Cost cost = cost_of(rows, 1, other);
      if (cost.error <= best.error) {
        EXPECT_GE(cost.bits, best.bits - 1e-9);
      }
    }
  }
}

TEST_F(StepBalanceTest, SamplesGrowAtBothEnds) {
  CodeSample sample;
  const std::vector<int16_t> codes = {3, 5, 3, -32768, 32767, 4};
  sample.add(codes.data(), 3);
  EXPECT_EQ(sample.lowest, 3);
  EXPECT_EQ(sample.counts, (std::vector<uint32_t>{2, 0, 1}));
  sample.add(codes.data() + 3, 0);
  sample.add(codes.data() + 3, 3);
  EXPECT_EQ(sample.lowest, -32768);
  ASSERT_EQ(sample.counts.size(), 65536U);
  EXPECT_EQ(sample.total(), 6);
  for (const int32_t code : {-32768, 4, 5, 32767}) EXPECT_EQ(sample.counts[code + 32768], 1U);
}

TEST_F(StepBalanceTest, FineStepsShareTheErrorEvenly) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  // Where a bit halves the step every row has the same error, and keys as much of it as values.
  std::vector<RowRates> rows(6);
  for (RowRates& row : rows) {
    for (std::vector<CodeSample>& samples : row.codes) {
      for (const double step : step_grid())
        samples.push_back({0, std::vector<uint32_t>(std::lround(16 / step), 1)});
    }
    row.errors.push_back({spread(0.05, 0.5), spread(0.05, 0.5)});
  }
  const double target = 0.02;
  const Result<BalancedSteps> balanced = balance_rows(rows, 1, target);
  ASSERT_TRUE(balanced) << balanced.status().message();
  for (size_t r = 0; r < rows.size(); ++r) {
    const double k = balanced->steps[r][0] * rows[r].errors[0][0];
    const double v = balanced->steps[r][1] * rows[r].errors[0][1];
    // Two neighbours of the grid are a factor of 2^(1/4) apart; the choice lies between them.
    EXPECT_LE(std::fabs(std::log2(k / v)), 0.5);
    EXPECT_LE(std::fabs(std::log2(std::hypot(k, v) / target)), 0.5);
  }
}

TEST_F(StepBalanceTest, HeadsThatShareACodebookStayCloser) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  // Two heads with the same codes, one of which is eight times as sensitive.
  std::vector<RowRates> rows(2, random_row(1));
  rows[0].errors = {{0.1, 0.1}};
  rows[1].errors = {{0.8, 0.8}};
  const double target = 0.03;
  const Result<BalancedSteps> apart = balance_rows(rows, 1, target);
  const Result<BalancedSteps> shared = balance_rows(rows, 2, target);
  ASSERT_TRUE(apart) << apart.status().message();
  ASSERT_TRUE(shared) << shared.status().message();
  const auto ratio = [](const BalancedSteps& b, int32_t c) {
    return b.steps[0][c] / b.steps[1][c];
  };
  for (const int32_t c : {0, 1}) {
    EXPECT_GE(ratio(*shared, c), 1);
    EXPECT_LE(ratio(*shared, c), ratio(*apart, c));
  }
  EXPECT_LT(ratio(*shared, 0) * ratio(*shared, 1), ratio(*apart, 0) * ratio(*apart, 1));
  const Cost a = cost_of(rows, 2, choice_of(*apart)), b = cost_of(rows, 2, choice_of(*shared));
  EXPECT_LE(b.error, target);
  // Twice as fine is at most a bit more per component; so much may the grid make of the errors'
  // difference.
  EXPECT_LT(b.bits, a.bits + 2 * std::max(0.0, std::log2(a.error / b.error)));
}

TEST_F(StepBalanceTest, ErrorsOutOfReachAreRefused) {
  const std::vector<RowRates> rows = {random_row(2), random_row(2)};
  for (const double error : {1e-7, 1e3}) {
    const Result<BalancedSteps> balanced = balance_rows(rows, 1, error);
    ASSERT_FALSE(balanced);
    EXPECT_EQ(balanced.status().code(), StatusCode::kInvalidArgument);
    EXPECT_NE(balanced.status().message().find("cannot be balanced at an attention error of"),
              std::string::npos);
  }
}

class CalibratedBalanceTest : public StepBalanceTest {
 protected:
  CalibratedBalanceTest() {
    folder_ = std::filesystem::temp_directory_path() / ("tierkv_balance_" + std::to_string(seed_));
    std::filesystem::create_directory(folder_);
  }
  ~CalibratedBalanceTest() override { std::filesystem::remove_all(folder_); }

  std::vector<datasets::DumpReader> dumps(std::vector<int64_t> tokens) {
    datasets::SynthSpec spec;
    spec.layout = {2, 4, 2, 64, DType::kFloat16, false, 1e4, 1 / std::sqrt(64.0)};
    spec.tokens = std::move(tokens);
    spec.num_queries = 32;
    spec.seed = seed_;
    const std::string path = folder_ / "in.h5";
    const Status s = datasets::synthesize(spec, path, {});
    EXPECT_TRUE(s.is_ok()) << s.message();
    std::vector<datasets::DumpReader> readers;
    readers.push_back(std::move(datasets::DumpReader::open(path).value()));
    return readers;
  }
  // Online attention error of the dump at k, v.
  static double measured(datasets::DumpReader& dump, const Profile& profile, double k, double v) {
    AnalyzeOptions options;
    options.profile = &profile;
    options.presets = {
        parse_preset("step:k=" + std::to_string(k) + ",v=" + std::to_string(v)).value()};
    const auto results = analyze(dump, options);
    EXPECT_TRUE(results) << results.status().message();
    return attention_error_online(results->front().tally).value();
  }
  std::filesystem::path folder_;
};

TEST_F(CalibratedBalanceTest, TheProfileHasTheErrorAskedFor) {
  SCOPED_TRACE("seed " + std::to_string(seed_));
  std::vector<datasets::DumpReader> readers = dumps({300, 500});
  CalibrateOptions options;
  options.thresholds = false;
  const Result<Profile> even = calibrate(readers, options);
  ASSERT_TRUE(even) << even.status().message();
  EXPECT_EQ(even->balance.error, 0);
  options.balance_error = 0.3;
  const Result<Profile> profile = calibrate(readers, options);
  ASSERT_TRUE(profile) << profile.status().message();
  double keys = 0, values = 0;
  for (const RowProfile& row : profile->rows) {
    keys += std::log(row.key_step_scale);
    values += std::log(row.value_step_scale);
  }
  EXPECT_NEAR(keys, 0, 1e-9);
  EXPECT_NEAR(values, 0, 1e-9);
  // On the dump it was calibrated with. Errors of keys and values are taken as independent and as
  // growing with the step, sequences weigh alike, and the outputs of random values nearly cancel.
  const StepBalance& b = profile->balance;
  EXPECT_LE(b.error, 0.3);
  EXPECT_GT(b.error, 0.2);
  const double error = measured(readers[0], *profile, b.k, b.v);
  EXPECT_LT(error, 2 * 0.3);
  EXPECT_GT(error, 0.5 * 0.3);
  // Steps are what the format asks for times the scale.
  ComponentFormat format;
  format.step = 0.3;
  for (size_t r = 0; r < profile->rows.size(); ++r) {
    const RowProfile &a = even->rows[r], &c = profile->rows[r];
    EXPECT_NEAR(make_step(format, Component::kKey, c, 0.125),
                c.key_step_scale * make_step(format, Component::kKey, a, 0.125), 1e-9);
    EXPECT_NEAR(make_step(format, Component::kValue, c, 0.125),
                c.value_step_scale * make_step(format, Component::kValue, a, 0.125), 1e-9);
  }
}

TEST_F(CalibratedBalanceTest, SequencesWithinTheWindowAreRefused) {
  std::vector<datasets::DumpReader> readers = dumps({68});
  CalibrateOptions options;
  options.thresholds = false;
  options.balance_error = 0.05;
  const Result<Profile> profile = calibrate(readers, options);
  ASSERT_FALSE(profile);
  EXPECT_EQ(profile.status().code(), StatusCode::kInvalidArgument);
  EXPECT_NE(profile.status().message().find("shorter than the raw window"), std::string::npos);
}

}  // namespace
}  // namespace tierkv::analysis
