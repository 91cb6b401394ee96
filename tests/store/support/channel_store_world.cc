#include "tests/store/support/channel_store_world.h"

#include <algorithm>
#include <cmath>

#include "allocator/invariants.h"
#include "codec/format/element.h"

namespace tierkv::testing {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

std::vector<SequenceId> ids(const ChannelStoreWorld::List& list) {
  std::vector<SequenceId> out;
  for (const ChannelModel* m : list) out.push_back(m->id);
  return out;
}
SequenceList sequences(const std::vector<SequenceId>& names) {
  return {names.data(), static_cast<int32_t>(names.size())};
}

// Quantises `count` values `stride` apart, and reads them back.
void round_trip(float* x, int32_t count, int32_t stride, int32_t bits) {
  std::vector<uint8_t> codes(static_cast<size_t>(count) * stride);
  QuantParams p;
  ASSERT_EQ(quantize_minmax(x, count, stride, 1 << bits, &p, codes.data()), StatusCode::kOk);
  for (int32_t i = 0; i < count; ++i) {
    x[i * stride] =
        dequantize(codes[i * stride], half_to_float(p.scale), half_to_float(p.zero_point));
  }
}

std::string broken_row(const ChannelView& s, int32_t row, const SequenceInfo& info) {
  const PageAllocator& a = s.allocator;
  const int32_t raw = ChannelView::raw_tokens(info);
  if (a.tokens[row].of[kBlockSide] != s.blocks_of(info)) return "blocks of a row";
  if (a.tokens[row].of[kResidualSide] < raw) return "raw tokens without room";
  if (a.tokens[row].of[kResidualSide] >= s.window_tokens + s.layout.tokens) {
    return "more raw tokens than a row can have";
  }
  for (int32_t i = 0; i < a.pages[row].of[kResidualSide]; ++i) {
    if (is_frozen(a, s.page_ids(row, kResidualSide)[i])) return "a raw page is shared";
  }
  // The rest of the last raw tile is empty.
  for (int32_t p = info.num_tokens; raw > 0 && p % kTileTokens != 0; ++p) {
    for (const Component c : kComponents) {
      const uint8_t* page = s.raw_page(row, info.window_first, p);
      for (int32_t d = 0; d < s.head_dim(); ++d) {
        const uint8_t* at = page + s.raw_value_byte(c, p, d);
        if (at[0] != 0 || at[1] != 0) return "a value behind the last token";
      }
    }
  }
  return "";
}

}  // namespace

KvStoreConfig small_channel_config() {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = 4;
  c.layout.num_kv_heads = 2;
  c.layout.head_dim = 64;
  c.layout.sm_scale = 0.125;
  c.policy.window_tokens = 16;
  c.num_pages = 150;
  c.max_sequences = 5;
  c.max_tokens = 400;
  c.channel.enabled = true;
  return c;
}

std::string broken_channel_law(const ChannelView& s) {
  if (Status status = InvariantChecker().check(s.allocator); !status) return status.message();
  for (int32_t q = 0; q < s.allocator.shape.table.num_sequences; ++q) {
    if (s.allocator.sequences[q].state == SequenceState::kFree) continue;
    const SequenceInfo& info = s.infos[q];
    if (info.window_first % s.layout.tokens != 0) return "a block that is not full";
    if (info.num_tokens - info.window_first >= s.window_tokens + s.layout.tokens) {
      return "a block should have been made";
    }
    for (int32_t w = 0; w < s.rows_per_sequence(); ++w) {
      const std::string text = broken_row(s, q * s.rows_per_sequence() + w, info);
      if (!text.empty()) return text;
    }
  }
  return "";
}

ChannelStoreWorld::ChannelStoreWorld(const KvStoreConfig& config, RandomInput* input)
    : config_(config), input_(input) {
  auto store = ChannelHostStore::make(config);
  EXPECT_TRUE(store.is_ok()) << store.status().message();
  if (store) store_ = std::move(*store);
}

Status ChannelStoreWorld::add(ChannelModel* m) {
  const Result<SequenceId> id = store_->add_sequence();
  if (!id) return id.status();
  *m = ChannelModel();
  m->id = *id;
  for (auto& list : m->rows) list.resize(rows());
  return Status::ok();
}

