// SPDX-License-Identifier: Apache-2.0
// A dump into a container and back: the values are those of the analysis, and no damage passes.
#include "tools/container/container_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>

#include "codec/file/container_chunks.h"
#include "codec/file/container_format.h"
#include "codec/host/parallel.h"
#include "datasets/synth.h"
#include "tools/analysis/scheme/layer_scheme.h"
#include "tools/container/chunk_write.h"
#include "tools/container/step_log.h"

namespace tierkv::analysis {
namespace {

using testing::HasSubstr;

constexpr const char* kPresets[] = {"fp16",
                                    "k8v4",
                                    "k4v2:group_k=32",
                                    "k8v2+rot",
                                    "k1v1",
                                    "k16v4:sinks=4",
                                    "diffkv",
                                    "diffkv:alpha_l=0.5,sinks=3",
                                    "k4v2n",
                                    "tiers:classes=k4v4/k4v2",
                                    "tiers:classes=k4v2/k2v2@1:0.5,rotate=off",
                                    "tiers:classes=0.5*k2v2|0.5*k2v2,means=off",
                                    "kivi4:group=32,residual=40",
                                    "kivi2",
                                    "kvcomp",
                                    "kvcomp:unit=channel",
                                    "small",
                                    "small:books=4,sinks=0,k=0.05",
                                    "small:only=v,window=3",
                                    "step",
                                    "step:basis=none",
                                    "step:only=v",
                                    "step:only=v,basis=none",
                                    "step:only=v+rot",
                                    "step+rot",
                                    "k4v4+huffman",
                                    "k4v4+huffman+rot",
                                    "diffkv+huffman"};

class ContainerFileTest : public testing::Test {
 protected:
  ContainerFileTest() : seed_(std::random_device{}()) {
    folder_ = std::filesystem::temp_directory_path() / ("tierkv_cache_" + std::to_string(seed_));
    std::filesystem::create_directory(folder_);
  }
  ~ContainerFileTest() override { std::filesystem::remove_all(folder_); }

  std::string path(const char* name) const { return folder_ / name; }

  datasets::DumpReader dump(std::vector<int64_t> tokens, int32_t head_dim, DType dtype) {
    datasets::SynthSpec spec;
    spec.layout = {1, 2, 1, head_dim, dtype, false, 1e4, 1 / std::sqrt(double(head_dim))};
    spec.tokens = std::move(tokens);
    spec.num_queries = 8;
    spec.seed = seed_;
    const Status s = datasets::synthesize(spec, path("in.h5"), {});
    EXPECT_TRUE(s.is_ok()) << s.message();
    return std::move(datasets::DumpReader::open(path("in.h5")).value());
  }
  std::vector<uint8_t> compressed(datasets::DumpReader& reader, const std::string& preset,
                                  int32_t threads = 2) {
    CompressOptions options;
    options.preset = parse_preset(preset).value();
    options.threads = threads;
    const auto summary = compress(reader, options, path("a.tkv"));
    EXPECT_TRUE(summary.is_ok()) << summary.status().message();
    std::ifstream in(path("a.tkv"), std::ios::binary);
    std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(in), {}};
    EXPECT_EQ(summary ? summary->file_bytes : -1, static_cast<int64_t>(bytes.size()));
    return bytes;
  }
  static Status check(std::vector<uint8_t> bytes, bool checksums = true) {
    ContainerReadOptions options;
    options.verify_checksums = checksums;
    Result<ContainerReader> reader =
        ContainerReader::from_bytes(std::move(bytes), "a.tkv", options);
    if (!reader) return reader.status();
    const Result<CacheDecoder> decoder = CacheDecoder::open(std::move(reader.value()));
    return decoder ? verify(*decoder, 1, {}) : decoder.status();
  }

