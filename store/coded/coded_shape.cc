#include "store/coded/coded_shape.h"

#include <cmath>
#include <cstdio>
#include <string>
#include <utility>

#include "codec/format/codebook.h"
#include "store/shared/tierless_config.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

Status invalid(std::string why) {
  return Status(StatusCode::kInvalidArgument, std::move(why));
}
Status unsupported(std::string why) {
  return Status(StatusCode::kUnsupported, std::move(why));
}

Status check_numbers(const std::vector<float>& x, size_t count, bool positive, const char* name) {
  if (x.size() != count) {
    return invalid(std::string(name) + " must have " + std::to_string(count) + " elements");
  }
  for (const float value : x) {
    const bool in_range = std::fabs(value) <= kMaxHalf && (!positive || value > 0);
    if (!in_range) return invalid(std::string(name) + " has an element that is out of range");
  }
  return Status::ok();
}

constexpr float kLeastRelative = 0x1p-14f;

Status validate_steps(const CodedConfig& coded, size_t rows) {
  if (coded.steps != StepSource::kGiven && coded.steps != StepSource::kPrompt) {
    return invalid("coded.steps");
  }
  const bool given = coded.steps == StepSource::kGiven;
  for (const float relative : {coded.key_relative, coded.value_relative}) {
    if (given ? relative != 0 : !(relative >= kLeastRelative && relative <= 1)) {
      return invalid(given ? "coded.key_relative and value_relative need steps = kPrompt"
                           : "coded.key_relative and value_relative must be 2^-14 to 1");
    }
  }
  if (!given) rows = 0;
  if (Status s = check_numbers(coded.key_steps, rows, true, "coded.key_steps"); !s) return s;
  return check_numbers(coded.value_steps, rows, true, "coded.value_steps");
}

Status validate_basis(const KvStoreConfig& c) {
  const CodedConfig& coded = c.coded;
  const size_t rows = static_cast<size_t>(c.layout.num_layers) * c.layout.num_kv_heads;
  if (Status s = validate_steps(coded, rows); !s) return s;
  if (coded.means != MeanSource::kNone && coded.means != MeanSource::kGiven &&
      coded.means != MeanSource::kPrompt) {
    return invalid("coded.means");
  }
  const size_t means = coded.means == MeanSource::kGiven ? rows * c.layout.head_dim : 0;
  if (Status s = check_numbers(coded.key_means, means, false, "coded.key_means"); !s) return s;
  return check_numbers(coded.value_means, means, false, "coded.value_means");
}

Status validate_given(const CodedConfig& coded) {
  bool seen[2][256] = {};
  int32_t count[2] = {0, 0};
  for (const std::vector<uint8_t>& bytes : coded.given) {
    const Result<Codebook> book = parse_codebook(bytes.data(), static_cast<int64_t>(bytes.size()));
    if (!book) return book.status().with_context("coded.given");
    const auto component = static_cast<int32_t>(book->component);
    if (std::exchange(seen[component][book->table_id], true)) {
      return invalid("coded.given: two codebooks of a component with one table id");
    }
    ++count[component];
  }
  if (count[0] == 0 || count[1] == 0) {
    return invalid("coded.given must have codebooks of both components");
  }
  return Status::ok();
}

Status validate_codebooks(const CodedConfig& coded) {
  if (coded.codebooks == CodebookSource::kGiven) return validate_given(coded);
  if (coded.codebooks != CodebookSource::kHost && coded.codebooks != CodebookSource::kDevice) {
    return invalid("coded.codebooks");
  }
  if (!coded.given.empty()) return invalid("coded.given without codebooks = kGiven");
  if (coded.max_length < 8 || coded.max_length > kMaxCodeLength) {
    return invalid("coded.max_length must be 8 to " + std::to_string(kMaxCodeLength));
  }
  if (coded.streams_per_lane != 1 && coded.streams_per_lane != 2) {
    return invalid("coded.streams_per_lane must be 1 or 2");
  }
  return Status::ok();
}

Status validate_fixed(const CodedConfig& coded) {
  if (!coded.fixed_blocks) {
    return coded.fixed_format == CodedConfig().fixed_format
               ? Status::ok()
               : invalid("coded.fixed_format without coded.fixed_blocks");
  }
  for (const Component c : {Component::kKey, Component::kValue}) {
    const ComponentFormat& format = coded.fixed_format.of(c);
    if (format != token_wise(8) && format != token_wise(4)) {
      return unsupported("coded.fixed_format: " + to_string(format) +
                         "; token-wise 8 or 4 bits are needed");
    }
  }
  return Status::ok();
}

Status validate_counts(const KvStoreConfig& c) {
  const int32_t head_dim = c.layout.head_dim;
  if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256) {
    return unsupported("layout.head_dim must be 64, 96, 128 or 256");
  }
  if (Status s = validate_tierless_counts(c); !s) return s;
  if (c.page_bytes != 0 && c.page_bytes != coded_page_bytes(head_dim)) {
    return unsupported("page_bytes: coded pages of this head_dim have " +
                       std::to_string(coded_page_bytes(head_dim)) + " bytes");
  }
  // Blocks are named by 32-bit units of 16 bytes.
  if (c.num_pages > (int64_t{1} << 32) / (coded_page_bytes(head_dim) / kBlockAlignment)) {
    return Status(StatusCode::kOutOfRange, "num_pages: a coded pool has at most 64 GiB");
  }
  return Status::ok();
}

}  // namespace