void ChannelStoreWorld::fill_blocks(ChannelModel* m) const {
  const int32_t dim = config_.layout.head_dim, block = config_.channel.block_tokens;
  while (m->tokens - m->in_blocks >= config_.policy.window_tokens + block) {
    for (int32_t w = 0; w < rows(); ++w) {
      float* k = m->rows[0][w].data() + int64_t{m->in_blocks} * dim;
      float* v = m->rows[1][w].data() + int64_t{m->in_blocks} * dim;
      for (int32_t d = 0; d < dim; ++d) round_trip(k + d, block, dim, config_.channel.k_bits);
      for (int32_t t = 0; t < block; ++t) round_trip(v + t * dim, dim, 1, config_.channel.v_bits);
    }
    m->in_blocks += block;
  }
}

void ChannelStoreWorld::expect_refused(AppendCall call, std::vector<uint8_t> v) {
  const auto bytes = static_cast<int32_t>(dtype_bytes(config_.layout.dtype));
  const auto values = static_cast<int32_t>(v.size()) / bytes;
  uint8_t* bad = v.data() + int64_t{input_->uniform(0, values - 1)} * bytes;
  std::fill_n(bad, bytes, uint8_t{0xff});  // NaN in every dtype
  call.v = v.data();
  EXPECT_EQ(store_->append(call).code(), StatusCode::kNonFinite);
}

Status ChannelStoreWorld::append_layers(const List& list, int32_t tokens) {
  const std::vector<SequenceId> names = ids(list);
  const auto count = static_cast<int32_t>(names.size());
  const int32_t heads = config_.layout.num_kv_heads, dim = config_.layout.head_dim;
  const DType dtype = config_.layout.dtype;
  for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
    const std::vector<uint8_t> x[2] = {input_->values(dtype, int64_t{count} * tokens, heads * dim),
                                       input_->values(dtype, int64_t{count} * tokens, heads * dim)};
    const AppendCall call = {{names.data(), count}, layer, tokens, x[0].data(), x[1].data()};
    // What is refused changes nothing: the values that follow give the model's.
    if (input_->chance(0.1)) expect_refused(call, x[1]);
    if (Status s = store_->append(call); !s) return s;
    for (int64_t i = 0; i < int64_t{count} * tokens * heads * 2; ++i) {
      const int64_t c = i % 2, h = i / 2 % heads, entry = i / 2 / heads / tokens;
      std::vector<float>& row = list[entry]->rows[c][layer * heads + h];
      for (int32_t d = 0; d < dim; ++d) {
        const float value = load_element(x[c].data(), dtype, i / 2 * dim + d);
        row.push_back(half_to_float(float_to_half(value)));
      }
    }
  }
  for (ChannelModel* m : list) m->tokens += tokens;
  for (ChannelModel* m : list) fill_blocks(m);
  return Status::ok();
}

Status ChannelStoreWorld::prompt(const List& list, int32_t tokens) {
  const std::vector<SequenceId> names = ids(list);
  if (Status s = store_->begin_prompt(sequences(names), tokens); !s) return s;
  return append_layers(list, tokens);
}

Status ChannelStoreWorld::end_prompt(const List& list) {
  const std::vector<SequenceId> names = ids(list);
  if (Status s = store_->end_prompt(sequences(names)); !s) return s;
  for (ChannelModel* m : list) m->live = true;
  return Status::ok();
}

Status ChannelStoreWorld::step(const List& list, int32_t tokens) {
  const std::vector<SequenceId> names = ids(list);
  if (Status s = store_->begin_step(sequences(names), tokens); !s) return s;
  return append_layers(list, tokens);
}

Status ChannelStoreWorld::fork(const ChannelModel& source, ChannelModel* copy) {
  const Result<SequenceId> id = store_->fork(source.id);
  if (!id) return id.status();
  *copy = source;
  copy->id = *id;
  return Status::ok();
}

Status ChannelStoreWorld::truncate(ChannelModel* m, int32_t tokens) {
  if (Status status = store_->truncate(m->id, tokens); !status) return status;
  const int32_t dim = config_.layout.head_dim, block = config_.channel.block_tokens;
  const int32_t kept = std::min(m->in_blocks, tokens / block * block);
  for (auto& component : m->rows) {
    for (std::vector<float>& row : component) {
      row.resize(static_cast<size_t>(tokens) * dim);
      // What was cut is raw again.
      for (int64_t i = int64_t{kept} * dim; i < int64_t{std::min(m->in_blocks, tokens)} * dim;
           ++i) {
        row[i] = half_to_float(float_to_half(saturate_to_half_range(row[i])));
      }
    }
  }
  m->in_blocks = kept;
  m->tokens = tokens;
  return Status::ok();
}