  uint32_t seed_;
  std::filesystem::path folder_;
};

// What the analysis measures is what the container gives back, bit for bit.
TEST_F(ContainerFileTest, RowsAreThoseOfTheAnalysis) {
  for (const auto& [dtype, head_dim] : {std::pair{DType::kFloat16, 64},
                                        {DType::kBFloat16, 96},
                                        {DType::kFloat32, 128},
                                        {DType::kBFloat16, 160}}) {  // 160: no pages
    datasets::DumpReader reader = dump({1, 200}, head_dim, dtype);
    const CacheLayout& layout = reader.info().layout;
    for (const char* text : kPresets) {
      const std::vector<uint8_t> bytes = compressed(reader, text);
      const Result<CacheDecoder> decoder =
          CacheDecoder::open(std::move(ContainerReader::from_bytes(bytes, "a.tkv").value()));
      ASSERT_TRUE(decoder.is_ok()) << decoder.status().message();
      const Scheme scheme = parse_preset(text)->scheme.for_head_dim(layout.head_dim);
      for (int32_t seq = 0; seq < 2; ++seq) {
        LayerData data;
        LayerScheme shared;
        ASSERT_TRUE(
            load_layer(reader, seq, 0, wants_significance(scheme, reader.info(), seq, 0), 2, &data)
                .is_ok());
        ASSERT_TRUE(prepare_layer(scheme, data, layout, nullptr, &shared).is_ok());
        RowCodec codec = shared.row(scheme, data, 0);
        ASSERT_EQ(codec.encode(), StatusCode::kOk);
        DecodedRow row;
        const Status status = decoder->decode_row(seq, 0, 0, &row);
        ASSERT_TRUE(status.is_ok()) << status.message();
        std::vector<uint8_t> seen(data.tokens, 0);
        const auto compare = [&](Part, const int64_t* tokens, const float* k, const float* v,
                                 int32_t n) {
          const int32_t d = layout.head_dim;
          for (int32_t i = 0; i < n; ++i) {
            seen[tokens[i]] = 1;
            const int64_t at = tokens[i] * d;
            ASSERT_TRUE(std::equal(k + i * d, k + (i + 1) * d, row.k.begin() + at)) << text;
            ASSERT_TRUE(std::equal(v + i * d, v + (i + 1) * d, row.v.begin() + at)) << text;
          }
        };
        ASSERT_EQ(codec.decode(compare), StatusCode::kOk);
        for (int64_t t = 0; t < data.tokens; ++t) {
          EXPECT_EQ(row.pruned[t], !seen[t]) << text << " token " << t << ", seed " << seed_;
        }
      }
    }
  }
}

TEST_F(ContainerFileTest, BytesDoNotDependOnThreads) {
  datasets::DumpReader reader = dump({130, 7}, 64, DType::kFloat16);
  for (const char* text : {"diffkv+huffman", "step"}) {
    EXPECT_EQ(compressed(reader, text, 1), compressed(reader, text, 5)) << text;
  }
}

TEST_F(ContainerFileTest, AnyDamagedByteAndAnyTruncationIsRefused) {
  std::mt19937 rng(seed_);
  for (const auto& [text, head_dim] :
       {std::pair{"step:window=2", 16}, {"diffkv:window=2", 16}, {"diffkv:window=2", 64}}) {
    datasets::DumpReader reader = dump({9}, head_dim, DType::kFloat16);
    const std::vector<uint8_t> bytes = compressed(reader, text);
    ASSERT_TRUE(check(bytes).is_ok());
    for (size_t i = 0; i < bytes.size(); ++i) {
      std::vector<uint8_t> damaged = bytes;
      damaged[i] ^= static_cast<uint8_t>(1 + rng() % 255);
      const Status s = check(damaged);
      ASSERT_FALSE(s.is_ok()) << text << ": byte " << i << ", seed " << seed_;
      ASSERT_THAT(s.message(), HasSubstr("a.tkv: "));
      damaged.assign(bytes.begin(), bytes.begin() + static_cast<int64_t>(i));
      ASSERT_FALSE(check(damaged).is_ok()) << text << ": cut at " << i;
    }
  }
}

// Behind the checksums nothing may trust a size: damage is either refused or decodes to something.
TEST_F(ContainerFileTest, DamageWithoutChecksumsDoesNotCrash) {
  std::mt19937 rng(seed_);
  for (const auto& [text, head_dim] : {std::pair{"step:window=2", 16},
                                       {"diffkv+huffman", 16},
                                       {"kvcomp:window=2,block=16", 16},
                                       {"kivi2:group=16,residual=3", 16},
                                       {"diffkv:window=2", 64},
                                       {"k4v4+rot", 64}}) {
    datasets::DumpReader reader = dump({70}, head_dim, DType::kFloat16);
    const std::vector<uint8_t> bytes = compressed(reader, text);
    int refused = 0;
    for (int trial = 0; trial < 3000; ++trial) {
      std::vector<uint8_t> damaged = bytes;
      for (uint32_t n = 1 + rng() % 3; n > 0; --n) {
        damaged[rng() % bytes.size()] = static_cast<uint8_t>(rng() % 4 == 0 ? 0xff : rng());
      }
      refused += !check(damaged, false).is_ok();
    }
    EXPECT_GT(refused, 100) << text << ", seed " << seed_;
  }
}

// Chunks of a container, to be written again with some of them changed.
struct Chunks {
  std::vector<std::pair<ChunkEntry, std::vector<uint8_t>>> list;

