#include "tests/store/support/coded_world.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>

#include "codec/format/element.h"
#include "store/coded/coded_fixed.h"

namespace tierkv::testing {
namespace {

constexpr Component kComponents[] = {Component::kKey, Component::kValue};

std::vector<SequenceId> ids(const std::vector<CodedModel*>& list) {
  std::vector<SequenceId> out;
  for (const CodedModel* m : list) out.push_back(m->id);
  return out;
}

int32_t code_of(uint16_t y, float step) {
  return static_cast<int32_t>(std::nearbyint(half_to_float(y) / step));
}

// A token of 64 (or, beyond 128 channels, a half of it) as min-max codes and back: `y` [dims].
void quantise_token(int32_t bits, uint16_t* y, int32_t dims) {
  float lo = half_to_float(y[0]), hi = lo;
  for (int32_t d = 0; d < dims; ++d) {
    lo = std::min(lo, half_to_float(y[d]));
    hi = std::max(hi, half_to_float(y[d]));
  }
  const auto top = static_cast<float>((1 << bits) - 1);
  const float scale = half_to_float(float_to_half((hi - lo) / top));
  const float zero = half_to_float(float_to_half(lo));
  for (int32_t d = 0; d < dims; ++d) {
    float code = 0;
    if (scale > 0) code = std::nearbyint((half_to_float(y[d]) - zero) / scale);
    code = std::min(std::max(code, 0.0f), top);
    const float product = scale * code;
    const float x = product + zero;
    y[d] = float_to_half(std::min(std::max(x, -65504.0f), 65504.0f));
  }
}

}  // namespace

KvStoreConfig small_coded_config(RandomInput* input) {
  KvStoreConfig c;
  c.layout.num_layers = 2;
  c.layout.num_q_heads = 4;
  c.layout.num_kv_heads = 2;
  c.layout.head_dim = 64;
  c.layout.sm_scale = 0.125;
  c.policy.window_tokens = 16;
  c.num_pages = 90;
  c.max_sequences = 5;
  c.max_tokens = 400;
  c.coded.enabled = true;
  for (int32_t i = 0; i < 4; ++i) {
    c.coded.key_steps.push_back(input->real(0.5f, 1.0f));
    c.coded.value_steps.push_back(input->real(0.5f, 1.0f));
  }
  return c;
}

void use_prompt_steps(KvStoreConfig* config, RandomInput* input) {
  config->coded.steps = StepSource::kPrompt;
  config->coded.key_steps.clear();
  config->coded.value_steps.clear();
  // From raw blocks to ones of a few code words. A later value may be several times the range of
  // the prompt, so a code takes a few bits more than the range does: all fit 16.
  config->coded.key_relative = std::exp2(input->real(-11, 0));
  config->coded.value_relative = std::exp2(input->real(-8, 0));
}

CodedWorld::CodedWorld(const KvStoreConfig& config, RandomInput* input)
    : config_(config), input_(input) {
  auto store = CodedHostStore::make(config);
  EXPECT_TRUE(store.is_ok()) << store.status().message();
  if (store) store_ = std::move(*store);
}

Status CodedWorld::add(CodedModel* m) {
  const Result<SequenceId> id = store_->add_sequence();
  if (!id) return id.status();
  *m = CodedModel();
  m->id = *id;
  for (auto& list : m->rows) list.resize(rows());
  m->scores.resize(rows());
  m->fixed.resize(rows());
  return Status::ok();
}

Status CodedWorld::append_layers(const std::vector<CodedModel*>& list, int32_t tokens) {
  const std::vector<SequenceId> names = ids(list);
  const auto count = static_cast<int32_t>(names.size());
  const int32_t heads = config_.layout.num_kv_heads, dim = config_.layout.head_dim;
  std::normal_distribution<float> normal;
  std::mt19937 rng(static_cast<uint32_t>(input_->uniform(0, INT32_MAX)));
  for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
    std::vector<uint16_t> x[2];
    for (auto& values : x) {
      const float offset = 3 * normal(rng);
      for (int64_t i = 0; i < int64_t{count} * tokens * heads * dim; ++i) {
        values.push_back(float_to_half(offset + spread_ * normal(rng)));
      }
    }
    const AppendCall call = {{names.data(), count}, layer, tokens, x[0].data(), x[1].data()};
    if (Status s = store_->append(call); !s) return s;
    for (int64_t i = 0; i < int64_t{count} * tokens * heads * 2; ++i) {
      const int64_t c = i % 2, h = i / 2 % heads, entry = i / 2 / heads / tokens;
      CodedRowModel& row = list[entry]->rows[c][layer * heads + h];
      for (int32_t d = 0; d < dim; ++d) {
        const uint16_t value = x[c][i / 2 * dim + d];
        const float mean = list[entry]->live ? row.means[d] : 0.0f;
        row.values.push_back(list[entry]->live ? float_to_half(half_to_float(value) - mean)
                                               : value);
      }
    }
  }
  for (CodedModel* m : list) m->tokens += tokens;
  return Status::ok();
}

