// SPDX-License-Identifier: Apache-2.0
// What an import refuses of a safetensors file: messages name that file and the tensor.
#include <gmock/gmock.h>

#include <functional>

#include "datasets/safetensors/safetensors_dump.h"
#include "tests/datasets/dump_files.h"

namespace tierkv::datasets {
namespace {

using testing::HasSubstr;

// One layer of two heads and four query heads, eight tokens, head_dim 4.
struct Tensors {
  struct Tensor {
    std::vector<int64_t> shape;
    std::vector<float> floats;  // F32, or else
    std::vector<int32_t> integers;
  };
  std::map<std::string, std::string> metadata = {{"format", "kv-dump"}, {"format_version", "1"}};
  Tensor k = {{2, 8, 4}, std::vector<float>(64, 0.5f), {}}, v = k;
  Tensor q = {{4, 3, 4}, std::vector<float>(48, 0.5f), {}};
  Tensor positions = {{3}, {}, {5, 6, 7}};
  Tensor significance = {{2, 8}, std::vector<float>(16, 0.5f), {}};
};

class ImportTest : public DumpTest {
 protected:
  Status import(const Tensors& t) {
    const std::string name = "seq.a.layer.0.";
    const std::pair<std::string, const Tensors::Tensor*> all[] = {
        {name + "k", &t.k},
        {name + "v", &t.v},
        {name + "q", &t.q},
        {name + "q_positions", &t.positions},
        {name + "significance", &t.significance}};
    std::vector<TensorInfo> infos;
    for (const auto& [id, x] : all) {
      infos.push_back({id, x == &t.positions ? "I32" : "F32", x->shape, 0, 0});
    }
    Result<SafetensorsWriter> writer =
        SafetensorsWriter::create(path("a.safetensors"), infos, t.metadata);
    if (!writer) return writer.status();
    for (const auto& [id, x] : all) {
      const Status s = x == &t.positions
                           ? writer->append(id, x->integers.data(), 4 * x->integers.size())
                           : writer->append(id, x->floats.data(), 4 * x->floats.size());
      if (!s) return s;
    }
    if (Status s = writer->finish(); !s) return s;
    const Result<SafetensorsReader> file = SafetensorsReader::open(path("a.safetensors"));
    if (!file) return file.status();
    const Result<ImportPlan> plan = plan_import(file->header(), TensorNames(), ModelFacts());
    if (!plan) return plan.status().with_context(file->path());  // as the command does
    return import_safetensors(*file, *plan, TensorNames().axes, path("a.h5"), true, {});
  }
};

TEST_F(ImportTest, WhatADumpCannotHoldIsNamed) {
  const struct {
    std::function<void(Tensors*)> change;
    StatusCode code;
    const char* message;
  } cases[] = {
      {[](Tensors* t) {
         t->positions.integers = {6, 5, 7};
       },
       StatusCode::kCorrupt,
       "tensor 'seq.a.layer.0.q_positions': element 1 is 5 (expected increasing positions below 8"},
      {[](Tensors* t) {
         t->positions.integers = {5, 6, 8};
       },
       StatusCode::kCorrupt, "tensor 'seq.a.layer.0.q_positions': element 2 is 8"},
      {[](Tensors* t) { t->significance.floats[9] = NAN; }, StatusCode::kCorrupt,
       "tensor 'seq.a.layer.0.significance': element 9 is negative or not finite"},
      {[](Tensors* t) { t->significance.floats[3] = -1; }, StatusCode::kCorrupt,
       "tensor 'seq.a.layer.0.significance': element 3 is negative or not finite"},
      {[](Tensors* t) {
         t->q = {{4, 0, 4}, {}, {}};
         t->positions = {{0}, {}, {}};
       },
       StatusCode::kCorrupt, "tensor 'seq.a.layer.0.q': has 0 positions (expected 1 to 8)"},
      {[](Tensors* t) { t->metadata["format_version"] = "99"; }, StatusCode::kVersion,
       "metadata 'format_version' is '99' (this build reads 1)"},
  };
  ASSERT_TRUE(import(Tensors()));
  ASSERT_TRUE(DumpReader::open(path("a.h5")));
  for (const auto& c : cases) {
    Tensors t;
    c.change(&t);
    const Status s = import(t);
    EXPECT_EQ(s.code(), c.code) << s.message();
    EXPECT_THAT(s.message(), HasSubstr(path("a.safetensors") + ": " + c.message));
  }
}

}  // namespace
}  // namespace tierkv::datasets