  explicit Chunks(const std::string& path) {
    const ContainerReader reader = std::move(ContainerReader::open(path).value());
    for (size_t i = 0; i < reader.chunks().size(); ++i) {
      list.emplace_back(reader.chunks()[i], std::vector<uint8_t>());
      EXPECT_TRUE(reader.read(static_cast<int64_t>(i), &list.back().second).is_ok());
    }
  }
  // The n-th chunk of a kind.
  std::pair<ChunkEntry, std::vector<uint8_t>>& at(ChunkKind kind, int n = 0) {
    for (auto& chunk : list) {
      if (chunk.first.key.kind == kind && n-- == 0) return chunk;
    }
    ADD_FAILURE() << "no such chunk";
    return list.front();
  }
  Status verify_as(const std::string& path) const {
    ContainerWriter writer = std::move(ContainerWriter::create(path).value());
    for (const auto& [entry, bytes] : list) {
      EXPECT_TRUE(writer.add(entry.key, bytes, entry.optional).is_ok());
    }
    EXPECT_TRUE(writer.finish().is_ok());
    Result<ContainerReader> reader = ContainerReader::open(path);
    if (!reader) return reader.status();
    const Result<CacheDecoder> decoder = CacheDecoder::open(std::move(reader.value()));
    return decoder ? verify(*decoder, 1, {}) : decoder.status();
  }
};

// With checksums that fit: what is inside contradicts itself.
TEST_F(ContainerFileTest, PagesThatContradictTheRowMapAreRefused) {
  datasets::DumpReader reader = dump({300}, 64, DType::kFloat16);
  compressed(reader, "diffkv:alpha_h=0,window=10");
  const Chunks sound(path("a.tkv"));
  EXPECT_TRUE(sound.verify_as(path("b.tkv")).is_ok());
  const auto refused = [&](const char* what, auto change) {
    Chunks chunks = sound;
    change(chunks);
    const Status s = chunks.verify_as(path("b.tkv"));
    EXPECT_EQ(s.code(), StatusCode::kCorrupt) << what;
    EXPECT_THAT(s.message(), testing::ContainsRegex("b.tkv: (page|has no page)")) << what;
  };
  refused("missing page", [](Chunks& c) { c.at(ChunkKind::kPage, 1).first.key.page = 9; });
  refused("one page too many", [](Chunks& c) {
    int last = 0;
    for (const auto& chunk : c.list) {
      if (chunk.first.key.kind == ChunkKind::kPage) last = chunk.first.key.page;
    }
    c.list.push_back(c.at(ChunkKind::kPage));
    c.list.back().first.key.page = last + 1;
  });
  refused("short page", [](Chunks& c) { c.at(ChunkKind::kPage).second.pop_back(); });
  refused("another token", [](Chunks& c) {
    auto& bytes = c.at(ChunkKind::kPage).second;
    std::swap(bytes[bytes.size() - 4], bytes[bytes.size() - 8]);
  });
  for (const int32_t rule : {1, 4, -1}) {  // 4: clipped at the norm, of 8 bits
    refused("rule", [rule](Chunks& c) {
      c.at(ChunkKind::kPageFormat).second[4 * 7] = static_cast<uint8_t>(rule);
    });
  }
  for (int field = 0; field < 12; ++field) {
    refused("page format",
            [field](Chunks& c) { c.at(ChunkKind::kPageFormat).second[4 * field] ^= 0x55; });
  }
  Chunks both = sound;
  both.list.push_back(both.at(ChunkKind::kSegment));
  both.list.back().first.key.part = static_cast<uint8_t>(Part::kHigh);
  EXPECT_THAT(both.verify_as(path("b.tkv")).message(), HasSubstr("is stored as pages"));
}

// Pages hold keys and values of the same tokens, so that none has the values of a key gap.
TEST_F(ContainerFileTest, PagesBesideAKeyGapAreRefused) {
  const auto chunks_of = [&](int64_t tokens) {
    datasets::DumpReader reader = dump({tokens}, 64, DType::kFloat16);
    compressed(reader, "k8v4:sinks=0,window=10");
    return Chunks(path("a.tkv"));
  };
  const std::vector<uint8_t> format = chunks_of(300).at(ChunkKind::kPageFormat).second;
  const int64_t full = parse_page_format(format, 64)->shape.tokens, tokens = full + 20;
  Chunks chunks = chunks_of(tokens);
  EXPECT_TRUE(chunks.verify_as(path("b.tkv")).is_ok());
  // The second page's 10 tokens become a gap, with the window's keys.
  std::vector<uint8_t>& row = chunks.at(ChunkKind::kRow).second;
  RowPlan plan = parse_row(row, tokens).value();
  plan.key_body_end = full;
  row = serialize_row(plan);
  auto& page = chunks.at(ChunkKind::kPage, 1);
  page = chunks.at(ChunkKind::kSegment);
  ASSERT_EQ(page.first.key.part, static_cast<uint8_t>(Part::kWindow));
  page.first.key.part = static_cast<uint8_t>(Part::kKeyGap);
  const Status s = chunks.verify_as(path("b.tkv"));
  EXPECT_EQ(s.code(), StatusCode::kCorrupt);
  EXPECT_THAT(s.message(), HasSubstr("b.tkv: page of"));
}

TEST_F(ContainerFileTest, AFamilyOfBooksThatContradictEachOtherIsRefused) {
  datasets::DumpReader reader = dump({300}, 64, DType::kFloat16);
  compressed(reader, "small:books=2,sinks=0");
  Chunks chunks(path("a.tkv"));
  auto &first = chunks.at(ChunkKind::kCodebook), &second = chunks.at(ChunkKind::kCodebook, 1);
  ASSERT_EQ(second.first.key.page, 1);
  std::swap(first.second, second.second);
  const Status s = chunks.verify_as(path("b.tkv"));
  EXPECT_EQ(s.code(), StatusCode::kCorrupt);
  EXPECT_THAT(s.message(),
              HasSubstr("b.tkv: " + to_string(first.first.key) + ": coded block: book 1"));
}

TEST_F(ContainerFileTest, ZstdPresetsAreRefusedByNameAndLeaveNothing) {
  datasets::DumpReader reader = dump({20}, 64, DType::kFloat16);
  CompressOptions options;
  options.preset = parse_preset("zstd-codes:of=k4v4").value();
  const auto summary = compress(reader, options, path("z.tkv"));
  EXPECT_EQ(summary.status().code(), StatusCode::kUnsupported);
  EXPECT_THAT(summary.status().message(), HasSubstr("zstd-codes:of=k4v4"));
  EXPECT_FALSE(std::filesystem::exists(path("z.tkv")));
  EXPECT_FALSE(std::filesystem::exists(path("z.tkv.part")));
}

TEST_F(ContainerFileTest, ValuesTakeTheNarrowestTypeThatHoldsThem) {
  for (const auto& [x, width] : {std::pair{0.5f, 2}, {1e30f, 4}, {0x1p100f, 2}, {0.1f, 4}}) {
    const std::vector<uint8_t> bytes = serialize_values({x, -1.0f});
    EXPECT_EQ(bytes.size(), 16u + 2 * width) << x;
    const Result<std::vector<float>> back = parse_values(bytes, 2);
    ASSERT_TRUE(back.is_ok());
    EXPECT_EQ(back.value(), (std::vector<float>{x, -1.0f}));
    EXPECT_FALSE(parse_values(bytes, 3).is_ok());
  }
}

// `decompress` keeps state for every row: a small file must not ask for more than it holds.
TEST_F(ContainerFileTest, FewerRowMapsThanRowsAreRefused) {
  ContainerModel model;
  model.layout = {4096, 4096, 4096, 64, DType::kFloat16, false, 0, 0.125};
  model.num_sequences = 1;
  ChunkBlock block;
  block.add({ChunkKind::kModel}, serialize_model(model));
  block.add({ChunkKind::kSequence, 0}, serialize_sequence({"a", "text", {1}}));
  std::vector<ChunkBlock> blocks;
  blocks.push_back(std::move(block));
  const Status s = check(assemble_container(blocks));
  EXPECT_EQ(s.code(), StatusCode::kCorrupt);
  EXPECT_THAT(s.message(), HasSubstr("a.tkv: has 0 row maps, its sequences, layers and heads need "
                                     "16777216"));
}

TEST(StepLogTest, NoStepAfterAFailureIsTaken) {
  StepLog log(1);
  std::vector<int64_t> taken;
  for (const int64_t step : {int64_t{3}, int64_t{5}, int64_t{2}}) {
    log.take(step, [&] {
      taken.push_back(step);
      return step == 3 ? Status(StatusCode::kCorrupt, "third") : Status::ok();
    });
  }
  EXPECT_EQ(taken, (std::vector<int64_t>{3, 2}));
  EXPECT_EQ(log.failure().message(), "third");
}

int64_t peak_bytes() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} << 10;
}

