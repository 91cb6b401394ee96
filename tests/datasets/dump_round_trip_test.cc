// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <thread>

#include "tests/datasets/dump_files.h"

namespace tierkv::datasets {
namespace {

class RoundTrip : public DumpTest {
 protected:
  std::vector<float> row(const DumpReader& dump, int32_t seq, int32_t layer, int32_t head,
                         Component c) {
    RowData data;
    data.bytes.assign(3, 0xee);
    const Status s = dump.read_row(seq, layer, head, c, &data);
    EXPECT_TRUE(s) << s.message();
    std::vector<float> x(data.tokens * data.head_dim, NAN);
    if (s) row_to_float(data, 0, data.tokens, x.data());
    return x;
  }
};

struct Contents {
  std::vector<std::vector<float>> k, v, q, significance;  // by layer and head
};

// Two sequences, one of a single token, every optional part in one of them only.
TEST_F(RoundTrip, EveryTypeKeepsEveryValue) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const int32_t d : {1, 8, 96}) {
      SCOPED_TRACE(std::string(dtype_name(dtype)) + " head_dim " + std::to_string(d));
      const DumpInfo info = small_info(dtype, d);
      const std::vector<int64_t> lengths = {std::uniform_int_distribution<int>(257, 600)(rng_), 1};
      const std::string file = path(dtype_name(dtype) + std::to_string(d));
      std::vector<Contents> contents(2);
      std::vector<int32_t> ids;
      Result<DumpWriter> writer = DumpWriter::create(file, info);
      ASSERT_TRUE(writer) << writer.status().message();
      for (int s = 0; s < 2; ++s) {
        const int64_t tokens = lengths[s];
        ids.assign(tokens, 0);
        for (int64_t t = 0; t < tokens; ++t) ids[t] = static_cast<int32_t>(rng_() >> 1);
        ASSERT_TRUE(writer->begin_sequence("seq" + std::to_string(s), "kind", ids));
        for (int32_t l = 0; l < 2; ++l) {
          const bool rich = s == 0;
          ASSERT_TRUE(writer->begin_layer(
              rich ? std::vector<int32_t>{3, 200, 256} : std::vector<int32_t>{}, rich));
          for (int32_t h = 0; h < 2; ++h) {
            contents[s].k.push_back(values(tokens * d, dtype));
            contents[s].v.push_back(values(tokens * d, dtype));
            ASSERT_TRUE(writer->write_row(h, Component::kValue, contents[s].v.back().data()));
            ASSERT_TRUE(writer->write_row(h, Component::kKey, contents[s].k.back().data()));
            if (!rich) continue;
            contents[s].significance.push_back(values(tokens, DType::kFloat32));
            for (float& x : contents[s].significance.back()) x = std::fabs(x);
            ASSERT_TRUE(writer->write_significance(h, contents[s].significance.back().data()));
          }
          for (int32_t h = 0; rich && h < 4; ++h) {
            contents[s].q.push_back(values(3 * d, dtype));
            ASSERT_TRUE(writer->write_queries(h, contents[s].q.back().data()));
          }
        }
      }
      const Status finished = writer->finish();
      ASSERT_TRUE(finished) << finished.message();

      Result<DumpReader> dump = DumpReader::open(file);
      ASSERT_TRUE(dump) << dump.status().message();
      EXPECT_EQ(dump->info().model_id, "test/model");
      EXPECT_EQ(dump->info().layout.dtype, dtype);
      EXPECT_EQ(dump->info().layout.rope_theta, 10000);
      ASSERT_EQ(dump->info().sequences.size(), 2u);
      for (int32_t s = 0; s < 2; ++s) {
        EXPECT_EQ(dump->info().sequences[s].num_tokens, lengths[s]);
        for (int32_t l = 0; l < 2; ++l) {
          for (int32_t h = 0; h < 2; ++h) {
            EXPECT_EQ(row(*dump, s, l, h, Component::kKey), contents[s].k[2 * l + h]);
            EXPECT_EQ(row(*dump, s, l, h, Component::kValue), contents[s].v[2 * l + h]);
            std::vector<float> x(2, -1);
            if (s == 0) {
              ASSERT_TRUE(dump->read_significance(s, l, h, &x));
              EXPECT_EQ(x, contents[s].significance[2 * l + h]);
            } else {
              EXPECT_EQ(dump->read_significance(s, l, h, &x).code(), StatusCode::kNotFound);
            }
          }
        }
      }
      std::vector<int32_t> positions, read_ids;
      ASSERT_TRUE(dump->read_query_positions(0, 1, &positions));
      EXPECT_EQ(positions, (std::vector<int32_t>{3, 200, 256}));
      std::vector<float> q;
      ASSERT_TRUE(dump->read_queries(0, 1, 1, 2, &q));
      std::vector<float> expected = contents[0].q[5];
      expected.insert(expected.end(), contents[0].q[6].begin(), contents[0].q[6].end());
      EXPECT_EQ(q, expected);
      ASSERT_TRUE(dump->read_tokens(1, &read_ids));
      EXPECT_EQ(read_ids, ids);
      EXPECT_EQ(dump->read_queries(1, 0, 0, 1, &q).code(), StatusCode::kNotFound);
      EXPECT_EQ(dump->read_query_positions(1, 0, &positions).code(), StatusCode::kNotFound);
    }
  }
}

