// SPDX-License-Identifier: Apache-2.0
// Coded blocks for benchmarks: the codes of real caches, as bench/coded_codes.py wrote them,
// encoded and laid out as the blocks of many rows.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

#include "attention/coded/coded_attention.h"
#include "bench/baselines/coded/tree_decode.h"
#include "bench/gpu/gpu_timing.cuh"
#include "codec/format/coded_block.h"

namespace tierkv::bench {

inline constexpr int32_t kMostItems = 32768;  // blocks that lie apart: 64 x 4096 tokens of 8 heads
inline constexpr int32_t kMostRefs = 4 * kMostItems;  // longer calls read them again

// Codes of one layer.
struct LayerCodes {
  std::vector<int16_t> component[2];  // [heads, tokens, head_dim]
};
struct DumpCodes {
  int32_t heads = 0, tokens = 0, head_dim = 0;
  std::vector<LayerCodes> layers;
};

[[noreturn]] inline void fail(const std::string& what) {
  std::fprintf(stderr, "bench_coded: %s\n", what.c_str());
  std::exit(1);
}

// Every argument is a name and its value.
struct NamedOption {
  const char* name;
  std::string* value;
};
inline void read_options(int argc, char** argv, const std::vector<NamedOption>& known) {
  for (int i = 1; i < argc; i += 2) {
    const auto option = std::find_if(known.begin(), known.end(), [&](const NamedOption& o) {
      return std::string(o.name) == argv[i];
    });
    if (option == known.end()) fail(std::string("no option ") + argv[i]);
    if (i + 1 == argc) fail(std::string(argv[i]) + " needs a value");
    *option->value = argv[i + 1];
  }
}

inline DumpCodes read_codes(const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) fail("cannot open " + path);
  int32_t head[4];
  if (std::fread(head, 4, 4, file) != 4 || head[3] != 128 || head[0] < 1 || head[1] < 1 ||
      head[2] < kBlockTokens) {
    fail("not a file of codes");
  }
  DumpCodes codes{head[1], head[2], head[3], std::vector<LayerCodes>(head[0])};
  const size_t count = static_cast<size_t>(head[1]) * head[2] * head[3];
  for (LayerCodes& layer : codes.layers) {
    for (std::vector<int16_t>& c : layer.component) {
      c.resize(count);
      if (std::fread(c.data(), 2, count, file) != count) fail("the file is cut short");
    }
  }
  std::fclose(file);
  return codes;
}

// A way to code and to decode; the ladder's rungs that share bytes differ in how they are decoded.
struct Rung {
  const char* name;
  BlockMode mode;
  int32_t max_length, streams, copies_log;
  std::optional<TreeForm> tree = std::nullopt;  // how a tree is walked; none: the table
};
inline constexpr Rung kRungs[] = {
    {"tree walk", BlockMode::kSingle, 8, 1, 0, TreeForm::kLoop},
    {"array tree", BlockMode::kSingle, 8, 1, 0, TreeForm::kArray},
    {"single 8 bits x1", BlockMode::kSingle, 8, 1, 0},
    {"single 8 bits x32 /2", BlockMode::kSingle, 8, 2, 5},
    {"pair 9 bits x32 /2", BlockMode::kPair, 9, 2, 5},
    {"pair 10 bits x16 /2", BlockMode::kPair, 10, 2, 4},
    {"pair 10 bits x16", BlockMode::kPair, 10, 1, 4},
    {"pair 11 bits x8 /2", BlockMode::kPair, 11, 2, 3},
    {"pair 11 bits x1 /2", BlockMode::kPair, 11, 2, 0},
    {"pair 11 bits x1", BlockMode::kPair, 11, 1, 0},
    {"pair 12 bits x1 /2", BlockMode::kPair, 12, 2, 0},
    {"split 11 bits", BlockMode::kSplit, 11, 1, 0},
};
// What attention decodes by itself.
inline bool is_attended(const Rung& rung) {
  return rung.mode != BlockMode::kSplit && !rung.tree;
}

