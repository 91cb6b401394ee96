// Sequences of stores in their cold form: their bytes, and what their pages hold. The files are
// kept, so that what was written once stays readable.
#include "codec/format/fixed_block.h"
#include "store/coded/coded_bytes.h"
#include "store/cold/sequence_bytes.h"
#include "store/tiers/host_store.h"
#include "tests/golden/golden_table.h"
#include "tierkv/cold.h"

namespace tierkv {
namespace {

using Bytes = std::vector<uint8_t>;

// Numbers that are the same everywhere: sums of four draws, in sixteenths.
class Numbers {
 public:
  std::vector<uint16_t> halves(int64_t n) {
    std::vector<uint16_t> out;
    for (int64_t i = 0; i < n; ++i) {
      int32_t sum = -126;
      for (int32_t j = 0; j < 4; ++j) sum += static_cast<int32_t>(next() >> 58);
      out.push_back(float_to_half(static_cast<float>(sum) / 16));
    }
    return out;
  }
  std::vector<float> scores(int64_t n) {
    std::vector<float> out;
    for (int64_t i = 0; i < n; ++i) out.push_back(static_cast<float>(next() >> 54) / 65536);
    return out;
  }

 private:
  uint64_t next() { return state_ = state_ * 6364136223846793005u + 1442695040888963407u; }
  uint64_t state_ = 1;
};

KvStoreConfig config_of(bool coded) {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = c.layout.num_kv_heads = 2;
  c.layout.head_dim = 64;
  c.layout.sm_scale = 0.125;
  c.policy.window_tokens = 16;
  c.num_pages = 100;
  c.max_sequences = 1;
  c.max_tokens = 300;
  if (coded) {
    c.coded.enabled = true;
    c.coded.key_steps = {0.5f, 0.75f, 1.0f, 1.25f};
    c.coded.value_steps = {1.5f, 1.25f, 1.0f, 0.875f};
    c.coded.max_length = 11;
  } else {
    c.policy.sink_tokens = 2;
    c.policy.alpha_low = 0.25;
  }
  return c;
}

void append_layers(KvStore* store, SequenceId id, int32_t tokens, Numbers* numbers) {
  const CacheLayout& l = store->config().layout;
  for (int32_t layer = 0; layer < l.num_layers; ++layer) {
    const auto k = numbers->halves(int64_t{tokens} * l.num_kv_heads * l.head_dim);
    const auto v = numbers->halves(int64_t{tokens} * l.num_kv_heads * l.head_dim);
    ASSERT_TRUE(store->append({{&id, 1}, layer, tokens, k.data(), v.data()}));
  }
}

// A prompt of 210 tokens and 5 steps.
SequenceId fill(KvStore* store) {
  Numbers numbers;
  const SequenceId id = *store->add_sequence();
  EXPECT_TRUE(store->begin_prompt({&id, 1}, 210));
  append_layers(store, id, 210, &numbers);
  const CodedConfig& config = store->config().coded;
  for (int32_t layer = 0; layer < 2 && (!config.enabled || config.fixed_blocks); ++layer) {
    const std::vector<float> scores = numbers.scores(2 * 210);
    EXPECT_TRUE(store->score_prompt({{&id, 1}, layer, scores.data(), 210}));
  }
  EXPECT_TRUE(store->end_prompt({&id, 1}));
  for (int32_t i = 0; i < 5; ++i) {
    EXPECT_TRUE(store->begin_step({&id, 1}, 1));
    append_layers(store, id, 1, &numbers);
  }
  return id;
}

// The packed pages of every row.
Bytes pages_of(const HostStore& store, const Bytes& exported) {
  const Result<ImportedSequence> rows =
      split_sequence(store.config(), store.view(), exported.data(), exported.size());
  EXPECT_TRUE(rows.is_ok()) << rows.status().message();
  Bytes all;
  for (size_t r = 0; rows && r < rows->rows.size(); ++r) {
    const ImportedRow& row = rows->rows[r];
    int64_t bytes = 0;
    for (int32_t side = 0; side < kStoreSides; ++side) {
      EXPECT_GT(row.tokens.of[side], 0) << "the golden sequence has no tokens in a tier";
      for (int32_t left = row.tokens.of[side]; left > 0; left -= store.view().page_tokens(side)) {
        bytes += packed_page_bytes(store.view().layouts[side],
                                   smaller_of(left, store.view().page_tokens(side)));
      }
    }
    all.insert(all.end(), row.pages, row.pages + bytes);
  }
  return all;
}

// Of every row the codes of keys, of values, and the raw values likewise; in place of codes what a
// fixed-rate block reads as.
Bytes values_of(const KvStore& store, const Bytes& exported) {
  const Result<ImportedCodedSequence> rows =
      read_coded_sequence(store.config(), exported.data(), exported.size());
  EXPECT_TRUE(rows.is_ok()) << rows.status().message();
  Bytes all;
  const auto add = [&all](const auto& x) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(x.data());
    all.insert(all.end(), bytes, bytes + 2 * x.size());
  };
  const int32_t dim = store.config().layout.head_dim;
  std::vector<uint16_t> y(static_cast<size_t>(kBlockTokens) * dim);
  for (size_t r = 0; rows && r < rows->rows.size(); ++r) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      const auto i = static_cast<size_t>(c);
      std::vector<int16_t> codes = rows->rows[r].codes[i];
      for (size_t b = 0; b < rows->rows[r].fixed[i].size(); ++b) {
        const Bytes& block = rows->rows[r].fixed[i][b];
        if (block.empty()) continue;
        const int32_t bits = store.config().coded.fixed_format.of(c).type.bits();
        EXPECT_TRUE(decode_fixed_block(block.data(), static_cast<int64_t>(block.size()), dim, c,
                                       bits, y.data()));
        std::copy(y.begin(), y.end(), codes.begin() + static_cast<int64_t>(b * y.size()));
      }
      add(codes);
    }
    for (const auto& raw : rows->rows[r].raw) add(raw);
  }
  return all;
}