// A table of this rotation takes 64 MiB a layer.
TEST_F(ContainerFileTest, OpeningMakesNoRopeTables) {
  constexpr int32_t kLayers = 6;
  ContainerModel model;
  model.layout = {kLayers, 1, 1, kMaxHeadDim, DType::kFloat16, true, 0, 0.125};
  model.num_sequences = 1;
  for (int32_t l = 0; l < kLayers; ++l) {
    model.rope.push_back({RopePairing::kHalves, kMaxHeadDim,
                          std::vector<float>(kMaxHeadDim / 2, 1e-6f * float(l + 1))});
  }
  ChunkBlock block;
  block.add({ChunkKind::kModel}, serialize_model(model));
  block.add({ChunkKind::kSequence, 0},
            serialize_sequence({"a", "text", std::vector<int32_t>(1 << 18)}));
  for (int32_t l = 0; l < kLayers; ++l) block.add({ChunkKind::kRow, 0, l, 0}, {0});
  WeightedRow row;
  row.head_dim = kMaxHeadDim;
  row.key_step = row.value_step = 1;
  block.add({ChunkKind::kWeightedRow, 0, 0, 0}, serialize_weighted_row(row));
  std::vector<ChunkBlock> blocks;
  blocks.push_back(std::move(block));
  const std::vector<uint8_t> bytes = assemble_container(blocks);
  const int64_t before = peak_bytes();
  const Result<CacheDecoder> decoder =
      CacheDecoder::open(std::move(ContainerReader::from_bytes(bytes, "a.tkv").value()));
  EXPECT_TRUE(decoder.is_ok()) << decoder.status().message();
  EXPECT_LT(peak_bytes() - before, int64_t{48} << 20);
}

