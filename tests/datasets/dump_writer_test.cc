// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <thread>

#include "datasets/slab.h"
#include "tests/datasets/dump_files.h"

namespace tierkv::datasets {
namespace {

class WriterTest : public DumpTest {
 protected:
  // A writer within layer 0 of a sequence of three tokens, nothing written yet.
  Result<DumpWriter> begun() {
    Result<DumpWriter> w = DumpWriter::create(path("d.h5"), small_info());
    if (!w) return w;
    if (Status s = w->begin_sequence("a", "text", {1, 2, 3}); !s) return s;
    if (Status s = w->begin_layer({0, 2}, true); !s) return s;
    return w;
  }
  const std::vector<float> x_ = std::vector<float>(64, 1.5f);
};

TEST_F(WriterTest, NothingIsLeftWithoutFinish) {
  {
    Result<DumpWriter> w = begun();
    ASSERT_TRUE(w) << w.status().message();
    EXPECT_EQ(files_in_dir(), 1);
    EXPECT_FALSE(std::filesystem::exists(path("d.h5")));
  }
  EXPECT_EQ(files_in_dir(), 0);
}

TEST_F(WriterTest, AnOlderFileIsReplacedOnlyWhenFinished) {
  std::ofstream(path("d.h5")) << "older";
  { ASSERT_TRUE(begun()); }
  EXPECT_EQ(file_bytes(path("d.h5")).size(), 5u);
  ASSERT_TRUE(write_small(path("d.h5"), 3));
  EXPECT_TRUE(DumpReader::open(path("d.h5")));
  EXPECT_EQ(files_in_dir(), 1);
}

TEST_F(WriterTest, EqualContentsMakeEqualFiles) {
  ASSERT_TRUE(write_small(path("a.h5"), 300));
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));  // HDF5's timestamps count seconds
  ASSERT_TRUE(write_small(path("b.h5"), 300));
  EXPECT_EQ(file_bytes(path("a.h5")), file_bytes(path("b.h5")));
}

TEST_F(WriterTest, UnwrittenRowsAreNamed) {
  Result<DumpWriter> w = begun();
  ASSERT_TRUE(w);
  for (int32_t h = 0; h < 2; ++h) {
    ASSERT_TRUE(w->write_row(h, Component::kKey, x_.data()));
    ASSERT_TRUE(w->write_significance(h, x_.data()));
  }
  ASSERT_TRUE(w->write_row(0, Component::kValue, x_.data()));
  for (int32_t h = 0; h < 4; ++h) ASSERT_TRUE(w->write_queries(h, x_.data()));
  for (const Status& s :
       {w->begin_layer({}, false), w->begin_sequence("b", "", {1}), w->finish()}) {
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(s.message().find("/seq/a/layer/0: v of head 1 was not written"), std::string::npos)
        << s.message();
  }
  ASSERT_TRUE(w->write_row(1, Component::kValue, x_.data()));
  const Status s = w->finish();
  EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
  EXPECT_NE(s.message().find("ends after layer 0"), std::string::npos) << s.message();
}

