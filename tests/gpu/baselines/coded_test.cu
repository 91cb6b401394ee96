// SPDX-License-Identifier: Apache-2.0
// Coded blocks on the GPU against the host's codec, byte for byte and code for code, on valid and
// on hostile blocks.
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "bench/baselines/coded/coded_decode.h"
#include "bench/baselines/coded/coded_encode.h"
#include "bench/baselines/coded/tree_decode.h"
#include "codec/format/coded_block.h"
#include "tests/gpu/device_array.cuh"
#include "tests/support/code_source.h"

namespace tierkv {
namespace {

using test::DeviceArray;

constexpr int16_t kPoison = 0x5a5a;

// Groups of random codes and their blocks, made with one codebook.
struct CodedWorld {
  Codebook codebook;
  int32_t head_dim = 0;
  std::vector<uint8_t> bytes;
  std::vector<CodedGroup> groups;
  std::vector<int16_t> codes;  // what was encoded
  int64_t num_codes = 0;
};

struct WorldShape {
  Component component;
  BlockMode mode;
  int32_t streams;
  int32_t head_dim;
  int32_t groups;
};

void add_group(CodedWorld* w, int32_t tokens, const std::vector<uint8_t>& blocks) {
  CodedGroup g;
  g.offset = static_cast<int64_t>(w->bytes.size());
  g.codes = w->num_codes;
  g.bytes = static_cast<int32_t>(blocks.size());
  g.tokens = tokens;
  w->groups.push_back(g);
  w->bytes.insert(w->bytes.end(), blocks.begin(), blocks.end());
  w->num_codes += int64_t{tokens} * w->head_dim;
}

CodedWorld make_world(CodeSource* source, const WorldShape& shape) {
  CodedWorld w;
  w.head_dim = shape.head_dim;
  CodeHistogram histogram(shape.component, shape.head_dim);
  const double spread = source->spread_for(shape.mode);
  const auto draw = [&](int32_t tokens, double wider) {
    return source->bell(int64_t{tokens} * shape.head_dim, spread * wider, -3.0, source->below(2));
  };
  histogram.add(draw(kBlockTokens * 4, 1.0).data(), kBlockTokens * 4);
  CodebookSpec spec;
  spec.mode = shape.mode;
  spec.streams_per_lane = shape.streams;
  spec.table_id = static_cast<uint8_t>(source->below(256));
  auto built = build_codebook(histogram, spec);
  EXPECT_TRUE(built.is_ok()) << built.status().message();
  w.codebook = *built;
  for (int32_t i = 0; i < shape.groups; ++i) {
    const int32_t tokens = i % 3 == 0 ? kBlockTokens : 1 + source->below(kBlockTokens);
    // Wider ones have exceptions, or are raw.
    const double wider = i % 4 == 0 ? 1.3 : i % 16 == 5 ? 40.0 : i % 16 == 7 ? 4000.0 : 1.0;
    const std::vector<int16_t> codes = draw(tokens, wider);
    std::vector<uint8_t> blocks;
    EXPECT_TRUE(encode_block(codes.data(), tokens, shape.head_dim, w.codebook, &blocks).is_ok());
    add_group(&w, tokens, blocks);
    w.codes.insert(w.codes.end(), codes.begin(), codes.end());
  }
  return w;
}

enum class By { kTable, kLoop, kArray };

struct Decoded {
  std::vector<int16_t> codes;
  std::vector<uint16_t> values;
  std::vector<StatusCode> status;
};

Decoded decode_on_gpu(const CodedWorld& w, const std::vector<float>& steps,
                      const std::vector<float>& means, By by = By::kTable) {
  const DeviceArray<uint8_t> bytes(w.bytes);
  const DeviceArray<CodedGroup> groups(w.groups);
  const DeviceArray<uint32_t> table(device_table(w.codebook));
  const DeviceArray<uint16_t> tree(w.codebook.tree);
  const DeviceArray<int16_t> codes(std::vector<int16_t>(static_cast<size_t>(w.num_codes), kPoison));
  const DeviceArray<uint16_t> values(
      std::vector<uint16_t>(static_cast<size_t>(w.num_codes), 0x7e00));
  const DeviceArray<StatusCode> status(std::vector<StatusCode>(w.groups.size(), StatusCode::kIo));
  const DeviceArray<float> device_steps(steps), device_means(means);
  CodedDecode call;
  call.bytes = bytes.get();
  call.groups = groups.get();
  call.codes = codes.get();
  call.values = values.get();
  call.steps = device_steps.get();
  call.means = device_means.get();
  call.status = status.get();
  call.codebook = device_codebook(w.codebook);
  call.codebook.table = table.get();
  call.size = static_cast<int64_t>(w.bytes.size());
  call.token_stride = w.head_dim;
  call.num_groups = static_cast<int32_t>(w.groups.size());
  call.num_steps = static_cast<int32_t>(steps.size());
  call.head_dim = w.head_dim;
  const DeviceTree walked = {tree.get(), static_cast<int32_t>(w.codebook.tree.size())};
  const Status s =
      by == By::kTable
          ? decode_coded(call, nullptr)
          : decode_by_tree(call, walked, by == By::kLoop ? TreeForm::kLoop : TreeForm::kArray,
                           nullptr);
  EXPECT_TRUE(s.is_ok()) << s.message();
  return {codes.read(), values.read(), status.read()};
}

// Every group as decode_block() has it, and the values from those codes. Returns how many were
// valid.
int32_t compare_with_host(const CodedWorld& w, CodeSource* source) {
  const std::vector<float> steps = {0.37f, 1.9f};
  std::vector<float> means(steps.size() * static_cast<size_t>(w.head_dim));
  for (float& m : means) m = static_cast<float>(4 * source->uniform() - 2);
  CodedWorld world = w;
  for (CodedGroup& g : world.groups) g.step = source->below(2);
  // All ways must find the same, in hostile streams as well.
  const bool has_walk =
      w.codebook.mode == BlockMode::kSingle || w.codebook.mode == BlockMode::kPair;
  const Decoded got =
      decode_on_gpu(world, steps, means, has_walk ? static_cast<By>(source->below(3)) : By::kTable);
  int32_t valid = 0;
  for (size_t i = 0; i < world.groups.size(); ++i) {
    const CodedGroup& g = world.groups[i];
    std::vector<int16_t> want(static_cast<size_t>(g.tokens) * static_cast<size_t>(w.head_dim));
    const Status s = decode_block(w.bytes.data() + g.offset, g.bytes, g.tokens, w.head_dim,
                                  w.codebook, want.data());
    valid += s.is_ok();
    EXPECT_EQ(got.status[i], s.code()) << "group " << i << ": " << s.message();
    for (size_t j = 0; j < want.size(); ++j) {
      const size_t at = static_cast<size_t>(g.codes) + j;
      const float mean = means[static_cast<size_t>(g.step * w.head_dim) + j % w.head_dim];
      const float value = steps[static_cast<size_t>(g.step)] * static_cast<float>(want[j]);
      const uint16_t half = s.is_ok() ? float_to_half(value + mean) : uint16_t{0};
      if (got.codes[at] != want[j] || got.values[at] != half) {
        ADD_FAILURE() << "group " << i << " code " << j << ": " << got.codes[at] << " not "
                      << want[j] << ", value " << got.values[at] << " not " << half;
        return valid;
      }
    }
  }
  return valid;
}

class CodedDeviceTest : public ::testing::Test {
 protected:
  CodedDeviceTest() : seed_(std::random_device{}()), source_(seed_) {
    RecordProperty("seed", std::to_string(seed_));
  }
  ~CodedDeviceTest() override {
    if (HasFailure()) std::printf("seed %u\n", seed_);
  }
  uint32_t seed_;
  CodeSource source_;
};

constexpr BlockMode kModes[] = {BlockMode::kSingle, BlockMode::kPair, BlockMode::kQuad,
                                BlockMode::kSplit};

TEST_F(CodedDeviceTest, DecodesWhatTheHostEncodes) {
  for (BlockMode mode : kModes) {
    for (Component component : {Component::kKey, Component::kValue}) {
      for (int32_t streams : {1, 2}) {
        for (int32_t head_dim : {64, 96, 128, 256, 1 + source_.below(300)}) {
          SCOPED_TRACE(std::string(block_mode_name(mode)) + " streams " + std::to_string(streams) +
                       " head_dim " + std::to_string(head_dim));
          const CodedWorld w = make_world(&source_, {component, mode, streams, head_dim, 12});
          const Decoded got = decode_on_gpu(w, {1.0f}, std::vector<float>(512));
          ASSERT_EQ(got.codes, w.codes);
          if (mode == BlockMode::kSingle || mode == BlockMode::kPair) {
            for (const By by : {By::kLoop, By::kArray}) {
              ASSERT_EQ(decode_on_gpu(w, {1.0f}, std::vector<float>(512), by).codes, w.codes);
            }
          }
          ASSERT_EQ(compare_with_host(w, &source_), 12);
        }
      }
    }
  }
}

// Changes one to three places of a group's bytes, and sometimes makes the checksum right again.
void mutate(CodeSource* source, std::vector<uint8_t>* bytes) {
  const auto size = static_cast<int32_t>(bytes->size());
  const int32_t kind = source->below(8);
  for (int32_t i = source->below(3); i >= 0; --i) {
    // Headers and starts are few bytes of many: half of the changes go there.
    const int32_t at = source->below(2) ? source->below(std::min(size, 160)) : source->below(size);
    uint8_t& byte = (*bytes)[static_cast<size_t>(at)];
    byte = kind % 2 ? static_cast<uint8_t>(source->below(256))
                    : static_cast<uint8_t>(byte ^ 1 << source->below(8));
  }
  if (kind == 7) bytes->resize(static_cast<size_t>(source->below(size / 16 + 1)) * 16);
  // Past the checksum lie the checks that protect the decoder.
  int64_t at = 0;
  while (at + 16 <= static_cast<int64_t>(bytes->size())) {
    uint8_t* block = bytes->data() + at;
    const int64_t length = int64_t{load_u16(block + 12)} * 16;
    if (length < 16 || at + length > static_cast<int64_t>(bytes->size())) break;
    store_u16(block + 14, block_checksum(block, static_cast<int32_t>(length)));
    at += length;
  }
}

TEST_F(CodedDeviceTest, AgreesWithTheHostOnHostileBlocks) {
  constexpr int32_t kMutants = 400;
  int32_t valid = 0, total = 0;
  for (BlockMode mode : kModes) {
    for (int32_t streams : {1, 2}) {
      const Component component = source_.below(2) ? Component::kKey : Component::kValue;
      const int32_t head_dim = source_.below(2) ? 128 : 64 + 32 * source_.below(4);
      SCOPED_TRACE(std::string(block_mode_name(mode)) + " streams " + std::to_string(streams));
      const CodedWorld w = make_world(&source_, {component, mode, streams, head_dim, 8});
      CodedWorld mutants;
      mutants.codebook = w.codebook;
      mutants.head_dim = w.head_dim;
      for (int32_t i = 0; i < kMutants; ++i) {
        const CodedGroup& g = w.groups[static_cast<size_t>(source_.below(8))];
        std::vector<uint8_t> blocks(w.bytes.begin() + g.offset,
                                    w.bytes.begin() + g.offset + g.bytes);
        if (i % 8 != 0) mutate(&source_, &blocks);
        add_group(&mutants, i % 50 == 1 ? 1 + source_.below(64) : g.tokens, blocks);
      }
      valid += compare_with_host(mutants, &source_);
      total += kMutants;
    }
  }
  std::printf("%d of %d mutants decode\n", valid, total);
  EXPECT_GT(valid, total / 10);
  EXPECT_LT(valid, total * 9 / 10);
}

// What an encoder gets and leaves, in device memory; the bytes and statuses are poisoned.
struct Encoding {
  DeviceArray<int16_t> codes;
  DeviceArray<uint8_t> bytes;
  DeviceArray<CodedGroup> groups;
  DeviceArray<StatusCode> status;
  DeviceArray<uint32_t> words;
  DeviceArray<uint16_t> cheapest;
  CodedEncode call;