Status ChannelStoreWorld::transfer(const ChannelModel& source, ChannelModel* copy) {
  const Result<std::vector<uint8_t>> bytes = store_->export_sequence(source.id);
  if (!bytes) return bytes.status();
  const Result<SequenceId> id = store_->import_sequence(bytes->data(), bytes->size());
  if (!id) return id.status();
  *copy = source;
  copy->id = *id;
  const Result<std::vector<uint8_t>> again = store_->export_sequence(*id);
  if (!again) return again.status();
  EXPECT_TRUE(*again == *bytes) << "an import exports other bytes";
  return Status::ok();
}

std::string ChannelStoreWorld::difference(const ChannelModel& m) const {
  const SequenceInfo& info = view().infos[m.id.slot];
  if (info.num_tokens != m.tokens) return "tokens";
  if (info.window_first != m.in_blocks) return "tokens in blocks";
  const int32_t dim = config_.layout.head_dim;
  for (int32_t i = 0; i < 2 * rows(); ++i) {
    const std::vector<float>& row = m.rows[i % 2][i / 2];
    const int32_t at = m.id.slot * rows() + i / 2;
    for (int32_t j = 0; j < m.tokens * dim; ++j) {
      const float found = stored_value(view(), at, kComponents[i % 2], j / dim, j % dim);
      if (found == row[j]) continue;
      return "row " + std::to_string(i / 2) + " component " + std::to_string(i % 2) + " token " +
             std::to_string(j / dim) + " dim " + std::to_string(j % dim);
    }
  }
  return "";
}

std::string ChannelStoreWorld::attention_difference(const ChannelModel& m, int32_t layer,
                                                    int32_t q_len) {
  const CacheLayout& layout = config_.layout;
  const int32_t dim = layout.head_dim, heads = layout.num_q_heads;
  const std::vector<uint8_t> q = input_->values(DType::kFloat16, q_len * heads, dim);
  const auto* queries = reinterpret_cast<const uint16_t*>(q.data());
  std::vector<uint16_t> out(static_cast<size_t>(q_len) * heads * dim, 0x7e00);
  std::vector<float> lse(q_len * heads, NAN);
  AttendRequest request;
  request.sequences = {&m.id, 1};
  request.layer = layer;
  request.q = q.data();
  request.out = out.data();
  request.lse = lse.data();
  request.q_len = q_len;
  if (Status s = store_->attend(request); !s) return s.message();
  for (int32_t i = 0; i < q_len * heads; ++i) {
    const int32_t within = layer * layout.num_kv_heads + i % heads / layout.group_size();
    const int32_t seen = m.tokens - q_len + 1 + i / heads;
    const std::vector<float>&k = m.rows[0][within], &v = m.rows[1][within];
    std::vector<double> p(seen), x(dim), size(dim);
    double sum = 0, largest = -INFINITY;
    for (int32_t j = 0; j < seen * dim; ++j) {
      p[j / dim] += half_to_float(queries[i * dim + j % dim]) * double{k[j]} * layout.sm_scale;
    }
    for (const double score : p) largest = std::max(largest, score);
    for (double& weight : p) sum += weight = std::exp(weight - largest);
    for (int32_t j = 0; j < seen * dim; ++j) {
      x[j % dim] += p[j / dim] / sum * v[j];
      size[j % dim] += p[j / dim] / sum * std::fabs(v[j]);
    }
    if (seen == 0) {
      const bool empty = std::isinf(lse[i]) && lse[i] < 0 &&
                         std::all_of(out.begin(), out.end(), [](uint16_t y) { return y == 0; });
      if (!empty) return "attention over no tokens";
      continue;
    }
    // Both in double; the lse is rounded to fp32 once, the output to fp16.
    const double expected = largest + std::log(sum);
    if (!(std::fabs(lse[i] - expected) <= 1e-6 * (1 + std::fabs(expected)))) return "lse";
    for (int32_t d = 0; d < dim; ++d) {
      const double error = std::fabs(half_to_float(out[i * dim + d]) - x[d]);
      if (!(error <= size[d] * 5e-4 + 6e-8)) return "out, head " + std::to_string(i);
    }
  }
  return "";
}

}  // namespace tierkv::testing