TEST_F(WriterTest, WhatTheReaderWouldRefuseIsRefused) {
  DumpInfo bad = small_info();
  bad.layout.head_dim = 4097;
  EXPECT_EQ(DumpWriter::create(path("x.h5"), bad).status().code(), StatusCode::kInvalidArgument);
  Result<DumpWriter> w = DumpWriter::create(path("d.h5"), small_info());
  ASSERT_TRUE(w);
  EXPECT_EQ(w->finish().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(w->begin_layer({}, false).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(w->begin_sequence("a", "", {}).code(), StatusCode::kInvalidArgument);
  for (const char* id : {"", ".", "a/b", "a\nb", "\x1b[2J"}) {
    EXPECT_EQ(w->begin_sequence(id, "", {1}).code(), StatusCode::kInvalidArgument) << id;
  }
  ASSERT_TRUE(w->begin_sequence("a", "text", {1, 2, 3}));
  for (const std::vector<int32_t>& positions :
       std::vector<std::vector<int32_t>>{{3}, {-1}, {1, 1}, {2, 1}, {0, 1, 2, 3}}) {
    const Status s = w->begin_layer(positions, false);
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(s.message().find("/seq/a/layer/0: q positions"), std::string::npos) << s.message();
  }
  ASSERT_TRUE(w->begin_layer({1}, true));
  EXPECT_EQ(w->write_row(2, Component::kKey, x_.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(w->write_row(-1, Component::kKey, x_.data()).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(w->write_queries(4, x_.data()).code(), StatusCode::kInvalidArgument);
  std::vector<float> x = x_;
  x[5] = NAN;
  EXPECT_EQ(w->write_row(0, Component::kKey, x.data()).code(), StatusCode::kNonFinite);
  x[5] = 1e6f;
  EXPECT_EQ(w->write_row(0, Component::kKey, x.data()).code(), StatusCode::kOutOfRange);
  x[1] = -1;
  EXPECT_EQ(w->write_significance(0, x.data()).code(), StatusCode::kInvalidArgument);
}

// HDF5 could store longer texts, which no reader takes.
TEST_F(WriterTest, LongTextsAreRefusedByName) {
  const std::string longest(65536, 'x'), longer = longest + "x";
  const auto expect_named = [](const Status& s, const std::string& name) {
    EXPECT_EQ(s.code(), StatusCode::kInvalidArgument);
    EXPECT_NE(s.message().find(name + " has 65537 bytes (expected at most 65536)"),
              std::string::npos)
        << s.message();
  };
  DumpInfo info = small_info();
  info.model_id = longer;
  expect_named(DumpWriter::create(path("d.h5"), info).status(), "model_id");
  info = small_info();
  info.created_by = longer;
  expect_named(DumpWriter::create(path("d.h5"), info).status(), "created_by");
  EXPECT_EQ(files_in_dir(), 0);
  info.model_id = info.created_by = longest;
  info.layout.num_layers = 1;
  Result<DumpWriter> w = DumpWriter::create(path("d.h5"), info);
  ASSERT_TRUE(w) << w.status().message();
  expect_named(w->begin_sequence("a", longer, {1, 2, 3}), "/seq/a: kind");
  ASSERT_TRUE(w->begin_sequence("a", longest, {1, 2, 3}));
  expect_named(w->annotate("note", longer), "/seq/a: note");
  ASSERT_TRUE(w->begin_layer({}, false));
  for (int32_t h = 0; h < 2; ++h) {
    for (const Component c : {Component::kKey, Component::kValue}) {
      ASSERT_TRUE(w->write_row(h, c, x_.data()));
    }
  }
  ASSERT_TRUE(w->finish());
  const Result<DumpReader> dump = DumpReader::open(path("d.h5"));
  ASSERT_TRUE(dump) << dump.status().message();
  EXPECT_EQ(dump->info().model_id, longest);
  EXPECT_EQ(dump->info().sequences[0].kind, longest);
}

TEST_F(WriterTest, AReplacedFileKeepsItsPermissions) {
  using std::filesystem::perms;
  for (const perms mode : {perms::owner_read | perms::owner_write, perms::all}) {
    std::ofstream(path("d.h5")) << "older";
    std::filesystem::permissions(path("d.h5"), mode);
    ASSERT_TRUE(write_small(path("d.h5"), 3));
    EXPECT_EQ(std::filesystem::status(path("d.h5")).permissions(), mode);
  }
}

TEST_F(WriterTest, PrunedTokensAreFlaggedPerRow) {
  DumpInfo info = small_info();
  info.layout.num_layers = 1;
  Result<DumpWriter> w = DumpWriter::create(path("d.h5"), info);
  ASSERT_TRUE(w);
  ASSERT_TRUE(w->begin_sequence("a", "text", {1, 2, 3}));
  const uint8_t flags[3] = {0, 1, 1};
  EXPECT_EQ(w->write_pruned(0, flags).code(), StatusCode::kInvalidArgument);  // no layer yet
  ASSERT_TRUE(w->begin_layer({}, false));
  for (int32_t h = 0; h < 2; ++h) {
    ASSERT_TRUE(w->write_row(h, Component::kKey, x_.data()));
    ASSERT_TRUE(w->write_row(h, Component::kValue, x_.data()));
  }
  EXPECT_EQ(w->write_pruned(2, flags).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(w->write_pruned(-1, flags).code(), StatusCode::kInvalidArgument);
  ASSERT_TRUE(w->write_pruned(1, flags));
  ASSERT_TRUE(w->finish());
  EXPECT_TRUE(DumpReader::open(path("d.h5")));
  const Hdf5Lock lock;
  const Handle f(H5Fopen(path("d.h5").c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
  std::vector<int64_t> pruned;
  ASSERT_TRUE(read_slab_as(f.id(), "/seq/a/layer/0/pruned", {{0, 0}, {2, 3}}, &pruned));
  EXPECT_EQ(pruned, (std::vector<int64_t>{0, 0, 0, 0, 1, 1}));
}

// A row of the sequence before must not be written into the next one.
TEST_F(WriterTest, RowsNeedALayer) {
  DumpInfo info = small_info();
  info.layout.num_layers = 1;
  Result<DumpWriter> w = DumpWriter::create(path("d.h5"), info);
  ASSERT_TRUE(w);
  EXPECT_EQ(w->write_row(0, Component::kKey, x_.data()).code(), StatusCode::kInvalidArgument);
  for (const char* id : {"a", "b"}) {
    ASSERT_TRUE(w->begin_sequence(id, "text", {1, 2, 3}));
    EXPECT_EQ(w->write_row(0, Component::kKey, x_.data()).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(w->write_queries(0, x_.data()).code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(w->write_significance(0, x_.data()).code(), StatusCode::kInvalidArgument);
    ASSERT_TRUE(w->begin_layer({}, false));
    for (int32_t h = 0; h < 2; ++h) {
      ASSERT_TRUE(w->write_row(h, Component::kKey, x_.data()));
      ASSERT_TRUE(w->write_row(h, Component::kValue, x_.data()));
    }
  }
  EXPECT_TRUE(w->finish());
}

TEST_F(WriterTest, AMissingDirectoryIsAnIoError) {
  const Result<DumpWriter> w = DumpWriter::create(path("no/such/d.h5"), small_info());
  EXPECT_EQ(w.status().code(), StatusCode::kIo);
  EXPECT_NE(w.status().message().find("No such file or directory"), std::string::npos)
      << w.status().message();
}

}  // namespace
}  // namespace tierkv::datasets