  Encoding(const CodedWorld& w, const std::vector<CodedGroup>& places, int64_t size)
      : codes(w.codes),
        bytes(std::vector<uint8_t>(static_cast<size_t>(size), 0xa5)),
        groups(places),
        status(std::vector<StatusCode>(places.size(), StatusCode::kIo)),
        words(encoder_words(w.codebook)),
        cheapest(w.codebook.cheapest) {
    call.codes = codes.get();
    call.bytes = bytes.get();
    call.groups = groups.get();
    call.status = status.get();
    call.codebook = device_codebook(w.codebook);
    call.codebook.words = words.get();
    call.codebook.cheapest = cheapest.get();
    call.size = size;
    call.token_stride = w.head_dim;
    call.num_groups = static_cast<int32_t>(places.size());
    call.head_dim = w.head_dim;
  }
};

// Every group where its capacity lets it lie: the bytes of the host, and nothing behind them.
void expect_host_bytes(const CodedWorld& w) {
  const auto room = static_cast<int32_t>(coded_group_capacity(w.head_dim));
  std::vector<CodedGroup> groups = w.groups;
  for (size_t i = 0; i < groups.size(); ++i) {
    groups[i].offset = static_cast<int64_t>(i) * room;
    groups[i].bytes = i == 1 ? w.groups[i].bytes - 16 : i == 2 ? w.groups[i].bytes : room;
  }
  const Encoding e(w, groups, static_cast<int64_t>(groups.size()) * room);
  const Status s = encode_coded(e.call, nullptr);
  ASSERT_TRUE(s.is_ok()) << s.message();
  const std::vector<uint8_t> got = e.bytes.read();
  const std::vector<CodedGroup> sizes = e.groups.read();
  const std::vector<StatusCode> codes_of = e.status.read();
  for (size_t i = 0; i < groups.size(); ++i) {
    const CodedGroup& g = w.groups[i];
    if (i == 1) {
      ASSERT_EQ(codes_of[i], StatusCode::kBufferTooSmall);
      continue;
    }
    ASSERT_EQ(codes_of[i], StatusCode::kOk) << "group " << i;
    ASSERT_EQ(sizes[i].bytes, g.bytes) << "group " << i;
    const auto begin = got.begin() + static_cast<int64_t>(i) * room;
    const auto wrong = std::mismatch(begin, begin + g.bytes, w.bytes.begin() + g.offset).first;
    ASSERT_EQ(wrong - begin, g.bytes) << "group " << i << ", tokens " << g.tokens;
    const auto rest = std::count(begin + g.bytes, begin + room, uint8_t{0xa5});
    ASSERT_EQ(rest, room - g.bytes) << "group " << i;
  }
}

TEST_F(CodedDeviceTest, EncodesTheBytesOfTheHost) {
  for (BlockMode mode : {BlockMode::kSingle, BlockMode::kPair}) {
    for (Component component : {Component::kKey, Component::kValue}) {
      for (int32_t streams : {1, 2}) {
        for (int32_t head_dim : {64, 96, 128, 256, 1 + source_.below(300)}) {
          SCOPED_TRACE(std::string(block_mode_name(mode)) + " streams " + std::to_string(streams) +
                       " head_dim " + std::to_string(head_dim));
          expect_host_bytes(make_world(&source_, {component, mode, streams, head_dim, 20}));
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// By the paper's counter: every group somewhere, none over another, until the bytes are full.
TEST_F(CodedDeviceTest, ACounterPlacesTheGroups) {
  const CodedWorld w = make_world(&source_, {Component::kValue, BlockMode::kPair, 2, 128, 200});
  const auto total = static_cast<int64_t>(w.bytes.size());
  for (const int64_t size : {total, total / 2 / 16 * 16}) {
    const DeviceArray<unsigned long long> cursor(std::vector<unsigned long long>(1, 0));
    Encoding e(w, w.groups, total);
    e.call.cursor = cursor.get();
    e.call.size = size;
    const Status s = encode_coded(e.call, nullptr);
    ASSERT_TRUE(s.is_ok()) << s.message();
    EXPECT_EQ(cursor.read()[0], static_cast<unsigned long long>(total));
    const std::vector<uint8_t> got = e.bytes.read();
    const std::vector<CodedGroup> placed = e.groups.read();
    const std::vector<StatusCode> results = e.status.read();
    std::vector<bool> taken(static_cast<size_t>(total / 16), false);
    for (size_t i = 0; i < placed.size(); ++i) {
      if (results[i] == StatusCode::kBufferTooSmall && size < total) continue;
      ASSERT_EQ(results[i], StatusCode::kOk) << "group " << i;
      const CodedGroup& g = w.groups[i];
      ASSERT_EQ(placed[i].bytes, g.bytes);
      ASSERT_TRUE(placed[i].offset >= 0 && placed[i].offset + g.bytes <= size);
      const auto from = got.begin() + placed[i].offset;
      EXPECT_TRUE(std::equal(from, from + g.bytes, w.bytes.begin() + g.offset)) << "group " << i;
      for (int64_t unit = placed[i].offset / 16; unit < (placed[i].offset + g.bytes) / 16; ++unit) {
        ASSERT_FALSE(taken[static_cast<size_t>(unit)]) << "group " << i;
        taken[static_cast<size_t>(unit)] = true;
      }
    }
    EXPECT_EQ(std::count(got.begin() + size, got.end(), uint8_t{0xa5}), total - size);
  }
}

TEST_F(CodedDeviceTest, GroupsOutsideTheBytesAreRefused) {
  CodedWorld w = make_world(&source_, {Component::kKey, BlockMode::kPair, 2, 64, 6});
  w.groups[0].offset = -16;
  w.groups[1].offset = static_cast<int64_t>(w.bytes.size()) + 16;
  w.groups[2].bytes = static_cast<int32_t>(w.bytes.size()) + 16;
  w.groups[3].offset += 8;
  w.groups[4].tokens = 65;
  const Decoded got = decode_on_gpu(w, {1.0f}, std::vector<float>(64));
  for (size_t i = 0; i < 5; ++i) EXPECT_EQ(got.status[i], StatusCode::kInvalidArgument) << i;
  EXPECT_EQ(got.status[5], StatusCode::kOk);
  const CodedGroup& g = w.groups[0];
  EXPECT_EQ(got.codes[static_cast<size_t>(g.codes)], kPoison);
}

}  // namespace
}  // namespace tierkv
