// Containers and kv-dumps through the C ABI, and CacheFile, which is C++ over it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "tests/capi/structs.h"
#include "tierkv/tierkv.h"

namespace tierkv::test {
namespace {

namespace fs = std::filesystem;

const char* const kSample = TIERKV_SOURCE_DIR "/datasets/sample_1k.h5";

class CapiContainer : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = fs::temp_directory_path() / ("tierkv_capi_" + std::to_string(std::random_device{}()));
    fs::create_directories(folder_);
    for (const char* preset : {"step", "diffkv:alpha_l=0.05"}) {
      tkv_compress_options options = make<tkv_compress_options>();
      options.preset = preset;
      options.threads = 2;
      tkv_error error = make<tkv_error>();
      ASSERT_EQ(tkv_compress(kSample, path(preset).c_str(), &options, &error), TKV_OK)
          << error.message;
      EXPECT_EQ(static_cast<uintmax_t>(options.file_bytes), fs::file_size(path(preset)));
      EXPECT_GT(options.carried_bytes, 0);
      EXPECT_EQ(options.tokens[3] > 0, preset[0] == 'd');
    }
  }
  static void TearDownTestSuite() { fs::remove_all(folder_); }
  static std::string path(const std::string& preset) {
    return (folder_ / (preset.substr(0, 4) + ".tkv")).string();
  }
  static std::vector<uint8_t> bytes(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  static fs::path folder_;
  tkv_error error_ = make<tkv_error>();
};
fs::path CapiContainer::folder_;

TEST_F(CapiContainer, SaysWhatItHolds) {
  tkv_container* c = nullptr;
  ASSERT_EQ(tkv_container_open(path("step").c_str(), &c, &error_), TKV_OK) << error_.message;
  tkv_container_info info = make<tkv_container_info>();
  ASSERT_EQ(tkv_container_get_info(c, &info, &error_), TKV_OK);
  EXPECT_EQ(info.num_layers, 6);
  EXPECT_EQ(info.num_kv_heads, 2);
  EXPECT_EQ(info.num_q_heads, 8);
  EXPECT_EQ(info.head_dim, 128);
  EXPECT_STREQ(info.preset, "step");
  EXPECT_NEAR(info.sm_scale, 1 / std::sqrt(128.0), 1e-12);
  tkv_sequence_info s = make<tkv_sequence_info>();
  ASSERT_EQ(tkv_container_get_sequence(c, 0, &s, &error_), TKV_OK);
  EXPECT_EQ(s.num_tokens, 1024);
  EXPECT_STRNE(s.id, "");
  EXPECT_EQ(tkv_container_get_sequence(c, info.num_sequences, &s, &error_), TKV_OUT_OF_RANGE);
  EXPECT_EQ(tkv_container_get_sequence(c, -1, &s, &error_), TKV_OUT_OF_RANGE);
  EXPECT_EQ(tkv_container_verify(c, 0, &error_), TKV_OK) << error_.message;
  EXPECT_EQ(tkv_container_verify(c, -1, &error_), TKV_INVALID_ARGUMENT);
  tkv_container_destroy(c);
}

TEST_F(CapiContainer, CacheFileDecodesWhatTheHandleDoes) {
  const std::string file = path("diffkv");
  const Result<CacheFile> cache = CacheFile::open(file);
  ASSERT_TRUE(cache) << cache.status().message();
  EXPECT_EQ(cache->layout().head_dim, 128);
  EXPECT_EQ(cache->preset(), "diffkv:alpha_l=0.05");
  EXPECT_TRUE(cache->verify());
  const Result<CacheLayer> whole = cache->decode_layer(0, 5);
  ASSERT_TRUE(whole) << whole.status().message();
  int64_t pruned = 0;
  for (size_t row = 0; row < whole->pruned.size(); ++row) {
    pruned += whole->pruned[row];
    double norm = 0;
    for (size_t d = 0; d < 128; ++d) norm += std::fabs(whole->k[row * 128 + d]);
    ASSERT_EQ(norm == 0, whole->pruned[row] == 1);
  }
  EXPECT_GT(pruned, 0);

  const std::vector<uint8_t> stored = bytes(file);
  tkv_container* c = nullptr;
  ASSERT_EQ(tkv_container_open_bytes(stored.data(), stored.size(), "memory", &c, &error_), TKV_OK);
  std::vector<float> v(whole->v.size(), NAN);
  tkv_layer layer = make<tkv_layer>();
  layer.layer = 5;
  layer.v = v.data();
  EXPECT_EQ(tkv_container_decode_layer(c, &layer, &error_), TKV_OK) << error_.message;
  EXPECT_EQ(v, whole->v);
  for (const int32_t wrong : {-1, 6}) {
    layer.layer = wrong;
    EXPECT_EQ(tkv_container_decode_layer(c, &layer, &error_), TKV_OUT_OF_RANGE);
  }
  layer.layer = 0;
  layer.v = nullptr;
  EXPECT_EQ(tkv_container_decode_layer(c, &layer, &error_), TKV_INVALID_ARGUMENT);
  tkv_container_destroy(c);
  EXPECT_EQ(cache->decode_layer(9, 0).status().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(cache->sequence(9).status().code(), StatusCode::kOutOfRange);
  EXPECT_EQ(CacheFile::open("/nowhere").status().code(), StatusCode::kIo);
}

TEST_F(CapiContainer, OneHandleServesSeveralThreads) {
  const Result<CacheFile> cache = CacheFile::open(path("step"));
  ASSERT_TRUE(cache);
  const Result<CacheLayer> expected = cache->decode_layer(0, 2, 1);
  ASSERT_TRUE(expected);
  std::vector<std::thread> threads;
  std::vector<int> equal(4, 0);
  for (size_t i = 0; i < equal.size(); ++i) {
    threads.emplace_back([&, i] {
      const Result<CacheLayer> layer = cache->decode_layer(0, 2, 2);
      equal[i] = layer && layer->k == expected->k && layer->v == expected->v;
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(equal, std::vector<int>(4, 1));
}

TEST_F(CapiContainer, NoDamageGoesUnnoticed) {
  const std::vector<uint8_t> sound = bytes(path("step"));
  const uint32_t seed = std::random_device{}();
  std::mt19937 rng(seed);
  for (int i = 0; i < 60; ++i) {
    std::vector<uint8_t> damaged = sound;
    const size_t at = rng() % damaged.size();
    damaged[at] ^= static_cast<uint8_t>(1u << (rng() % 8));
    if (i % 3 == 0) damaged.resize(at);
    tkv_container* c = nullptr;
    tkv_status s = tkv_container_open_bytes(damaged.data(), damaged.size(), "damaged", &c, &error_);
    if (s == TKV_OK) s = tkv_container_verify(c, 1, &error_);
    EXPECT_NE(s, TKV_OK) << "seed " << seed << ", byte " << at;
    EXPECT_STRNE(error_.message, "");
    tkv_container_destroy(c);
  }
}

// Of a profile without a matrix basis.
void check_profile(const std::string& path) {
  tkv_error error = make<tkv_error>();
  tkv_profile* profile = nullptr;
  ASSERT_EQ(tkv_profile_open(path.c_str(), &profile, &error), TKV_OK) << error.message;
  tkv_profile_info info = make<tkv_profile_info>();
  EXPECT_EQ(tkv_profile_get_info(profile, &info, &error), TKV_OK) << error.message;
  EXPECT_EQ(info.num_layers * info.num_kv_heads, 12);
  EXPECT_EQ(info.head_dim, 128);
  EXPECT_EQ(info.matrix_basis, 0);
  EXPECT_EQ(info.balance_error, 0);
  std::vector<float> steps(12, -1), means(12 * 128, -77);
  tkv_profile_component c = make<tkv_profile_component>();
  c.component = TKV_VALUE;
  c.error = 0.25;
  c.steps = steps.data();
  c.means = means.data();
  EXPECT_EQ(tkv_profile_get_component(profile, &c, &error), TKV_OK) << error.message;
  EXPECT_GT(*std::min_element(steps.begin(), steps.end()), 0);
  EXPECT_EQ(std::count(means.begin(), means.end(), -77.0f), 0);
  c.error = 0;
  EXPECT_EQ(tkv_profile_get_component(profile, &c, &error), TKV_INVALID_ARGUMENT);
  c.error = 0.25;
  c.sm_scale = -1;
  EXPECT_EQ(tkv_profile_get_component(profile, &c, &error), TKV_INVALID_ARGUMENT);
  c.sm_scale = 0;
  c.component = 2;
  EXPECT_EQ(tkv_profile_get_component(profile, &c, &error), TKV_INVALID_ARGUMENT);
  c.component = TKV_KEY;
  c.matrix_steps = 1;
  EXPECT_EQ(tkv_profile_get_component(profile, &c, &error), TKV_NOT_FOUND) << error.message;
  tkv_profile_destroy(profile);
}

void note(void* user, double fraction) {
  static_cast<std::vector<double>*>(user)->push_back(fraction);
}

TEST_F(CapiContainer, AnalysisAndCalibration) {
  std::vector<double> fractions;
  tkv_progress progress = make<tkv_progress>();
  progress.update = note;
  progress.user = &fractions;
  const std::string profile = (folder_ / "profile.h5").string();
  const char* files[] = {kSample};
  tkv_calibrate_options calibrate = make<tkv_calibrate_options>();
  calibrate.files = files;
  calibrate.num_files = 1;
  calibrate.progress = &progress;
  calibrate.alpha_high = -1;
  ASSERT_EQ(tkv_calibrate(&calibrate, profile.c_str(), &error_), TKV_OK) << error_.message;
  EXPECT_GT(calibrate.alpha_high, 0);
  EXPECT_EQ(calibrate.alpha_low, 0);
  ASSERT_FALSE(fractions.empty());
  EXPECT_TRUE(std::is_sorted(fractions.begin(), fractions.end()));
  EXPECT_LE(fractions.back(), 1);

  check_profile(profile);

  const char* presets[] = {"step", "k8v4"};
  tkv_analyze_options analyze = make<tkv_analyze_options>();
  analyze.files = files;
  analyze.num_files = 1;
  analyze.presets = presets;
  analyze.num_presets = 2;
  analyze.profile = profile.c_str();
  analyze.num_layers = 1;
  tkv_text* json = nullptr;
  ASSERT_EQ(tkv_analyze(&analyze, &json, &error_), TKV_OK) << error_.message;
  const std::string text(tkv_text_data(json), tkv_text_size(json));
  EXPECT_NE(text.find("\"tierkv.analyze/1\""), std::string::npos);
  EXPECT_NE(text.find("\"k8v4\""), std::string::npos);
  tkv_text_destroy(json);

  json = nullptr;
  presets[1] = "k8v5";
  EXPECT_EQ(tkv_analyze(&analyze, &json, &error_), TKV_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(error_.message, "k8v5"), nullptr) << error_.message;
  EXPECT_EQ(json, nullptr);
  presets[1] = "k8v4";
  analyze.first_layer = 6;
  EXPECT_NE(tkv_analyze(&analyze, &json, &error_), TKV_OK);
}

TEST_F(CapiContainer, BalancedSteps) {
  const std::string path = (folder_ / "balanced.h5").string();
  const char* files[] = {kSample};
  tkv_calibrate_options calibrate = make<tkv_calibrate_options>();
  calibrate.files = files;
  calibrate.num_files = 1;
  calibrate.no_thresholds = 1;
  for (const double wrong : {-0.1, 0.0001, 1.5, std::nan("")}) {
    calibrate.balance_error = wrong;
    EXPECT_EQ(tkv_calibrate(&calibrate, path.c_str(), &error_), TKV_INVALID_ARGUMENT) << wrong;
    EXPECT_NE(std::strstr(error_.message, "balance_error"), nullptr) << error_.message;
    EXPECT_FALSE(std::filesystem::exists(path));
  }
  calibrate.balance_error = 0.1;
  ASSERT_EQ(tkv_calibrate(&calibrate, path.c_str(), &error_), TKV_OK) << error_.message;
  tkv_profile* profile = nullptr;
  ASSERT_EQ(tkv_profile_open(path.c_str(), &profile, &error_), TKV_OK) << error_.message;
  tkv_profile_info info = make<tkv_profile_info>();
  EXPECT_EQ(tkv_profile_get_info(profile, &info, &error_), TKV_OK);
  EXPECT_NEAR(info.balance_error, 0.1, 0.002);
  EXPECT_GT(info.balance_k, 0);
  EXPECT_GT(info.balance_v, 0);
  tkv_profile_destroy(profile);
}

void fail(void*, double) {
  throw std::bad_alloc();
}
void fail_oddly(void*, double) {
  throw 7;
}

TEST_F(CapiContainer, NoExceptionLeaves) {
  const char* files[] = {kSample};
  const char* presets[] = {"fp16"};
  tkv_progress progress = make<tkv_progress>();
  tkv_analyze_options analyze = make<tkv_analyze_options>();
  analyze.files = files;
  analyze.num_files = 1;
  analyze.presets = presets;
  analyze.num_presets = 1;
  analyze.progress = &progress;
  tkv_text* json = nullptr;
  progress.update = fail;
  EXPECT_EQ(tkv_analyze(&analyze, &json, &error_), TKV_OUT_OF_MEMORY);
  progress.update = fail_oddly;
  EXPECT_EQ(tkv_analyze(&analyze, &json, &error_), TKV_INTERNAL);
  EXPECT_STRNE(error_.message, "");
  EXPECT_EQ(json, nullptr);
}

TEST_F(CapiContainer, DecompressWritesADumpThatCompressesToTheSameBytes) {
  const std::string dump = (folder_ / "back.h5").string();
  const std::string again = (folder_ / "again.tkv").string();
  tkv_compress_options options = make<tkv_compress_options>();
  options.preset = "fp16";
  const std::string first = (folder_ / "first.tkv").string();
  ASSERT_EQ(tkv_compress(kSample, first.c_str(), &options, &error_), TKV_OK) << error_.message;
  tkv_decompress_options d = make<tkv_decompress_options>();
  ASSERT_EQ(tkv_decompress(first.c_str(), dump.c_str(), &d, &error_), TKV_OK) << error_.message;
  ASSERT_EQ(tkv_compress(dump.c_str(), again.c_str(), &options, &error_), TKV_OK);
  EXPECT_EQ(bytes(first), bytes(again));
  EXPECT_EQ(tkv_compress(kSample, again.c_str(), &options, &error_), TKV_IO);
  EXPECT_THAT(error_.message, testing::HasSubstr("exists"));
  EXPECT_EQ(tkv_decompress(first.c_str(), dump.c_str(), &d, &error_), TKV_IO);
  options.overwrite = options.without_queries = d.overwrite = 1;
  EXPECT_EQ(tkv_compress(dump.c_str(), again.c_str(), &options, &error_), TKV_OK);
  EXPECT_EQ(options.carried_bytes, 0);
  EXPECT_LT(bytes(again).size(), bytes(first).size());
  EXPECT_EQ(tkv_decompress(first.c_str(), dump.c_str(), &d, &error_), TKV_OK);
  EXPECT_EQ(tkv_decompress(first.c_str(), first.c_str(), &d, &error_), TKV_IO);
  EXPECT_THAT(error_.message, testing::HasSubstr("the same file"));
  d.dtype = 9;
  EXPECT_EQ(tkv_decompress(first.c_str(), dump.c_str(), &d, &error_), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_compress(kSample, "/nowhere/x.tkv", &options, &error_), TKV_IO);
  options.preset = "kivi9";
  EXPECT_NE(tkv_compress(kSample, again.c_str(), &options, &error_), TKV_OK);
}

}  // namespace
}  // namespace tierkv::test