TEST_F(RoundTrip, IndicesOutsideAreRefused) {
  ASSERT_TRUE(write_small(path("d.h5"), 5));
  Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump);
  RowData row;
  std::vector<float> x;
  std::vector<int32_t> ids;
  for (const int32_t bad : {-1, 4, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(dump->read_row(bad, 0, 0, Component::kKey, &row).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(dump->read_row(0, bad, 0, Component::kKey, &row).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(dump->read_row(0, 0, bad, Component::kKey, &row).code(),
              StatusCode::kInvalidArgument);
    EXPECT_EQ(dump->read_queries(0, 0, bad, 1, &x).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(dump->read_queries(0, 0, 2, bad, &x).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(dump->read_significance(0, 0, bad, &x).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(dump->read_tokens(bad, &ids).code(), StatusCode::kInvalidArgument);
  }
}

TEST_F(RoundTrip, ThreadsReadWhatOneThreadReads) {
  ASSERT_TRUE(write_small(path("d.h5"), 700));
  Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump);
  const std::vector<float> expected = row(*dump, 0, 1, 1, Component::kValue);
  std::atomic<int> equal{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 20; ++i) {
        RowData data;
        if (!dump->read_row(0, 1, 1, Component::kValue, &data)) continue;
        std::vector<float> x(expected.size());
        row_to_float(data, 0, data.tokens, x.data());
        equal += x == expected;
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(equal, 160);
}

TEST_F(RoundTrip, AnImageReadsLikeItsFile) {
  ASSERT_TRUE(write_small(path("d.h5"), 9));
  const std::vector<char> bytes = file_bytes(path("d.h5"));
  // A name in messages, also where a file has it.
  Result<DumpReader> image = DumpReader::open_image(path("d.h5"), bytes.data(), bytes.size());
  ASSERT_TRUE(image) << image.status().message();
  Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump);
  EXPECT_EQ(row(*image, 0, 1, 0, Component::kKey), row(*dump, 0, 1, 0, Component::kKey));
  const Status s = read_everything(*image);
  EXPECT_TRUE(s) << s.message();
}

TEST_F(RoundTrip, TheSampleOfARealCacheIsWhole) {
  Result<DumpReader> dump = DumpReader::open(TIERKV_SOURCE_DIR "/datasets/sample_1k.h5");
  ASSERT_TRUE(dump) << dump.status().message();
  EXPECT_EQ(dump->info().layout.num_layers, 6);
  EXPECT_EQ(dump->info().sequences[0].num_tokens, 1024);
  EXPECT_EQ(dump->info().sequences[0].layers[5].num_queries, 128);
  const Status s = read_everything(*dump);
  EXPECT_TRUE(s) << s.message();
}

}  // namespace
}  // namespace tierkv::datasets