Status CodedWorld::prompt(const std::vector<CodedModel*>& list, int32_t tokens) {
  const std::vector<SequenceId> names = ids(list);
  const SequenceList sequences = {names.data(), static_cast<int32_t>(names.size())};
  if (Status s = store_->begin_prompt(sequences, tokens); !s) return s;
  if (Status s = append_layers(list, tokens); !s) return s;
  for (CodedModel* m : list) {
    for (auto& line : m->scores) line.resize(m->tokens, 0.0f);
    for (int32_t layer = 0; layer < config_.layout.num_layers; ++layer) {
      if (!config_.coded.fixed_blocks || input_->chance(0.3)) continue;
      if (Status s = score(m, layer); !s) return s;
    }
  }
  return Status::ok();
}

Status CodedWorld::score(CodedModel* m, int32_t layer) {
  const int32_t heads = config_.layout.num_kv_heads;
  std::vector<float> x;
  for (int32_t h = 0; h < heads; ++h) {
    std::vector<float>& line = m->scores[layer * heads + h];
    for (int32_t p = 0; p < m->tokens; ++p) {
      // At the threshold as fp32 has it, on either side of it or on it, or far below.
      const auto threshold = static_cast<float>(config_.policy.alpha_high / (p + 1));
      line[p] = input_->chance(0.01) ? threshold : input_->real(0, 0.9f) * threshold;
    }
    x.insert(x.end(), line.begin(), line.end());
    x.push_back(NAN);  // the stride is larger
  }
  return store_->score_prompt({{&m->id, 1}, layer, x.data(), m->tokens + 1});
}

void CodedWorld::make_block(CodedModel* m) {
  const int32_t dim = config_.layout.head_dim;
  for (int32_t w = 0; w < rows(); ++w) {
    bool fixed = false;
    for (int32_t p = m->coded; p < m->coded + 64 && config_.coded.fixed_blocks; ++p) {
      const double score = m->live ? 0.0 : m->scores[w][p];
      fixed |= p < config_.policy.sink_tokens || score >= config_.policy.alpha_high / (p + 1);
    }
    m->fixed[w].push_back(fixed);
    for (int32_t i = 0; i < 2 * 64 && fixed; ++i) {
      const auto c = static_cast<Component>(i % 2);
      uint16_t* y = &m->rows[i % 2][w].values[int64_t{m->coded + i / 2} * dim];
      for (int32_t first = 0; first < dim; first += 128) {
        quantise_token(config_.coded.fixed_format.of(c).type.bits(), y + first,
                       std::min(128, dim - first));
      }
    }
  }
  m->coded += 64;
}

float CodedWorld::new_step(const CodedRowModel& row, int32_t component, int32_t within) const {
  const CodedConfig& coded = config_.coded;
  if (coded.steps == StepSource::kGiven) {
    return (component == 0 ? coded.key_steps : coded.value_steps)[within];
  }
  float least = 0, most = 0;
  for (const uint16_t y : row.values) {
    least = std::min(least, half_to_float(y));
    most = std::max(most, half_to_float(y));
  }
  const float relative = component == 0 ? coded.key_relative : coded.value_relative;
  return most > least ? relative * (most - least) : 1.0f;
}

