// SPDX-License-Identifier: Apache-2.0
// Containers of a small dump in every preset: their bytes, and what they decode to. Some are kept
// as files, so that what was written once stays readable.
#include <filesystem>
#include <random>

#include "datasets/profile_file.h"
#include "tests/golden/golden_table.h"
#include "tools/container/container_file.h"

namespace tierkv::analysis {
namespace {

// A window of 8 leaves most of the dump's 150 tokens to be coded.
constexpr const char* kKept[] = {"k4v2:window=8",
                                 "k8v8:window=8+huffman",
                                 "k2v2:window=8+huffman",
                                 "diffkv:window=8",
                                 "kivi2:residual=8",
                                 "kvcomp:window=8",
                                 "step:window=8",
                                 "step:window=8+rot",
                                 "diffkv:window=8+huffman",
                                 "small:window=8",
                                 "small:window=8,sinks=0,k=0.05,books=4",
                                 "tiers:classes=k4v2/k2v2,window=8"};
constexpr const char* kRecorded[] = {"fp16",
                                     "k8v4",
                                     "k4v2:group_k=32",
                                     "k8v2+rot",
                                     "k1v1",
                                     "k16v4:sinks=4",
                                     "k8v4+huffman",
                                     "k4v4+huffman+rot",
                                     "diffkv",
                                     "diffkv:alpha_l=0.5,sinks=3",
                                     "diffkv:window_format=raw",
                                     "diffkv:high=k8v8,low=k4v4",
                                     "k2nv2n",
                                     "tiers:classes=0.3*k8v4@2:0.5|k8v4@2:0.5,means=off",
                                     "tiers:classes=k4v4/k4v2,rotate=off",
                                     "kivi4:group=32,residual=40",
                                     "kivi2",
                                     "kvcomp",
                                     "kvcomp:unit=channel,rel_k=0.15",
                                     "step",
                                     "step:k=0.4,v=0.3,window=16",
                                     "step:basis=none",
                                     "step:only=v",
                                     "small",
                                     "small:importance=off,sinks=70,window=0",
                                     "small:only=v",
                                     "k8v4:only=k+huffman"};
// With profile.h5.
constexpr const char* kProfiled[] = {"step:window=8,basis=mean", "small:window=8,k=0.4,v=0.4"};

std::vector<uint8_t> compressed(const char* preset, const Profile* profile = nullptr) {
  auto reader = std::move(datasets::DumpReader::open(golden::path("dump.h5")).value());
  CompressOptions options;
  options.preset = parse_preset(preset).value();
  options.threads = 2;
  options.profile = profile;
  const std::filesystem::path file =
      std::filesystem::temp_directory_path() /
      ("tierkv_golden_" + std::to_string(std::random_device{}()) + ".tkv");
  const Result<CompressSummary> summary = compress(reader, options, file);
  EXPECT_TRUE(summary.is_ok()) << preset << ": " << summary.status().message();
  std::vector<uint8_t> bytes = golden::read_file(file);
  std::filesystem::remove(file);
  return bytes;
}

// A hash of all rows: keys, values and which tokens are pruned.
std::string decoded(const std::vector<uint8_t>& bytes) {
  Result<ContainerReader> reader = ContainerReader::from_bytes(bytes, "golden");
  EXPECT_TRUE(reader.is_ok()) << reader.status().message();
  if (!reader) return "";
  const Result<CacheDecoder> decoder = CacheDecoder::open(std::move(reader.value()));
  EXPECT_TRUE(decoder.is_ok()) << decoder.status().message();
  if (!decoder) return "";
  const CacheLayout& layout = decoder->model().layout;
  std::vector<float> all;
  for (int32_t seq = 0; seq < decoder->model().num_sequences; ++seq) {
    for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
      for (int32_t head = 0; head < layout.num_kv_heads; ++head) {
        DecodedRow row;
        const Status s = decoder->decode_row(seq, layer, head, &row);
        EXPECT_TRUE(s.is_ok()) << s.message();
        all.insert(all.end(), row.k.begin(), row.k.end());
        all.insert(all.end(), row.v.begin(), row.v.end());
        all.insert(all.end(), row.pruned.begin(), row.pruned.end());
      }
    }
  }
  return golden::hash(all);
}

std::string kept_file(const char* preset) {
  std::string name = preset;
  for (char& c : name) {
    if (c == ':' || c == '=' || c == '+' || c == ',' || c == '/') c = '_';
  }
  return golden::path("containers/" + name + ".tkv");
}

// Commas separate the fields.
std::string field(std::string preset) {
  for (char& c : preset) {
    if (c == ',') c = ' ';
  }
  return preset;
}

TEST(ContainerGolden, SizesAndBytesOfEveryPreset) {
  golden::Table table("sizes.csv", "preset,file_bytes,file_xxh3,values_xxh3");
  const auto record = [&](const char* preset, const Profile* profile = nullptr) {
    const std::vector<uint8_t> bytes = compressed(preset, profile);
    table.expect(
        {field(preset), std::to_string(bytes.size()), golden::hash(bytes), decoded(bytes)});
    return bytes;
  };
  const auto keep = [](const char* preset, const std::vector<uint8_t>& bytes) {
    if (golden::regenerating()) golden::write_file(kept_file(preset), bytes);
    EXPECT_EQ(bytes, golden::read_file(kept_file(preset))) << preset;
  };
  for (const char* preset : kRecorded) record(preset);
  for (const char* preset : kKept) keep(preset, record(preset));
  const Result<Profile> profile = datasets::read_profile(golden::path("profile.h5"));
  ASSERT_TRUE(profile.is_ok()) << profile.status().message();
  for (const char* preset : kProfiled) keep(preset, record(preset, &*profile));
}

}  // namespace
}  // namespace tierkv::analysis
