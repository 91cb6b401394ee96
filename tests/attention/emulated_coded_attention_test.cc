// SPDX-License-Identifier: Apache-2.0
// The kernel of coded attention on the host, thread by thread, against exact attention over decoded
// blocks; parts of a row are joined here. What only a GPU shows is in
// tests/gpu/attention/coded_attention_test.cu.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/coded/coded_kernel.cuh"
#include "tests/support/coded_attention_world.h"
#include "tests/support/fresh_random.h"

namespace tierkv {

__align__(1024) uint8_t shared[228 << 10];

namespace test::coded {
namespace {

// CTAs whose warps have several items each, or one or none.
int32_t ctas_of(const CodedAttention& call) {
  return call.num_items % 2 == 0 ? 2 : 10;
}

// What lies in device memory elsewhere.
struct Tables {
  std::vector<std::vector<uint32_t>> entries;
  std::vector<DeviceCodebook> books[2];

  explicit Tables(const World& w) {
    for (int32_t c = 0; c < 2; ++c) {
      for (const Codebook& book : w.books[c]) {
        entries.push_back(device_table(book));
        books[c].push_back(device_codebook(book));
        books[c].back().table = entries.back().data();
      }
    }
  }
};

CodedComponent component_of(const World& w, const Tables& tables, int32_t c) {
  CodedComponent x;
  x.bytes = w.bytes[c].data();
  x.blocks = w.refs[c].data();
  x.steps = w.steps[c].data();
  if (w.shape.means) x.means = w.means[c].data();
  x.size = static_cast<int64_t>(w.bytes[c].size());
  x.codebook = tables.books[c].front();
  x.others = tables.books[c].data() + 1;
  x.num_others = static_cast<int32_t>(tables.books[c].size()) - 1;
  return x;
}

CodedAttention call_of(const World& w, const Tables& tables) {
  CodedAttention call;
  call.keys = component_of(w, tables, 0);
  call.values = component_of(w, tables, 1);
  call.rows = w.rows.data();
  call.window = w.window.data();
  call.window_size = static_cast<int64_t>(w.window.size());
  call.window_pages = w.window_pages.data();
  call.window_page_bytes = window_page_bytes(w.shape.head_dim);
  call.num_window_pages = static_cast<int64_t>(w.window_pages.size());
  call.num_rows = static_cast<int32_t>(w.rows.size());
  call.num_items = w.items;
  call.num_blocks = static_cast<int32_t>(w.refs[0].size());
  call.num_steps = call.num_means = kSteps;
  call.columns = w.shape.columns;
  call.q_len = w.shape.q_len;
  call.num_kv_heads = w.shape.kv_heads;
  call.head_dim = w.shape.head_dim;
  call.sm_scale = static_cast<float>(1 / std::sqrt(w.shape.head_dim));
  call.max_block_bytes = w.max_block_bytes;
  return call;
}

CodedFamily family_of(const CodedComponent& c, int32_t head_dim) {
  CodedFamily family{};
  family.count = c.num_others;
  for (int32_t i = 0; i < c.num_others; ++i) {
    family.headers[i] = expected_header(c.others[i], head_dim);
    family.masks[i] = table_mask(c.others[i].max_length, 0);
    family.tables[i] = c.others[i].table;
    family.entries[i] = 1u << c.others[i].max_length;
  }
  return family;
}

int32_t longest_of(const CodedAttention& call) {
  int32_t longest = 0;
  for (const CodedComponent* c : {&call.keys, &call.values}) {
    longest = std::max(longest, c->codebook.max_length);
    for (int32_t i = 0; i < c->num_others; ++i) {
      longest = std::max(longest, c->others[i].max_length);
    }
  }
  return longest;
}

// One pass with one copy of each table. slots: of a warp.
CodedKernelParams params_of(const CodedAttention& call, int32_t slots, int32_t warps) {
  CodedKernelParams p{};
  p.call = call;
  p.grid.num_ctas = ctas_of(call);
  p.grid.slots_per_warp = slots;
  p.grid.warps = warps;
  p.grid.slot_bytes = (slice_count(call.head_dim) * call.max_block_bytes + 127) / 128 * 128;
  p.headers = {expected_header(call.keys.codebook, call.head_dim),
               expected_header(call.values.codebook, call.head_dim)};
  p.key_mask = table_mask(call.keys.codebook.max_length, 0);
  p.value_mask = table_mask(call.values.codebook.max_length, 0);
  p.row_columns = call.all_columns();
  p.queries = coded_columns(call);
  p.table_bytes = static_cast<uint32_t>(table_region_bytes(longest_of(call), 0));
  p.key_family = family_of(call.keys, call.head_dim);
  p.value_family = family_of(call.values, call.head_dim);
  const CodedSharedLayout at = coded_shared_layout(
      EmulatedShared::kStart, p.table_bytes, static_cast<uint32_t>(p.grid.slot_bytes),
      static_cast<uint32_t>(warps * slots), static_cast<uint32_t>(call.num_tables()));
  p.grid.shared_bytes = static_cast<int32_t>(at.end - EmulatedShared::kStart);
  return p;
}

void run_kernel(CodedKernel kernel, const CodedKernelParams& p) {
  EXPECT_LE(p.grid.shared_bytes, static_cast<int32_t>(sizeof(shared)));
  emulated_shared() = {shared, static_cast<uint32_t>(p.grid.shared_bytes)};
  for (int32_t cta = 0; cta < p.grid.num_ctas; ++cta) {
    std::fill(std::begin(shared), std::end(shared), uint8_t{0xff});
    emulator::cta().run(
        cta, p.grid.warps * 32, [&] { kernel(p); }, p.grid.num_ctas);
  }
}

// What the second kernel does: row r of the call, of the pass's partials.
void join_row(const World& w, const CodedKernelParams& p, int32_t r, Attended* to) {
  const CodedAttention& call = p.call;
  const ItemShares shares = item_shares(p, p.grid.warps);
  const int32_t begin = w.rows[r].first_item, dims = call.head_dim;
  const int32_t end = r + 1 < call.num_rows ? w.rows[r + 1].first_item : shares.items;
  const int32_t mean = w.shape.means ? w.rows[r].mean : -1;
  std::vector<const float*> parts;
  for (int32_t i = shares.warp_of(begin); begin < end && i <= shares.warp_of(end - 1); ++i) {
    parts.push_back(static_cast<const float*>(call.workspace) +
                    (int64_t{i} + r) * coded_partial_floats(call));
  }
  to->status[r] = StatusCode::kOk;
  for (int32_t c = 0; c < call.columns; ++c) {
    double top = -INFINITY, sum = 0, shift = 0;
    const auto state = [&](const float* part) { return part + call.columns * dims + 2 * c; };
    for (const float* part : parts) {
      top = std::max<double>(top, state(part)[0]);
      if (state(part)[1] < 0) to->status[r] = StatusCode::kCorrupt;
    }
    std::vector<double> out(dims);
    for (const float* part : parts) {
      const double factor = std::exp2(state(part)[0] - top);
      sum += factor * state(part)[1];
      for (int32_t d = 0; d < dims; ++d) out[d] += factor * part[c * dims + d];
    }
    const size_t place = w.shape.place(r, p.first_column + c);
    const bool present = sum > 0 && to->status[r] == StatusCode::kOk;
    for (int32_t d = 0; d < dims; ++d) {
      const size_t at = place * dims + d;
      const double y = present && mean >= 0 ? w.means[1][mean * dims + d] : 0;
      if (mean >= 0) shift += half_to_float(w.q[at]) * double{w.means[0][mean * dims + d]};
      to->out[at] = float_to_half(static_cast<float>(present ? out[d] / sum + y : 0));
    }
    to->lse[place] = static_cast<float>(
        present ? std::log(2.0) * (top + std::log2(sum)) + shift * call.sm_scale : -INFINITY);
  }
}

// Queries as kernels take them: [rows, columns of all queries, head_dim].
std::vector<uint16_t> halves_of(const World& w) {
  std::vector<uint16_t> halves;
  for (size_t r = 0; r < w.rows.size(); ++r) {
    for (int32_t c = 0; c < w.shape.all_columns(); ++c) {
      const auto first = w.q.begin() + static_cast<int64_t>(w.shape.place(r, c)) * w.shape.head_dim;
      halves.insert(halves.end(), first, first + w.shape.head_dim);
    }
  }
  return halves;
}

CodedKernelParams pass_of(CodedKernelParams p, int32_t first) {
  p.first_column = first;
  p.call.columns = std::min(p.row_columns - first, kCodedColumns);
  p.call.q = static_cast<const uint16_t*>(p.call.q) + int64_t{first} * p.call.head_dim;
  return p;
}

Attended attend_on_host(const World& w, CodedKernel kernel, int32_t slots,
                        int32_t fewer_warps_log = 0) {
  const Tables tables(w);
  CodedAttention call = call_of(w, tables);
  const Status valid = call.validate();
  EXPECT_TRUE(valid) << valid.message();
  const std::vector<uint16_t> halves = halves_of(w);
  call.q = halves.data();
  const int32_t warps = coded_warps(call.head_dim) >> fewer_warps_log;
  const int64_t partials = ctas_of(call) * warps + call.num_rows;
  Attended to;
  to.out.resize(w.q.size(), 0x7e00);
  to.lse.resize(w.rows.size() * call.all_columns(), NAN);
  to.status.resize(w.rows.size(), StatusCode::kIo);
  for (int32_t first = 0; first < call.all_columns(); first += kCodedColumns) {
    CodedKernelParams p = pass_of(params_of(call, slots, warps), first);
    std::vector<float> workspace(partials * coded_partial_floats(p.call), NAN);
    p.call.workspace = workspace.data();
    run_kernel(kernel, p);
    for (int32_t r = 0; r < call.num_rows; ++r) join_row(w, p, r, &to);
  }
  return to;
}

template <int kDimBlocks, CodedBreadth kBreadth>
CodedKernel kernel_of(const Shape& shape) {
  using One = BlockCode<BlockMode::kPair, 1, 0>;
  using Two = BlockCode<BlockMode::kPair, 2, 0>;
  return shape.streams == 1 ? coded_attention_kernel<kDimBlocks, One, kBreadth>
                            : coded_attention_kernel<kDimBlocks, Two, kBreadth>;
}
CodedKernel kernel_of(const Shape& shape) {
  const bool uniform = shape.head_dim <= kSliceDims && shape.family == 1;
  if (shape.head_dim == 256) return kernel_of<16, CodedBreadth::kSlices>(shape);
  if (!uniform) return kernel_of<4, CodedBreadth::kSlices>(shape);
  if (shape.head_dim == 128) return kernel_of<8, CodedBreadth::kQueries>(shape);
  return shape.q_len == 1 ? kernel_of<4, CodedBreadth::kPlain>(shape)
                          : kernel_of<4, CodedBreadth::kQueries>(shape);
}

class EmulatedCodedAttention : public RandomTest {
 protected:
  EmulatedCodedAttention() : source_(seed_) {}
  RowData row(int32_t coded, int32_t window) {
    return {coded, window, source_.below(kSteps), source_.below(kSteps + 1) - 1};
  }
  std::vector<RowData> ragged_rows() {
    std::vector<RowData> rows = {row(0, 0), row(64, 0), row(0, 1), row(1, 0), row(0, 0)};
    for (int32_t i = 0; i < 3; ++i) rows.push_back(row(source_.below(500), source_.below(150)));
    rows.push_back(row(1100, 70));
    rows.push_back(row(0, 0));
    return rows;
  }
  void check(Shape shape) {
    shape.columns = 1 + source_.below(12);
    if (source_.below(2) != 0) shape.q_len = 1 + source_.below(4);
    shape.streams = 1 + source_.below(2);
    shape.means = source_.below(2) != 0;
    SCOPED_TRACE("head_dim " + std::to_string(shape.head_dim) + " streams " +
                 std::to_string(shape.streams) + " columns " + std::to_string(shape.columns) +
                 " q_len " + std::to_string(shape.q_len) + " family " +
                 std::to_string(shape.family));
    const World w = make_world(&source_, shape, ragged_rows());
    compare(w, attend_on_host(w, kernel_of(shape), 1 + source_.below(2),
                              std::max(0, source_.below(5) - 1)));
  }
  CodeSource source_;
};

TEST_F(EmulatedCodedAttention, OfOneCodebook) {
  for (const int32_t head_dim : {64, 128}) {
    Shape shape;
    shape.head_dim = head_dim;
    check(shape);
  }
}

TEST_F(EmulatedCodedAttention, OfSlicesAndFamilies) {
  for (const int32_t head_dim : {64, 256}) {
    Shape shape;
    shape.head_dim = head_dim;
    shape.family = head_dim == 64 ? 3 : 1 + source_.below(2);
    check(shape);
  }
}

TEST_F(EmulatedCodedAttention, RawBlocksAlone) {
  for (const int32_t head_dim : {64, 256}) {
    Shape shape;
    shape.all_raw = true;
    shape.head_dim = head_dim;
    check(shape);
  }
}

}  // namespace
}  // namespace test::coded
}  // namespace tierkv