Status CodedWorld::end_prompt(const std::vector<CodedModel*>& list) {
  const std::vector<SequenceId> names = ids(list);
  if (Status s = store_->end_prompt({names.data(), static_cast<int32_t>(names.size())}); !s) {
    return s;
  }
  const int32_t dim = config_.layout.head_dim;
  for (CodedModel* m : list) {
    for (int32_t i = 0; i < 2 * rows(); ++i) {
      CodedRowModel& row = m->rows[i % 2][i / 2];
      row.means.assign(dim, 0.0f);
      const std::vector<float>& given =
          i % 2 == 0 ? config_.coded.key_means : config_.coded.value_means;
      for (int32_t d = 0; d < dim; ++d) {
        double sum = 0;  // exact: few tokens, and fp16
        for (int32_t t = 0; t < m->tokens; ++t) sum += half_to_float(row.values[t * dim + d]);
        float mean = 0;
        if (config_.coded.means == MeanSource::kPrompt && m->tokens > 0) {
          mean = static_cast<float>(sum / m->tokens);
        }
        if (config_.coded.means == MeanSource::kGiven) mean = given[i / 2 * dim + d];
        row.means[d] = half_to_float(float_to_half(mean));
      }
      for (size_t j = 0; j < row.values.size(); ++j) {
        row.values[j] = float_to_half(half_to_float(row.values[j]) - row.means[j % dim]);
      }
      row.step = new_step(row, i % 2, i / 2);
    }
    while (m->tokens - m->coded >= config_.policy.window_tokens + 64) make_block(m);
    m->live = true;
  }
  return Status::ok();
}

Status CodedWorld::step(const std::vector<CodedModel*>& list, int32_t tokens) {
  const std::vector<SequenceId> names = ids(list);
  if (Status s = store_->begin_step({names.data(), static_cast<int32_t>(names.size())}, tokens);
      !s) {
    return s;
  }
  for (CodedModel* m : list) {
    if (m->tokens + tokens - m->coded >= config_.policy.window_tokens + 64) make_block(m);
  }
  return append_layers(list, tokens);
}

Status CodedWorld::fork(const CodedModel& source, CodedModel* copy) {
  const Result<SequenceId> id = store_->fork(source.id);
  if (!id) return id.status();
  *copy = source;
  copy->id = *id;
  return Status::ok();
}

Status CodedWorld::truncate(CodedModel* m, int32_t tokens) {
  if (Status status = store_->truncate(m->id, tokens); !status) return status;
  const int32_t dim = config_.layout.head_dim, coded = std::min(m->coded, tokens / 64 * 64);
  for (int32_t i = 0; i < 2 * rows(); ++i) {
    std::vector<uint16_t>& values = m->rows[i % 2][i / 2].values;
    values.resize(static_cast<size_t>(tokens) * dim);
    const float step = m->rows[i % 2][i / 2].step;
    const bool cut = coded < m->coded && !m->fixed[i / 2][coded / 64];
    for (int64_t j = int64_t{coded} * dim; cut && j < int64_t{std::min(m->coded, tokens)} * dim;
         ++j) {
      values[j] = float_to_half(step * static_cast<float>(code_of(values[j], step)));
    }
  }
  for (auto& blocks : m->fixed) blocks.resize(coded / 64);
  for (auto& line : m->scores) line.resize(std::min<size_t>(line.size(), tokens));
  m->coded = coded;
  m->tokens = tokens;
  return Status::ok();
}