TEST(ColdGolden, BytesOfSequences) {
  golden::Table table("sequences.csv", "name,file_bytes,file_xxh3,content_xxh3");
  const auto record = [&](const std::string& name, KvStore* store, SequenceId id, bool coded,
                          const Bytes& content) {
    const Bytes cold = *save_sequence(*store, id, {coded, 2});
    const std::string file = golden::path("sequences/" + name + ".tkv");
    if (golden::regenerating()) golden::write_file(file, cold);
    const Bytes kept = golden::read_file(file);
    EXPECT_TRUE(kept == cold) << name;
    table.expect({name, std::to_string(cold.size()), golden::hash(cold), golden::hash(content)});
    const Bytes before = *store->export_sequence(id);
    ASSERT_TRUE(store->release(id));
    const Result<SequenceId> back = load_sequence(*store, kept.data(), kept.size());
    ASSERT_TRUE(back.is_ok()) << back.status().message();
    EXPECT_TRUE(*store->export_sequence(*back) == before) << name;
  };
  for (const bool coded : {false, true}) {
    const auto store = std::move(*HostStore::make(config_of(false)));
    const SequenceId id = fill(store.get());
    record(coded ? "tiered_coded" : "tiered", store.get(), id, coded,
           pages_of(*store, *store->export_sequence(id)));
  }
  for (const bool fixed : {false, true}) {
    KvStoreConfig config = config_of(true);
    config.coded.fixed_blocks = fixed;
    if (fixed) {
      config.policy.sink_tokens = 3;
      config.policy.alpha_high = 2.4;
    }
    const auto store = std::move(*KvStore::create(config));
    const SequenceId id = fill(store.get());
    if (fixed) {
      // The first block of each of the four rows, and others.
      const StoreStats stats = *store->stats();
      EXPECT_GT(stats.tokens[static_cast<int32_t>(Tier::kHigh)], 4 * 64);
      EXPECT_GT(stats.tokens[static_cast<int32_t>(Tier::kLow)], 0);
    }
    record(fixed ? "coded_fixed" : "coded", store.get(), id, true,
           values_of(*store, *store->export_sequence(id)));
  }
}

}  // namespace
}  // namespace tierkv
