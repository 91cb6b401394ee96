// SPDX-License-Identifier: Apache-2.0
// Containers and kv-dumps through the C ABI, and CacheFile, which is C++ over it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "tests/support/c_structs.h"
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

void check_profile(const std::string& path) {
  tkv_error error = make<tkv_error>();
  tkv_profile* profile = nullptr;
  ASSERT_EQ(tkv_profile_open(path.c_str(), &profile, &error), TKV_OK) << error.message;
  tkv_profile_data data = make<tkv_profile_data>();
  EXPECT_EQ(tkv_profile_get_data(profile, &data, &error), TKV_OK) << error.message;
  EXPECT_EQ(data.num_layers * data.num_kv_heads, 12);
  EXPECT_EQ(data.head_dim, 128);
  EXPECT_EQ(data.rope_pairing, 1);  // the dump says how it was rotated
  EXPECT_EQ(data.key_sensitivity, nullptr);
  EXPECT_EQ(data.key_mean_before_rope, nullptr);
  EXPECT_EQ(*std::min_element(data.key_scale, data.key_scale + 12), 1);
  for (int row = 0; row < 12; ++row) {
    const double trace =
        std::accumulate(data.query_energy + row * 128, data.query_energy + (row + 1) * 128, 0.0);
    EXPECT_NEAR(trace, data.query_trace[row], 1e-5 * trace);
  }
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

// A profile with all that can be written, in arrays of its own.
struct WrittenProfile {
  std::vector<float> vectors[4], inv_freq;
  std::vector<double> scalars[7];
  tkv_profile_data data = make<tkv_profile_data>();

  WrittenProfile() {
    float next = 1;
    for (auto& v : vectors) {
      for (int i = 0; i < 6 * 4; ++i) v.push_back(next++);
    }
    for (auto& s : scalars) {
      for (int i = 0; i < 6; ++i) s.push_back(next++);
    }
    for (int i = 0; i < 6; ++i) inv_freq.push_back(next++);
    data.model_id = "m";
    data.num_layers = 3;
    data.num_q_heads = 4;
    data.num_kv_heads = 2;
    data.head_dim = 4;
    data.sm_scale = 0.5;
    data.alpha_high = 2;
    data.alpha_low = 1;
    data.rope_pairing = 1;
    data.rope_dims = 4;
    data.rope_layers = 3;
    data.rope_inv_freq = inv_freq.data();
    data.key_mean = vectors[0].data();
    data.value_mean = vectors[1].data();
    data.key_mean_before_rope = vectors[2].data();
    data.query_energy = vectors[3].data();
    data.query_trace = scalars[0].data();
    data.value_signal = scalars[1].data();
    data.key_scale = scalars[2].data();
    data.value_scale = scalars[3].data();
    data.key_sensitivity = scalars[4].data();
    data.value_sensitivity = scalars[5].data();
    data.joint_sensitivity = scalars[6].data();
  }
};

TEST_F(CapiContainer, ProfilesAreWrittenAndRead) {
  const std::string path = (folder_ / "written.h5").string();
  const WrittenProfile in;
  ASSERT_EQ(tkv_profile_write(&in.data, path.c_str(), &error_), TKV_OK) << error_.message;
  tkv_profile* profile = nullptr;
  ASSERT_EQ(tkv_profile_open(path.c_str(), &profile, &error_), TKV_OK) << error_.message;
  tkv_profile_data out = make<tkv_profile_data>();
  ASSERT_EQ(tkv_profile_get_data(profile, &out, &error_), TKV_OK);
  EXPECT_STREQ(out.model_id, "m");
  EXPECT_EQ(out.num_layers, 3);
  EXPECT_EQ(out.num_q_heads, 4);
  EXPECT_EQ(out.sm_scale, 0.5);
  EXPECT_EQ(out.alpha_high, 2);
  EXPECT_EQ(out.alpha_low, 1);
  EXPECT_EQ(out.rope_pairing, 1);
  EXPECT_EQ(out.rope_dims, 4);
  EXPECT_EQ(out.rope_layers, 3);
  EXPECT_TRUE(std::equal(in.inv_freq.begin(), in.inv_freq.end(), out.rope_inv_freq));
  const float* vectors[] = {out.key_mean, out.value_mean, out.key_mean_before_rope,
                            out.query_energy};
  for (int i = 0; i < 4; ++i)
    EXPECT_TRUE(std::equal(in.vectors[i].begin(), in.vectors[i].end(), vectors[i])) << i;
  const double* scalars[] = {out.query_trace,      out.value_signal,    out.key_scale,
                             out.value_scale,      out.key_sensitivity, out.value_sensitivity,
                             out.joint_sensitivity};
  for (int i = 0; i < 7; ++i)
    EXPECT_TRUE(std::equal(in.scalars[i].begin(), in.scalars[i].end(), scalars[i])) << i;
  tkv_profile_destroy(profile);
}

TEST_F(CapiContainer, ProfilesServeStoresInCpp) {
  tkv_profile* file = nullptr;
  ASSERT_EQ(tkv_profile_open(TIERKV_SOURCE_DIR "/datasets/smollm2_1k_profile.h5", &file, &error_),
            TKV_OK)
      << error_.message;
  tkv_profile_data data = make<tkv_profile_data>();
  ASSERT_EQ(tkv_profile_get_data(file, &data, &error_), TKV_OK);
  const Result<std::shared_ptr<const Profile>> profile = make_profile(data);
  ASSERT_TRUE(profile) << profile.status().message();
  std::vector<float> means(data.key_mean,
                           data.key_mean + data.num_layers * data.num_kv_heads * data.head_dim);
  means.back() = NAN;
  data.key_mean = means.data();
  EXPECT_EQ(make_profile(data).status().code(), StatusCode::kNonFinite);
  data.key_mean = nullptr;
  EXPECT_EQ(make_profile(data).status().code(), StatusCode::kInvalidArgument);
  StoreConfig config;
  config.layout.num_layers = data.num_layers;
  config.layout.num_q_heads = data.num_q_heads;
  config.layout.num_kv_heads = data.num_kv_heads;
  config.layout.head_dim = data.head_dim;
  config.layout.sm_scale = data.sm_scale;
  tkv_profile_destroy(file);
  TiersFormat format;
  format.classes = {TierClass{}, TierClass{}};  // by sensitivities of the profile
  format.classes[0].share = 0.1;
  config.format = format;
  config.max_sequences = 1;
  config.max_tokens = 256;
  config.memory_bytes = int64_t{1} << 26;
  EXPECT_EQ(KvStore::create(config).status().code(), StatusCode::kInvalidArgument);
  config.profile = *profile;
  const auto store = KvStore::create(config);
  EXPECT_TRUE(store) << store.status().message();
}

TEST_F(CapiContainer, BadProfilesAreNotWritten) {
  const std::string path = (folder_ / "bad.h5").string();
  const struct {
    void (*edit)(tkv_profile_data*);
    const char* message;
  } cases[] = {{[](tkv_profile_data* d) { d->model_id = nullptr; }, "model_id is null"},
               {[](tkv_profile_data* d) { d->model_id = ""; }, "model_id: is empty"},
               {[](tkv_profile_data* d) { d->num_layers = 0; }, "num_layers"},
               {[](tkv_profile_data* d) { d->key_mean = nullptr; }, "key_mean is null"},
               {[](tkv_profile_data* d) { d->value_signal = nullptr; }, "value_signal is null"},
               {[](tkv_profile_data* d) { d->rope_pairing = 3; }, "rope_pairing"},
               {[](tkv_profile_data* d) { d->rope_layers = 2; }, "rope_layers"},
               {[](tkv_profile_data* d) { d->rope_dims = 3; }, "rope"},
               {[](tkv_profile_data* d) { d->rope_inv_freq = nullptr; }, "rope_inv_freq is null"}};
  for (const auto& c : cases) {
    WrittenProfile in;
    c.edit(&in.data);
    EXPECT_NE(tkv_profile_write(&in.data, path.c_str(), &error_), TKV_OK);
    EXPECT_NE(std::strstr(error_.message, c.message), nullptr) << error_.message;
    EXPECT_FALSE(std::filesystem::exists(path));
  }
}

TEST_F(CapiContainer, HeadScalesAndClasses) {
  const double sensitivities[] = {1, 16, 256}, shares[] = {0.4};
  double scales[3];
  int32_t classes[3];
  ASSERT_EQ(tkv_head_scales(sensitivities, 3, scales, &error_), TKV_OK) << error_.message;
  EXPECT_NEAR(scales[0], 2, 1e-12);
  EXPECT_NEAR(scales[2], 0.5, 1e-12);
  ASSERT_EQ(tkv_assign_classes(shares, 1, sensitivities, 3, classes, &error_), TKV_OK);
  EXPECT_EQ(classes[0], 1);
  EXPECT_EQ(classes[1], 1);
  EXPECT_EQ(classes[2], 0);
  const double zero[] = {1, 0}, wrong_share[] = {-0.1};
  EXPECT_EQ(tkv_head_scales(zero, 2, scales, &error_), TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_assign_classes(wrong_share, 1, sensitivities, 3, classes, &error_),
            TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_assign_classes(nullptr, 1, sensitivities, 3, classes, &error_),
            TKV_INVALID_ARGUMENT);
  EXPECT_EQ(tkv_head_scales(nullptr, 2, scales, &error_), TKV_INVALID_ARGUMENT);
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