// More rotations than tables are kept, decoded on several threads.
TEST_F(ContainerFileTest, EveryLayerIsTurnedByItsOwnRotation) {
  constexpr int32_t kLayers = 7, kTokens = 200, kDim = 16;
  datasets::DumpInfo info;
  info.layout = {kLayers, 1, 1, kDim, DType::kFloat32, true, 0, 0.25};
  for (int32_t l = 0; l < kLayers; ++l) {
    info.rope.push_back(
        {RopePairing::kHalves, kDim, std::vector<float>(kDim / 2, 0.1f * float(l + 1))});
  }
  std::mt19937 rng(seed_);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> keys(kLayers, std::vector<float>(kTokens * kDim));
  {
    auto writer = std::move(datasets::DumpWriter::create(path("in.h5"), info).value());
    ASSERT_TRUE(writer.begin_sequence("a", "", std::vector<int32_t>(kTokens)));
    for (std::vector<float>& k : keys) {
      for (float& x : k) x = normal(rng);
      ASSERT_TRUE(writer.begin_layer({}, false));
      ASSERT_TRUE(writer.write_row(0, Component::kKey, k.data()));
      ASSERT_TRUE(writer.write_row(0, Component::kValue, k.data()));
    }
    ASSERT_TRUE(writer.finish());
  }
  auto reader = std::move(datasets::DumpReader::open(path("in.h5")).value());
  const std::vector<uint8_t> bytes =
      compressed(reader, "small:k=0.05,v=0.05,importance=off,window=0,sinks=0");
  const Result<CacheDecoder> decoder =
      CacheDecoder::open(std::move(ContainerReader::from_bytes(bytes, "a.tkv").value()));
  ASSERT_TRUE(decoder.is_ok()) << decoder.status().message();
  const Status s = try_parallel_for(5 * kLayers, 4, [&](int64_t i) {
    DecodedRow row;
    const auto l = static_cast<int32_t>(i % kLayers);
    if (Status status = decoder->decode_row(0, l, 0, &row); !status) return status;
    float worst = 0;
    for (size_t n = 0; n < row.k.size(); ++n) {
      worst = std::max(worst, std::abs(row.k[n] - keys[l][n]));
    }
    // Half a step is 0.025 of the largest typical value; another rotation errs by more than 1.
    return worst < 0.5f ? Status::ok()
                        : Status(StatusCode::kCorrupt, "layer " + std::to_string(l) + " errs by " +
                                                           std::to_string(worst));
  });
  EXPECT_TRUE(s.is_ok()) << s.message() << ", seed " << seed_;
}