template <class T>
class Device {
 public:
  explicit Device(const std::vector<T>& from) : Device(from.size()) {
    check(cudaMemcpy(memory_, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice),
          "upload");
  }
  explicit Device(size_t count) : count_(count) {
    check(cudaMalloc(&memory_, count * sizeof(T) + 16), "cudaMalloc");
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  ~Device() { cudaFree(memory_); }
  T* get() const { return memory_; }
  std::vector<T> read() const {
    std::vector<T> x(count_);
    check(cudaMemcpy(x.data(), memory_, count_ * sizeof(T), cudaMemcpyDeviceToHost), "download");
    return x;
  }

 private:
  T* memory_ = nullptr;
  size_t count_;
};

// One component of kMostItems blocks, in the order of a call's rows.
struct Blocks {
  Codebook book;
  std::vector<uint8_t> bytes;
  std::vector<CodedBlockRef> refs;
  std::vector<CodedGroup> groups;
  std::vector<const int16_t*> codes;  // of each group, in the dump
  int32_t largest = 0;
  // Of `unique` different ones.
  int64_t exceptions = 0, raw = 0;
  double unique = 0;
};

// Nothing where the mode cannot hold these codes.
inline std::optional<Codebook> make_book(const CodeHistogram& histogram, const Rung& rung) {
  CodebookSpec spec;
  spec.mode = rung.mode;
  spec.max_length = rung.max_length;
  spec.streams_per_lane = rung.streams;
  auto book = build_codebook(histogram, spec);
  if (!book.is_ok()) return std::nullopt;
  return *book;
}

inline std::optional<Blocks> make_blocks(const DumpCodes& dump, const LayerCodes& layer,
                                         Component component, const Rung& rung) {
  const std::vector<int16_t>& codes = layer.component[static_cast<int32_t>(component)];
  const int64_t head_codes = int64_t{dump.tokens} * dump.head_dim;
  CodeHistogram histogram(component, dump.head_dim);
  for (int32_t h = 0; h < dump.heads; ++h) histogram.add(&codes[h * head_codes], dump.tokens);
  Blocks blocks;
  auto book = make_book(histogram, rung);
  if (!book) return std::nullopt;
  blocks.book = *book;
  const int32_t per_head = dump.tokens / kBlockTokens;
  std::vector<std::vector<uint8_t>> unique(static_cast<size_t>(dump.heads) * per_head);
  blocks.unique = static_cast<double>(unique.size());
  for (size_t i = 0; i < unique.size(); ++i) {
    const int64_t at = static_cast<int64_t>(i / per_head) * head_codes +
                       static_cast<int64_t>(i % per_head) * kBlockTokens * dump.head_dim;
    if (!encode_block(&codes[at], kBlockTokens, dump.head_dim, blocks.book, &unique[i]).is_ok()) {
      fail("encode_block");
    }
    const CodedBlockHeader h = load_header(unique[i].data());
    blocks.exceptions += h.exceptions;
    blocks.raw += is_raw_mode(h.mode);
    if (!is_raw_mode(h.mode)) {
      blocks.largest = std::max(blocks.largest, static_cast<int32_t>(unique[i].size()));
    }
  }
  for (int32_t i = 0; i < kMostItems; ++i) {
    // 64 blocks of a row lie together; rows begin 37 blocks further each.
    const int32_t row = i / 64, head = row % dump.heads;
    const int32_t at = (row / dump.heads * 37 + i % 64) % per_head;
    const std::vector<uint8_t>& b = unique[static_cast<size_t>(head) * per_head + at];
    CodedGroup group;
    group.offset = static_cast<int64_t>(blocks.bytes.size());
    group.codes = int64_t{i} * kBlockTokens * dump.head_dim;
    group.bytes = static_cast<int32_t>(b.size());
    group.tokens = kBlockTokens;
    blocks.groups.push_back(group);
    blocks.refs.push_back(
        {static_cast<uint32_t>(group.offset / 16), static_cast<uint32_t>(b.size() / 16)});
    blocks.bytes.insert(blocks.bytes.end(), b.begin(), b.end());
    blocks.codes.push_back(&codes[static_cast<size_t>(head) * head_codes +
                                  static_cast<size_t>(at) * kBlockTokens * dump.head_dim]);
  }
  for (int32_t i = kMostItems; i < kMostRefs; ++i) {
    blocks.refs.push_back(blocks.refs[static_cast<size_t>(i - kMostItems)]);
  }
  return blocks;
}

// A component on the device.
struct DeviceBlocks {
  explicit DeviceBlocks(const Blocks& from)
      : bytes(from.bytes),
        refs(from.refs),
        groups(from.groups),
        table(device_table(from.book)),
        words(encoder_words(from.book)),
        cheapest(from.book.cheapest),
        tree(from.book.tree),
        tree_entries(static_cast<int32_t>(from.book.tree.size())),
        steps(std::vector<float>{0.02f}),
        means(std::vector<float>(128, 0.1f)) {
    component.bytes = bytes.get();
    component.blocks = refs.get();
    component.steps = steps.get();
    component.means = means.get();
    component.size = static_cast<int64_t>(from.bytes.size());
    component.codebook = device_codebook(from.book);
    component.codebook.table = table.get();
    component.codebook.words = words.get();
    component.codebook.cheapest = cheapest.get();
  }
  DeviceTree walked() const { return {tree.get(), tree_entries}; }

  Device<uint8_t> bytes;
  Device<CodedBlockRef> refs;
  Device<CodedGroup> groups;
  Device<uint32_t> table, words;
  Device<uint16_t> cheapest, tree;
  int32_t tree_entries;
  Device<float> steps, means;
  CodedComponent component;
};

// The call in the rung's way.
inline Status decode(const CodedDecode& call, const DeviceBlocks& from, const Rung& rung,
                     cudaStream_t stream) {
  return rung.tree ? decode_by_tree(call, from.walked(), *rung.tree, stream)
                   : decode_coded(call, stream);
}

}  // namespace tierkv::bench
