// What a coded store makes of dumps: every sequence is one prompt, with steps from a profile of the
// dump's own statistics and means from the prompts; JSON on stdout. Ratio counts everything that is
// stored (blocks, directory, means, codebooks, raw window), pool gain the pages that are held.
//
// bench_coded_store [--k K] [--v V] [--window W] [--length BITS] [--sinks S] [--alpha A]
//                   [--fixed BITS] [--threads N] DUMP...
//
// --sinks, --alpha: blocks with one of the first S tokens, or with a token whose significance in
// the dump is at least A / i, are kept at a fixed rate (8-bit keys, values of --fixed bits). The
// attention error is that of coded_store_error.h.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bench/host/coded_store_error.h"
#include "bench/host/dump_layer.h"
#include "store/coded/coded_host.h"
#include "tools/analysis/calibrate.h"

namespace {

using namespace tierkv;

struct Options {
  double k = 0.3, v = 0.25;
  int32_t window = 64, length = 10;
  int32_t sinks = 0, fixed = 4, threads = 2;
  double alpha = 0;  // 0: significance is not asked for
  bool keeps_fixed() const { return sinks > 0 || alpha > 0; }
};

int fail(const Status& status) {
  std::fprintf(stderr, "%s\n", status.message().c_str());
  return 1;
}

KvStoreConfig store_config(const Options& options, const datasets::DumpInfo& info,
                           const Profile& profile) {
  KvStoreConfig c;
  c.layout = info.layout;
  c.policy.window_tokens = options.window;
  c.coded.enabled = true;
  c.coded.max_length = options.length;
  if (options.keeps_fixed()) {
    c.coded.fixed_blocks = true;
    c.coded.fixed_format = token_wise_tier(8, options.fixed);
    c.policy.sink_tokens = options.sinks;
    if (options.alpha > 0) c.policy.alpha_high = options.alpha;
  }
  ComponentFormat format;
  format.type = tierkv::CodeType::uniform(0);
  format.step_rule = StepRule::kAbsolute;
  format.unit = Unit::kGlobal;
  format.basis = BasisKind::kMean;
  for (const RowProfile& row : profile.rows) {
    format.step = options.k;
    c.coded.key_steps.push_back(
        static_cast<float>(make_step(format, Component::kKey, row, info.layout.sm_scale)));
    format.step = options.v;
    c.coded.value_steps.push_back(
        static_cast<float>(make_step(format, Component::kValue, row, info.layout.sm_scale)));
  }
  c.max_sequences = static_cast<int32_t>(info.sequences.size());
  c.max_tokens = 1;
  int64_t pages = 0;
  for (const auto& sequence : info.sequences) {
    c.max_tokens = std::max(c.max_tokens, static_cast<int32_t>(sequence.num_tokens));
    pages += (sequence.num_tokens + 63) / 64 * 2 + 4;
  }
  c.num_pages = static_cast<int32_t>(pages * c.layout.num_layers * c.layout.num_kv_heads);
  return c;
}

Status score_layer(const datasets::DumpReader& dump, int32_t sequence, int32_t layer, SequenceId id,
                   CodedHostStore* store) {
  std::vector<float> scores, row;
  for (int32_t h = 0; h < dump.info().layout.num_kv_heads; ++h) {
    if (Status s = dump.read_significance(sequence, layer, h, &row); !s) return s;
    scores.insert(scores.end(), row.begin(), row.end());
  }
  return store->score_prompt({{&id, 1}, layer, scores.data(), static_cast<int64_t>(row.size())});
}

Status fill(const datasets::DumpReader& dump, const Options& options, CodedHostStore* store) {
  const datasets::DumpInfo& info = dump.info();
  for (int32_t i = 0; i < static_cast<int32_t>(info.sequences.size()); ++i) {
    const Result<SequenceId> id = store->add_sequence();
    if (!id) return id.status();
    const auto tokens = static_cast<int32_t>(info.sequences[i].num_tokens);
    if (Status s = store->begin_prompt({&*id, 1}, tokens); !s) return s;
    for (int32_t layer = 0; layer < info.layout.num_layers; ++layer) {
      std::vector<uint8_t> k, v;
      if (Status s = bench::read_layer(dump, i, layer, Component::kKey, &k); !s) return s;
      if (Status s = bench::read_layer(dump, i, layer, Component::kValue, &v); !s) return s;
      if (Status s = store->append({{&*id, 1}, layer, tokens, k.data(), v.data()}); !s) return s;
      if (options.alpha == 0) continue;
      if (Status s = score_layer(dump, i, layer, *id, store); !s) return s;
    }
    if (Status s = store->end_prompt({&*id, 1}); !s) return s;
  }
  return Status::ok();
}

void print(const char* name, const Options& options, const CodedHostStore& store,
           const StoreStats& stats, double error, double seconds) {
  const int64_t tokens = stats.tokens[0] + stats.tokens[1] + stats.tokens[2];
  const double fixed = options.keeps_fixed() ? static_cast<double>(stats.tokens[1]) : 0;
  std::printf(
      "{\"dump\":\"%s\",\"k\":%g,\"v\":%g,\"window\":%d,\"max_length\":%d,\"sequences\":%d,"
      "\"tokens_a_row\":%.0f,\"window_share\":%.4f,\"sinks\":%d,\"alpha\":%g,"
      "\"fixed_share\":%.4f,\"attention_rel_error_online\":%.5f,\"bits_per_value\":%.4f,\"ratio\":%"
      ".4f,"
      "\"pool_gain\":%.4f,\"pages\":%d,\"page_bytes\":%lld,\"seconds\":%.2f}\n",
      name, options.k, options.v, options.window, options.length, stats.sequences,
      static_cast<double>(tokens) / store.view().rows_per_sequence() / stats.sequences,
      static_cast<double>(stats.tokens[0]) / static_cast<double>(tokens), options.sinks,
      options.alpha, fixed / static_cast<double>(tokens), error, 16 / stats.nominal_ratio(),
      stats.nominal_ratio(), stats.pool_gain(), stats.pages - stats.pages_free,
      static_cast<long long>(stats.page_bytes), seconds);
}

int run(const Options& options, const char* path) {
  Result<datasets::DumpReader> dump = datasets::DumpReader::open(path);
  if (!dump) return fail(dump.status());
  std::vector<datasets::DumpReader> dumps;
  dumps.push_back(std::move(*dump));
  analysis::CalibrateOptions calibration;
  calibration.thresholds = false;
  const Result<Profile> profile = analysis::calibrate(dumps, calibration);
  if (!profile) return fail(profile.status());
  auto store = CodedHostStore::make(store_config(options, dumps[0].info(), *profile));
  if (!store) return fail(store.status());
  const auto begin = std::chrono::steady_clock::now();
  if (Status s = fill(dumps[0], options, store->get()); !s) return fail(s);
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
  const Result<double> error = attention_error(dumps[0], **store, options.threads);
  if (!error) return fail(error.status());
  const char* name = std::strrchr(path, '/');
  print(name == nullptr ? path : name + 1, options, **store, *(*store)->stats(), *error,
        seconds.count());
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  int failed = argc < 2 ? 2 : 0;
  for (int i = 1; i < argc && failed == 0; ++i) {
    const std::string word = argv[i];
    if (word.rfind("--", 0) != 0) {
      failed = run(options, argv[i]);
      continue;
    }
    const double number = i + 1 < argc ? std::atof(argv[++i]) : 0;
    if (word == "--k") options.k = number;
    if (word == "--v") options.v = number;
    if (word == "--window") options.window = static_cast<int32_t>(number);
    if (word == "--length") options.length = static_cast<int32_t>(number);
    if (word == "--sinks") options.sinks = static_cast<int32_t>(number);
    if (word == "--alpha") options.alpha = number;
    if (word == "--fixed") options.fixed = static_cast<int32_t>(number);
    if (word == "--threads") options.threads = static_cast<int32_t>(number);
  }
  if (failed == 2) std::fprintf(stderr, "bench_coded_store [options] DUMP...\n");
  return failed;
}
