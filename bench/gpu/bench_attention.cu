// SPDX-License-Identifier: Apache-2.0
// Decode attention over compressed pages, at the shapes of bench/REPORT.md.
//
//   bench_attention [--out FILE] [--commit HASH] [--only TEXT] [--replays N] [--slots N]
//   [--slot-bytes N] [--tile-cost N] [--seed N]
//
// Each case is timed by graph replay over enough disjoint sets of pages, scattered at random, that
// no page is still in L2 when its turn comes again. Beside it, in the same run: the read ceiling (2
// GiB) and a kernel that only reads the same number of bytes (floor). `attend` has its plan and its
// pages made before (plan_is_settled, Settled::kAll), `unsettled` its plan alone; `step` is plan
// and attend, every time. Ragged batches are kRaggedDraws cases, of the seeds --seed (by default a
// fresh one) and those that follow it.
#include <cstring>
#include <string>

#include "bench/gpu/attention_run.cuh"

namespace tierkv::bench {
namespace {

constexpr int32_t kHeadDim = 128;
constexpr size_t kMaxQueryValues = 1ull << 24;
constexpr int kRaggedDraws = 8;

struct Options {
  std::string out, commit = "unknown", only;
  int replays = 31;
  int slots = 0, slot_bytes = 0;           // 0: as attention_grid() says
  int tile_cost = -1;                      // likewise
  uint32_t seed = std::random_device{}();  // of the first ragged batch
};

struct Case {
  std::string name;   // of the format or mix
  std::string shape;  // "64x4096"
  CacheShape cache;
  int64_t seed = -1;  // of its lengths, or -1
};

struct Measured {
  std::string name, shape;
  int64_t seed = -1;
  int32_t shortest = 0;  // tokens of a sequence that are kept
  int64_t bytes = 0;
  int sets = 0;
  Timing floor, attend, unsettled, step, plan;
};

AttentionConfig base_config(int32_t q_heads, int32_t kv_heads) {
  AttentionConfig config;
  config.num_q_heads = q_heads;
  config.num_kv_heads = kv_heads;
  config.head_dim = kHeadDim;
  config.sm_scale = 0.08838834764831845;
  return config;
}

void add_tier(AttentionConfig& config, int32_t side, int32_t k_bits, int32_t v_bits) {
  config.tiers[config.num_tiers++] = {side, token_wise_tier(k_bits, v_bits)};
}

void choose_pages(AttentionConfig& config) {
  std::vector<TierFormat> formats;
  for (int32_t t = 0; t < config.num_tiers; ++t) formats.push_back(config.tiers[t].format);
  config.page_bytes = choose_page_size(formats, config.head_dim)->page_bytes;
}

struct Shape {
  int32_t batch, tokens;
};
std::string name_of(Shape s) {
  return std::to_string(s.batch) + "x" + std::to_string(s.tokens);
}

Case uniform_case(Shape s, int32_t k_bits, int32_t v_bits, int32_t q_heads, int32_t kv_heads) {
  Case c;
  c.name = k_bits == 16 ? "fp16" : "k" + std::to_string(k_bits) + "v" + std::to_string(v_bits);
  if (q_heads != 32 || kv_heads != 8) {
    c.name += " " + std::to_string(q_heads) + "/" + std::to_string(kv_heads);
  }
  c.shape = name_of(s);
  c.cache.config = base_config(q_heads, kv_heads);
  add_tier(c.cache.config, 0, k_bits, v_bits);
  choose_pages(c.cache.config);
  c.cache.sequences.assign(s.batch, {{s.tokens, 0, 0}});
  return c;
}

Case head_dim_case(Shape s, int32_t head_dim) {
  Case c = uniform_case(s, 4, 2, 32, 8);
  c.name += " d" + std::to_string(head_dim);
  c.cache.config.head_dim = head_dim;
  choose_pages(c.cache.config);
  return c;
}

// Several queries, or other groups and head_dims, over the same bytes.
Case query_case(int32_t head_dim, int32_t q_heads, int32_t q_len) {
  Case c = uniform_case({32, 4096}, 4, 2, q_heads, 8);
  c.cache.config.head_dim = head_dim;
  c.cache.config.q_len = q_len;
  choose_pages(c.cache.config);
  c.name = "k4v2 d" + std::to_string(head_dim) + " " + std::to_string(q_heads) + "/8 q" +
           std::to_string(q_len);
  return c;
}

// Heads of other models, and lengths that are no power of two.
Case model_case(Shape s, int32_t q_heads, int32_t kv_heads, int32_t head_dim) {
  Case c = uniform_case(s, 4, 2, q_heads, kv_heads);
  c.cache.config.head_dim = head_dim;
  choose_pages(c.cache.config);
  c.name = "model k4v2 " + std::to_string(q_heads) + "/" + std::to_string(kv_heads) + " d" +
           std::to_string(head_dim);
  return c;
}

// 30% high, 50% low, 20% pruned; with `window`, its newest tokens raw on a third side.
Case mixed_case(Shape s, int32_t window) {
  Case c;
  c.name = window == 0 ? "mixed" : "mixed+raw64";
  c.shape = name_of(s);
  c.cache.config = base_config(32, 8);
  add_tier(c.cache.config, 0, 8, 4);
  add_tier(c.cache.config, 1, 4, 2);
  if (window > 0) add_tier(c.cache.config, 2, 16, 16);
  choose_pages(c.cache.config);
  const int32_t high = s.tokens * 3 / 10, low = s.tokens / 2;
  c.cache.sequences.assign(s.batch, {{high - window, low, window}});
  return c;
}

// Tiers by class of heads, in pages without records: a tenth of the heads K8V4, four tenths K4V4
// and K4V2, the others K4V2 and K2V2; 30% of the tokens high, the newest 64 raw. kind 0: one, three
// and four of 8 kv_heads; 1, 2, 3: all of one class, through the same kernel.
Case class_case(Shape s, int32_t head_dim, int32_t kind) {
  static const uint8_t kClassOfHead[4][8] = {{0, 1, 2, 2, 1, 2, 1, 2},
                                             {0, 0, 0, 0, 0, 0, 0, 0},
                                             {1, 1, 1, 1, 1, 1, 1, 1},
                                             {2, 2, 2, 2, 2, 2, 2, 2}};
  const TierFormat k8v4 = token_wise_tier(8, 4), k4v4 = token_wise_tier(4, 4);
  const TierFormat k4v2 = *parse_tier_format("k4v2n"), k2v2 = *parse_tier_format("k2nv2n");
  constexpr int32_t kWindow = 64;
  Case c;
  c.name = std::string("classes") + (kind == 0 ? "" : " all " + std::to_string(kind - 1));
  if (head_dim != kHeadDim) c.name += " d" + std::to_string(head_dim);
  c.shape = name_of(s);
  AttentionConfig& config = c.cache.config;
  config = base_config(32, 8);
  config.head_dim = head_dim;
  config.page_records = false;
  config.num_tiers = 3;
  config.tiers[0] = {0, k8v4};
  config.tiers[1] = {1, k8v4};
  config.tiers[2] = {2, raw_tier()};
  config.classes.count = 3;
  const TierFormat formats[2][3] = {{k4v4, k4v2, raw_tier()}, {k4v2, k2v2, raw_tier()}};
  for (int32_t i = 0; i < 2; ++i) std::copy_n(formats[i], 3, config.classes.format[i]);
  config.classes.of_head = kClassOfHead[kind];
  config.page_bytes = 13312 * head_dim / kHeadDim;
  const int32_t high = (s.tokens - kWindow) * 3 / 10;
  c.cache.sequences.assign(s.batch, {{high, s.tokens - kWindow - high, kWindow}});
  return c;
}

// Lengths from 1 to `longest`, as many sequences as hold about the bytes of `like`.
Case ragged_case(Shape like, int32_t longest, uint32_t seed) {
  Case c = mixed_case(like, 0);
  c.name = "mixed ragged";
  c.cache.sequences.clear();
  c.seed = seed;
  std::mt19937_64 rng(seed);
  const int64_t total = static_cast<int64_t>(like.batch) * like.tokens;
  for (int64_t sum = 0; sum < total;) {
    const int64_t drawn = std::uniform_int_distribution<int32_t>(1, longest)(rng);
    const auto n = static_cast<int32_t>(std::min(drawn, total - sum));
    c.cache.sequences.push_back({{n * 3 / 10, n / 2, 0}});
    sum += n;
  }
  return c;
}

std::vector<Case> all_cases(uint32_t seed) {
  const Shape shapes[] = {{1, 4096}, {1, 32768}, {1, 131072}, {32, 4096}, {64, 4096}, {8, 32768}};
  std::vector<Case> cases;
  for (const Shape s : shapes) {
    cases.push_back(uniform_case(s, 16, 16, 32, 8));
    cases.push_back(uniform_case(s, 8, 4, 32, 8));
    cases.push_back(uniform_case(s, 4, 4, 32, 8));
    cases.push_back(uniform_case(s, 4, 2, 32, 8));
    cases.push_back(mixed_case(s, 0));
  }
  cases.push_back(uniform_case({64, 4096}, 8, 8, 32, 8));
  cases.push_back(uniform_case({64, 4096}, 2, 2, 32, 8));
  cases.push_back(mixed_case({64, 4096}, 64));
  for (const Shape s : {Shape{1, 32768}, Shape{8, 32768}, Shape{32, 4096}, Shape{64, 4096}}) {
    cases.push_back(class_case(s, kHeadDim, 0));
  }
  for (const int32_t kind : {1, 2, 3}) cases.push_back(class_case({64, 4096}, kHeadDim, kind));
  for (const int32_t head_dim : {64, 256}) cases.push_back(class_case({64, 4096}, head_dim, 0));
  for (int i = 0; i < kRaggedDraws; ++i) {
    cases.push_back(ragged_case({8, 32768}, 32768, seed + static_cast<uint32_t>(i)));
  }
  cases.push_back(mixed_case({8, 32768}, 0));
  cases.back().name = "mixed contiguous";
  cases.back().cache.contiguous = true;
  cases.push_back(uniform_case({32, 4096}, 4, 2, 8, 8));
  cases.push_back(uniform_case({32, 4096}, 4, 2, 16, 8));
  cases.push_back(uniform_case({32, 4096}, 4, 2, 64, 8));
  cases.push_back(uniform_case({32, 4096}, 4, 2, 128, 8));
  for (const int32_t head_dim : {64, 96, 256}) {
    cases.push_back(head_dim_case({32, 4096}, head_dim));
  }
  cases.push_back(mixed_case({512, 128}, 0));
  cases.push_back(model_case({48, 3000}, 28, 4, 128));
  cases.push_back(model_case({96, 5000}, 14, 2, 64));
  cases.push_back(model_case({40, 9000}, 8, 1, 256));
  cases.push_back(model_case({7, 11111}, 40, 8, 128));
  for (const int32_t head_dim : {64, 128, 256}) {
    for (const int32_t group : {1, 2, 8, 16}) {
      if (head_dim != 128) cases.push_back(query_case(head_dim, 8 * group, 1));
    }
    for (const int32_t group : {1, 2, 4, 8}) {
      cases.push_back(query_case(head_dim, 8 * group, 4));
    }
  }
  return cases;
}

struct Bench : AttentionBench {
  Options options;
};

Measured run_case(const Bench& b, const Case& c) {
  AttentionGrid grid = grid_of(c.cache.config);
  if (b.options.slots != 0) grid.slots_per_warp = b.options.slots;
  if (b.options.slot_bytes != 0) grid.slot_bytes = b.options.slot_bytes;
  if (b.options.tile_cost >= 0) grid.tile_cost = b.options.tile_cost;
  const AttentionRun run(b, c.cache, grid);
  Measured m;
  m.name = c.name;
  m.shape = c.shape;
  m.seed = c.seed;
  m.shortest = INT32_MAX;
  for (const SequenceTokens& s : c.cache.sequences) {
    m.shortest = std::min(m.shortest, s.tier[0] + s.tier[1] + s.tier[2]);
  }
  m.bytes = run.bytes();
  m.sets = run.sets();
  m.floor = run.time_floor();
  m.attend = run.time_attend(Settled::kAll);
  m.unsettled = run.time_attend(Settled::kNothing);
  m.step = run.time_step();
  m.plan = run.time([&](int i) { run.plan(i); });
  return m;
}

void print_row(const Bench& b, const Measured& m) {
  const double gbps = static_cast<double>(m.bytes) / m.attend.median / 1e3;
  std::printf(
      "%-19s %-9s %8.1f MB floor %7.2f attend %7.2f (%7.2f-%7.2f) unsettled %7.2f step %7.2f plan "
      "%5.2f us"
      " %6.0f GB/s %5.1f%% of ceiling",
      m.name.c_str(), m.shape.c_str(), static_cast<double>(m.bytes) / 1e6, m.floor.median,
      m.attend.median, m.attend.low, m.attend.high, m.unsettled.median, m.step.median,
      m.plan.median, gbps, 100 * gbps / b.ceiling_gbps);
  if (m.seed >= 0) {
    std::printf(", seed %lld, shortest %d", static_cast<long long>(m.seed), m.shortest);
  }
  std::printf("\n");
  std::fflush(stdout);
}

void write_timing(std::FILE* f, const char* name, const Timing& t) {
  std::fprintf(f, ", \"%s_us\": {\"median\": %.3f, \"p10\": %.3f, \"p90\": %.3f}", name, t.median,
               t.low, t.high);
}

void write_json(const Bench& b, const std::vector<Measured>& all) {
  std::FILE* f = std::fopen(b.options.out.c_str(), "w");
  if (f == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", b.options.out.c_str());
    std::exit(1);
  }
  std::fprintf(
      f,
      "{\"schema\": \"tierkv.bench.attention/1\", \"gpu\": \"%s\", \"sms\": %d, \"commit\": "
      "\"%s\",\n \"head_dim\": %d, \"q_heads\": 32, \"kv_heads\": 8, \"replays\": %d, "
      "\"slots\": %d, \"ceiling_gbps\": %.1f,\n "
      "\"results\": [\n",
      b.device.name, b.device.multiProcessorCount, b.options.commit.c_str(), kHeadDim,
      b.options.replays, b.options.slots, b.ceiling_gbps);
  for (size_t i = 0; i < all.size(); ++i) {
    const Measured& m = all[i];
    std::fprintf(f, "  {\"name\": \"%s\", \"shape\": \"%s\", \"bytes\": %lld, \"sets\": %d",
                 m.name.c_str(), m.shape.c_str(), static_cast<long long>(m.bytes), m.sets);
    if (m.seed >= 0) {
      std::fprintf(f, ", \"seed\": %lld, \"shortest\": %d", static_cast<long long>(m.seed),
                   m.shortest);
    }
    write_timing(f, "floor", m.floor);
    write_timing(f, "attend", m.attend);
    write_timing(f, "unsettled", m.unsettled);
    write_timing(f, "step", m.step);
    write_timing(f, "plan", m.plan);
    std::fprintf(f, "}%s\n", i + 1 < all.size() ? "," : "");
  }
  std::fprintf(f, " ]}\n");
  std::fclose(f);
}

Options parse_options(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const bool has_value = i + 1 < argc;
    if (has_value && std::strcmp(argv[i], "--out") == 0) {
      o.out = argv[++i];
    } else if (has_value && std::strcmp(argv[i], "--commit") == 0) {
      o.commit = argv[++i];
    } else if (has_value && std::strcmp(argv[i], "--only") == 0) {
      o.only = argv[++i];
    } else if (has_value && std::strcmp(argv[i], "--replays") == 0) {
      o.replays = std::atoi(argv[++i]);
    } else if (has_value && std::strcmp(argv[i], "--slots") == 0) {
      o.slots = std::atoi(argv[++i]);
    } else if (has_value && std::strcmp(argv[i], "--slot-bytes") == 0) {
      o.slot_bytes = std::atoi(argv[++i]);
    } else if (has_value && std::strcmp(argv[i], "--tile-cost") == 0) {
      o.tile_cost = std::atoi(argv[++i]);
    } else if (has_value && std::strcmp(argv[i], "--seed") == 0) {
      o.seed = static_cast<uint32_t>(std::strtoul(argv[++i], nullptr, 10));
    } else {
      std::fprintf(stderr,
                   "usage: %s [--out FILE] [--commit HASH] [--only TEXT] [--replays N] [--slots N] "
                   "[--slot-bytes N] [--tile-cost N] [--seed N]\n",
                   argv[0]);
      std::exit(2);
    }
  }
  return o;
}

int run(int argc, char** argv) {
  Bench b;
  b.options = parse_options(argc, argv);
  prepare(b, b.options.replays, kMaxQueryValues);
  b.lse = device_alloc<float>(kMaxQueryValues / kHeadDim);
  std::printf("%s, %d SMs, ceiling %.0f GB/s\n", b.device.name, b.device.multiProcessorCount,
              b.ceiling_gbps);
  std::vector<Measured> all;
  for (const Case& c : all_cases(b.options.seed)) {
    if ((c.name + " " + c.shape).find(b.options.only) == std::string::npos) continue;
    all.push_back(run_case(b, c));
    print_row(b, all.back());
  }
  if (!b.options.out.empty()) write_json(b, all);
  return 0;
}

}  // namespace
}  // namespace tierkv::bench

int main(int argc, char** argv) {
  return tierkv::bench::run(argc, argv);
}
