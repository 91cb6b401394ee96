// Balanced global steps: every row's step of keys and of values times a scale of its own, so that a
// given attention error takes the fewest bits.
//
// The global step aims at the error of logits and of values (codec/format/global_step.h). What that
// does to the output of attention differs between heads by more than an order of magnitude: a head
// that looks at many tokens averages their errors away, one whose output nearly cancels is all
// error. So the rows trade: minimise the bits of their codes at a given mean of their relative
// output errors. With one Lagrange multiplier every row chooses for itself (reverse water-filling;
// Cover and Thomas, Elements of Information Theory, section 10.3.3, with measured curves in place
// of Gaussian ones), given the codebook that the heads of its layer share and what the others have
// chosen.
#pragma once

#include <array>
#include <vector>

#include "codec/policy/profile.h"
#include "datasets/dump.h"

namespace tierkv::analysis {

// How often codes occur in a sample.
struct CodeSample {
  int32_t lowest = 0;  // the code of counts[0]
  std::vector<uint32_t> counts;

  void add(const int16_t* codes, int64_t n);
  double total() const;
};

// What steps cost and lose in one (layer, kv_head), keys first.
struct RowRates {
  std::array<std::vector<CodeSample>, 2> codes;  // at each of step_grid(), none empty
  // Of every calibration sequence the relative error of attention with that component alone
  // quantised, per unit of k or v: errors grow in proportion to small steps.
  std::vector<std::array<double, 2>> errors;
};

// The k and v to choose from, ascending: 2^-6 to 2 in quarter octaves.
std::vector<double> step_grid();

struct BalancedSteps {
  std::vector<std::array<double, 2>> steps;  // [rows]: k and v, of step_grid()
  double error = 0;                          // expected mean of the rows
};
// rows: [layers, heads]; the heads of a layer share a codebook of keys and one of values. Errors of
// keys and values add as independent ones. kInvalidArgument where no steps of the grid have the
// error: it is below that of the finest or not below that of the coarsest.
Result<BalancedSteps> balance_rows(const std::vector<RowRates>& rows, int32_t heads, double error);

struct BalanceOptions {
  double error = 0;  // mean online attention error to aim at
  int32_t threads = 1;
};
// Measures the dumps with the means and steps of *profile, whose scales are still 1, and sets
// scales and balance. Basis mean, 64 raw tokens. kInvalidArgument where all sequences are too short
// to have quantised tokens.
Status balance_steps(std::vector<datasets::DumpReader>& dumps, const BalanceOptions& options,
                     Profile* profile);

}  // namespace tierkv::analysis