// What no dump could hold is refused, naming the container: else decompress() would, blaming its
// output.
TEST_F(ContainerFileTest, WhatNoDumpHoldsIsRefused) {
  datasets::DumpReader reader = dump({20, 20}, 64, DType::kFloat16);
  compressed(reader, "fp16:window=4");
  const Chunks sound(path("a.tkv"));
  EXPECT_TRUE(sound.verify_as(path("b.tkv")).is_ok());
  const auto refused = [&](const std::string& message, auto change) {
    Chunks chunks = sound;
    change(chunks);
    const Status s = chunks.verify_as(path("b.tkv"));
    EXPECT_EQ(s.code(), StatusCode::kCorrupt) << message;
    EXPECT_THAT(s.message(), HasSubstr("b.tkv: " + message));
  };
  const auto rename = [](Chunks& c, int32_t seq, const std::string& id) {
    auto& bytes = c.at(ChunkKind::kSequence, seq).second;
    ContainerSequence sequence = parse_sequence(bytes).value();
    sequence.id = id;
    bytes = serialize_sequence(sequence);
  };
  const std::string first = parse_sequence(sound.list[1].second)->id;
  refused("sequence of sequence 1: another sequence has its id '" + first + "'",
          [&](Chunks& c) { rename(c, 1, first); });
  for (const std::string& id : {std::string("."), std::string(101, 'x'), std::string("a\nb")}) {
    refused("sequence of sequence 0: its id is '.', has more than 100",
            [&](Chunks& c) { rename(c, 0, id); });
  }
  const auto turn = [](Chunks& c, RopePairing pairing, bool applied) {
    auto& bytes = c.at(ChunkKind::kModel).second;
    ContainerModel model = parse_model(bytes).value();
    model.rope = {{pairing, 0, {}}};
    model.layout.rope_applied = applied;
    bytes = serialize_model(model);
  };
  refused("model: rope: a pairing without rotary dims",
          [&](Chunks& c) { turn(c, RopePairing::kHalves, true); });
  refused("model: rope: the pairing contradicts rope_applied",
          [&](Chunks& c) { turn(c, RopePairing::kNone, true); });
  for (const ChunkKind kind : {ChunkKind::kSegment, ChunkKind::kPage}) {
    const std::string chunk = kind == ChunkKind::kPage ? "page of" : "segment of";
    refused(chunk, [&](Chunks& c) {
      auto& bytes = c.at(kind).second;
      const size_t at = kind == ChunkKind::kPage ? 0 : bytes.size() - 2;
      bytes[at] = 0;
      bytes[at + 1] = 0x7e;  // NaN in fp16
    });
  }
}

}  // namespace
}  // namespace tierkv::analysis