Result<CodedShape> coded_shape(const KvStoreConfig& c) {
  if (Status s = c.layout.validate(); !s) return s.with_context("layout");
  if (Status s = c.policy.validate(); !s) return s.with_context("policy");
  // alpha_high tells fixed-rate blocks from coded ones.
  if (Status s = validate_tierless(c, "a coded cache", c.coded.fixed_blocks); !s) return s;
  if (Status s = validate_counts(c); !s) return s;
  if (c.basis != nullptr) {
    return Status(StatusCode::kUnsupported, "basis: coded pages have means of their own");
  }
  if (Status s = validate_basis(c); !s) return s;
  if (Status s = validate_codebooks(c.coded); !s) return s;
  if (Status s = validate_fixed(c.coded); !s) return s;
  const int64_t rows = int64_t{c.layout.num_layers} * c.layout.num_kv_heads;
  if (rows > INT32_MAX) return invalid("layout: num_layers * num_kv_heads exceeds 2^31 - 1");
  CodedShape shape;
  shape.page_bytes = coded_page_bytes(c.layout.head_dim);
  shape.max_blocks = larger_of(1, c.max_tokens / kBlockTokens);
  if (rows * c.max_sequences > INT32_MAX / shape.max_blocks) {
    return Status(StatusCode::kOutOfRange, "capacity: more than 2^31 - 1 blocks");
  }
  PageTableShape& table = shape.allocator.table;
  table.num_sequences = c.max_sequences;
  table.rows_per_sequence = static_cast<int32_t>(rows);
  table.num_sides = kRawSide + 1;
  table.tokens_per_page[0] = table.tokens_per_page[1] =
      static_cast<int32_t>(shape.page_bytes / kBlockAlignment);
  table.tokens_per_page[kRawSide] = kBlockTokens;
  table.table_slots[0] = shape.max_blocks;
  table.table_slots[1] = pages_for(c.max_tokens, kBlockTokens);
  shape.allocator.num_pages = c.num_pages;
  if (Status s = shape.allocator.validate(); !s) return s.with_context("capacity");
  return shape;
}

Status check_coded_prompt(int32_t tokens) {
  if (tokens <= kMaxCodedPromptTokens) return Status::ok();
  return Status(StatusCode::kOutOfRange, "tokens: a coded store takes at most " +
                                             std::to_string(kMaxCodedPromptTokens) +
                                             " at once; bring a longer prompt in pieces");
}

Status check_coded_prompt_end(const CodedConfig& config, int32_t tokens) {
  if (tokens > 0 || config.steps != StepSource::kPrompt) return Status::ok();
  return invalid("a prompt without tokens has no range for coded.steps = kPrompt");
}

Status no_coded_scores() {
  return unsupported("a coded cache keeps no scores: it has no tiers");
}

Status validate_coded_request(const AttendRequest& request) {
  if (request.count_query) return unsupported("count_query: coded stores keep no scores");
  return Status::ok();
}

std::string to_json(const CodedConfig& c) {
  static constexpr const char* kMeans[] = {"none", "given", "prompt"};
  static constexpr const char* kSteps[] = {"given", "prompt"};
  static constexpr const char* kBooks[] = {"host", "device", "given"};
  const auto number = [](float x) {
    char text[32];
    std::snprintf(text, sizeof(text), "%.9g", x);
    return std::string(text);
  };
  const auto numbers = [&](const std::vector<float>& x) {
    std::string text;
    for (const float value : x) text += (text.empty() ? "" : ",") + number(value);
    return "[" + text + "]";
  };
  std::string given;
  for (const std::vector<uint8_t>& bytes : c.given) {
    given += given.empty() ? "\"" : ",\"";
    for (const uint8_t byte : bytes) {
      given += "0123456789abcdef"[byte >> 4];
      given += "0123456789abcdef"[byte & 15];
    }
    given += '"';
  }
  const auto means = static_cast<size_t>(c.means), books = static_cast<size_t>(c.codebooks),
             steps = static_cast<size_t>(c.steps);
  return std::string("{\"enabled\":") + (c.enabled ? "true" : "false") + ",\"steps\":\"" +
         (steps < 2 ? kSteps[steps] : "?") + "\",\"key_relative\":" + number(c.key_relative) +
         ",\"value_relative\":" + number(c.value_relative) +
         ",\"key_steps\":" + numbers(c.key_steps) + ",\"value_steps\":" + numbers(c.value_steps) +
         ",\"means\":\"" + (means < 3 ? kMeans[means] : "?") +
         "\",\"key_means\":" + numbers(c.key_means) + ",\"value_means\":" + numbers(c.value_means) +
         ",\"codebooks\":\"" + (books < 3 ? kBooks[books] : "?") + "\",\"given\":[" + given +
         "],\"max_length\":" + std::to_string(c.max_length) +
         ",\"streams_per_lane\":" + std::to_string(c.streams_per_lane) +
         ",\"fixed_blocks\":" + (c.fixed_blocks ? "true" : "false") + ",\"fixed_format\":\"" +
         to_string(c.fixed_format) + "\"}";
}

CodedView coded_view(const KvStoreConfig& config, const CodedShape& shape) {
  CodedView view;
  view.max_blocks = shape.max_blocks;
  view.window_tokens = config.policy.window_tokens;
  view.num_kv_heads = config.layout.num_kv_heads;
  view.head_dim = config.layout.head_dim;
  if (config.coded.fixed_blocks) {
    const TierFormat& format = config.coded.fixed_format;
    view.fixed = {{format.k.type.bits(), format.v.type.bits()},
                  config.policy.sink_tokens,
                  config.policy.alpha_high};
  }
  return view;
}

}  // namespace tierkv