Status CodedWorld::transfer(const CodedModel& source, CodedModel* copy) {
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

double CodedWorld::value(const CodedModel& m, int32_t component, int32_t within, int64_t i) const {
  const uint16_t y = m.rows[component][within].values[i];
  const int64_t token = i / config_.layout.head_dim;
  if (token >= m.coded || m.fixed[within][token / 64]) return half_to_float(y);
  const float step = m.rows[component][within].step;
  return static_cast<double>(step) * code_of(y, step);
}

std::string CodedWorld::difference(const CodedModel& m) const {
  const SequenceInfo& info = view().infos[m.id.slot];
  if (info.num_tokens != m.tokens) return "tokens";
  if (info.window_first != m.coded) return "coded tokens";
  const int32_t dim = config_.layout.head_dim;
  std::vector<int16_t> codes(static_cast<size_t>(64) * dim);
  std::vector<uint16_t> raw(dim);
  for (int32_t i = 0; i < 2 * rows(); ++i) {
    const Component c = kComponents[i % 2];
    const auto& [values, means, step] = m.rows[i % 2][i / 2];
    const std::string where =
        "row " + std::to_string(i / 2) + " component " + std::to_string(i % 2);
    std::vector<uint16_t> y(codes.size());
    for (int32_t b = 0; b < m.coded / 64; ++b) {
      const std::string block = where + " block " + std::to_string(b);
      if (is_fixed_block(view(), row(m, i / 2), b) != m.fixed[i / 2][b]) return block + " kind";
      if (m.fixed[i / 2][b]) {
        const Status read =
            read_block_values(view(), store_->books(), row(m, i / 2), c, b, y.data());
        if (!read) return block + ": " + read.message();
        if (!std::equal(y.begin(), y.end(), values.begin() + b * static_cast<int64_t>(y.size()))) {
          return block + " at a fixed rate";
        }
        continue;
      }
      const Status read = read_block(view(), store_->books(), row(m, i / 2), c, b, codes.data());
      if (!read) return where + ": " + read.message();
      for (size_t j = 0; j < codes.size(); ++j) {
        if (codes[j] != code_of(values[b * codes.size() + j], step)) {
          return block + " code " + std::to_string(j);
        }
      }
    }
    for (int32_t t = m.coded; t < m.tokens; ++t) {
      get_raw_token(view(), row(m, i / 2), info, c, t, raw.data());
      if (!std::equal(raw.begin(), raw.end(), values.begin() + int64_t{t} * dim)) {
        return where + " raw token " + std::to_string(t);
      }
    }
    for (int32_t t = m.tokens; t % kTileTokens != 0; ++t) {  // the rest of the tile is empty
      const int32_t page = view().raw_page_index(info, m.tokens - 1);
      const uint8_t* bytes = view().page_bytes(view().page_id(row(m, i / 2), kRawSide, page));
      for (int32_t d = 0; d < dim; ++d) {
        const uint8_t* at = bytes + raw_value_byte(dim, c, t % 64, d);
        if (at[0] != 0 || at[1] != 0) return where + " behind the last token";
      }
    }
  }
  return "";
}

std::string CodedWorld::attention_difference(const CodedModel& m, int32_t layer) {
  const CacheLayout& layout = config_.layout;
  const int32_t dim = layout.head_dim, heads = layout.num_q_heads;
  const DType dtype = input_->chance(0.5) ? DType::kFloat16 : DType::kBFloat16;
  const std::vector<uint8_t> q = input_->values(dtype, heads, dim);
  const auto* queries = reinterpret_cast<const uint16_t*>(q.data());
  std::vector<uint16_t> out(static_cast<size_t>(heads) * dim, 0x7e00);
  std::vector<float> lse(heads, NAN);
  AttendRequest request;
  request.sequences = {&m.id, 1};
  request.layer = layer;
  request.dtype = dtype;
  request.q = q.data();
  request.out = out.data();
  request.lse = lse.data();
  if (Status s = store_->attend(request); !s) return s.message();
  for (int32_t h = 0; h < heads; ++h) {
    const int32_t within = layer * layout.num_kv_heads + h / layout.group_size();
    const auto mean = [&](int32_t c, int32_t d) {
      return m.live ? m.rows[c][within].means[d] : 0.0f;
    };
    std::vector<double> p(m.tokens), x(dim), size(dim);
    double sum = 0, largest = -std::numeric_limits<double>::infinity();
    for (int32_t t = 0; t < m.tokens; ++t) {
      for (int32_t d = 0; d < dim; ++d) {
        p[t] += raw_to_float(dtype, queries[h * dim + d]) *
                (value(m, 0, within, int64_t{t} * dim + d) + mean(0, d)) * layout.sm_scale;
      }
      largest = std::max(largest, p[t]);
    }
    for (double& weight : p) sum += weight = std::exp(weight - largest);
    for (int64_t i = 0; i < int64_t{m.tokens} * dim; ++i) {
      const double v = value(m, 1, within, i) + mean(1, static_cast<int32_t>(i % dim));
      x[i % dim] += p[i / dim] / sum * v;
      size[i % dim] += p[i / dim] / sum * std::fabs(v);
    }
    if (m.tokens == 0) {
      const bool empty = std::isinf(lse[h]) && lse[h] < 0 &&
                         std::all_of(out.begin(), out.end(), [](uint16_t y) { return y == 0; });
      if (!empty) return "attention over no tokens";
      continue;
    }
    // Both in double; the lse is rounded to fp32 once, the output to fp16 or to bfloat16, of which
    // half a unit in the last place is 2^-8.
    const double expected = largest + std::log(sum);
    if (!(std::fabs(lse[h] - expected) <= 1e-6 * (1 + std::fabs(expected)))) return "lse";
    for (int32_t d = 0; d < dim; ++d) {
      const double error = std::fabs(raw_to_float(dtype, out[h * dim + d]) - x[d]);
      const double rounding = dtype == DType::kFloat16 ? 5e-4 : 4e-3;
      if (!(error <= size[d] * rounding + 6e-8)) return "out, head " + std::to_string(h);
    }
  }
  return "";
}

}  // namespace tierkv::testing
