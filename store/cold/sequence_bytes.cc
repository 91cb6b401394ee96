#include "store/cold/sequence_bytes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "codec/file/container_format.h"
#include "codec/format/byte_cursor.h"
#include "codec/host/page_codec.h"

namespace tierkv {
namespace {

constexpr uint32_t kMagic = 0x51455354;  // "TSEQ"
constexpr uint32_t kExportVersion = 2;
constexpr int64_t kRowHeaderBytes = 12;

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

// The parts of the first `tiles` tiles of a page that are defined, in order.
struct Segment {
  int32_t first, bytes;
};
std::vector<Segment> used_segments(const PageLayout& p, int32_t used) {
  const int32_t tiles = pages_for(used, kTileTokens);
  std::vector<Segment> segments;
  for (const Component c : {Component::kKey, Component::kValue}) {
    segments.push_back({p.tile_codes_byte(c, 0), tiles * p.tile(c).bytes()});
    segments.push_back({p.tile_metadata_byte(c, 0), tiles * tile_metadata_bytes(p.groups(c))});
  }
  segments.push_back({p.scores, tiles * kTileTokens * 4});
  segments.push_back({p.positions, tiles * kTileTokens * 4});
  return segments;
}
void put_checksum(size_t first, std::vector<uint8_t>* out) {
  const uint64_t sum = xxh3(out->data() + first, out->size() - first);
  ByteWriter(out).u64(sum);
}

// All that must agree between the stores: not capacities, alphas or the score interval.
std::vector<uint8_t> config_bytes(const KvStoreConfig& config, const StoreView& s) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  const CacheLayout& layout = config.layout;
  for (const int32_t x :
       {layout.num_layers, layout.num_q_heads, layout.num_kv_heads, layout.head_dim,
        static_cast<int32_t>(layout.dtype), static_cast<int32_t>(layout.rope_applied)}) {
    w.i32(x);
  }
  w.f64(layout.rope_theta);
  w.f64(layout.sm_scale);
  for (const PageLayout& p : s.layouts) {
    for (const int32_t x :
         {p.k_tile.type.bits(), p.k_groups, p.v_tile.type.bits(), p.v_groups, p.tokens}) {
      w.i32(x);
    }
  }
  w.i32(config.policy.window_tokens);
  w.i32(config.policy.sink_tokens);
  return out;
}

uint64_t basis_identity(const KvStoreConfig& config) {
  return config.basis == nullptr ? 0 : config.basis->identity();
}

bool demote(const StoreView& s, int32_t from, int32_t to, const TokenCodes& token,
            TokenCodes* demoted) {
  const HostPage source = {nullptr, s.layouts[from], s.raw_dtype};
  const HostPage target = {nullptr, s.layouts[to], s.raw_dtype};
  for (const Component c : {Component::kKey, Component::kValue}) {
    float x[kMaxPageHeadDim];
    dequantize_side(source, c, token.of(c), x);
    if (quantize_side(target, c, x, &demoted->of(c)) != StatusCode::kOk) return false;
  }
  return true;
}

// Values that no rounding on any way down the formats takes out of fp16's range, 65504: what a
// format of a range makes of it lies in it, but for what fp16 rounds.
constexpr float kFarFromLimits = 16384;

bool is_far_from_limits(const PageLayout& p, DType raw_dtype, const TokenCodes& token) {
  for (const Component c : {Component::kKey, Component::kValue}) {
    const TokenCodes::Side& side = token.of(c);
    for (int32_t d = 0; d < p.head_dim() && p.tile(c).type.is_raw(); ++d) {
      const float x = raw_dtype == DType::kFloat16 ? half_to_float(side.codes[d])
                                                   : bfloat16_to_float(side.codes[d]);
      // Written so that it is false for what is not a number.
      if (!(x >= -kFarFromLimits && x <= kFarFromLimits)) return false;
    }
    const auto levels = static_cast<float>(p.tile(c).type.levels());
    for (int32_t g = 0; g < p.groups(c); ++g) {
      const float low = half_to_float(side.params[g].zero_point);
      const float high = low + levels * half_to_float(side.params[g].scale);
      if (!(low >= -kFarFromLimits && high <= kFarFromLimits)) return false;
    }
  }
  return true;
}

// Whether a step can take the token every way down the formats.
bool can_be_demoted(const StoreView& s, int32_t side, const TokenCodes& token) {
  if (is_far_from_limits(s.layouts[side], s.raw_dtype, token)) return true;
  TokenCodes high, low;
  if (side == kLowSide) return demote(s, kLowSide, kLowSide, token, &low);
  if (side == kHighSide) return demote(s, kHighSide, kLowSide, token, &low);
  return demote(s, kWindowSide, kHighSide, token, &high) &&
         demote(s, kHighSide, kLowSide, high, &low) &&
         demote(s, kWindowSide, kLowSide, token, &low);
}

bool is_finite_half(uint16_t bits) {
  return (bits & 0x7c00u) != 0x7c00u;
}

bool params_are_sound(const PageLayout& p, const TokenCodes& token) {
  for (const Component c : {Component::kKey, Component::kValue}) {
    for (int32_t g = 0; g < p.groups(c); ++g) {
      const QuantParams q = token.of(c).params[g];
      if ((q.scale & 0x8000u) != 0 || !is_finite_half(q.scale) || !is_finite_half(q.zero_point)) {
        return false;
      }
    }
  }
  return true;
}

bool is_unused(const PageLayout& p, const TokenCodes& token) {
  if (token.score != kNoScore || token.position != kNoPosition) return false;
  for (const Component c : {Component::kKey, Component::kValue}) {
    const TokenCodes::Side& side = token.of(c);
    for (int32_t d = 0; d < p.head_dim(); ++d) {
      if (side.codes[d] != 0) return false;
    }
    for (int32_t g = 0; g < p.groups(c); ++g) {
      if (!(side.params[g] == QuantParams{})) return false;
    }
  }
  return true;
}

// One row of an import while its tokens are checked.
struct RowCheck {
  const StoreView& s;
  const SequenceInfo& info;
  std::vector<int32_t> positions;  // of the high and low tokens
  std::vector<uint8_t> page;       // scratch
};

bool position_fits(const RowCheck& check, int32_t side, int32_t index, int32_t position) {
  if (side == kWindowSide) {
    return position == window_position(check.s.policy, check.info, index);
  }
  return position >= check.s.policy.sink_tokens && position < check.info.window_first;
}

Status check_page_tokens(RowCheck* check, int32_t side, int32_t first, int32_t used) {
  const StoreView& s = check->s;
  const HostPage page = {check->page.data(), s.layouts[side], s.raw_dtype};
  const int32_t tile_end = pages_for(used, kTileTokens) * kTileTokens;
  for (int32_t slot = 0; slot < tile_end; ++slot) {
    TokenCodes token;
    load_token(page, slot, &token);
    if (slot >= used) {
      if (!is_unused(page.layout, token)) return corrupt("an unused slot is not empty");
      continue;
    }
    if (!position_fits(*check, side, first + slot, token.position)) return corrupt("a position");
    if (!is_finite(token.score) || token.score < 0) return corrupt("a score");
    if (!params_are_sound(page.layout, token) || !can_be_demoted(s, side, token)) {
      return corrupt("a value that no tier can hold");
    }
    if (side != kWindowSide) check->positions.push_back(token.position);
  }
  return Status::ok();
}

Status check_row(const StoreView& s, const SequenceInfo& info, const ImportedRow& row) {
  RowCheck check = {s, info, {}, std::vector<uint8_t>(s.pages.page_bytes)};
  const uint8_t* packed = row.pages;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t per_page = s.page_tokens(side);
    for (int32_t first = 0; first < row.tokens.of[side]; first += per_page) {
      const int32_t used = smaller_of(per_page, row.tokens.of[side] - first);
      packed = unpack_page(s.layouts[side], packed, used, check.page.data());
      if (Status status = check_page_tokens(&check, side, first, used); !status) return status;
    }
  }
  std::sort(check.positions.begin(), check.positions.end());
  const auto twice = std::adjacent_find(check.positions.begin(), check.positions.end());
  return twice == check.positions.end() ? Status::ok() : corrupt("a position is there twice");
}

int64_t packed_row_bytes(const StoreView& s, const SideCounts& tokens) {
  int64_t bytes = 0;
  for (int32_t side = 0; side < kStoreSides; ++side) {
    const int32_t per_page = s.page_tokens(side), full = tokens.of[side] / per_page;
    bytes += full * packed_page_bytes(s.layouts[side], per_page) +
             packed_page_bytes(s.layouts[side], tokens.of[side] % per_page);
  }
  return bytes;
}

// The row at the reader.
Result<ImportedRow> read_row(const StoreView& s, const SequenceInfo& info, ByteReader* reader) {
  ByteReader header = *reader;
  ImportedRow row;
  for (int32_t side = 0; side < kStoreSides; ++side) row.tokens.of[side] = header.i32();
  if (!header.ok()) return corrupt("the bytes end early");
  if (!row_counts_fit(s, info, row.tokens)) return corrupt("token counts");
  const int64_t bytes = kRowHeaderBytes + packed_row_bytes(s, row.tokens);
  const uint8_t* begin = reader->take(static_cast<uint64_t>(bytes));
  const uint64_t sum = reader->u64();
  if (!reader->ok()) return corrupt("the bytes end early");
  if (xxh3(begin, static_cast<size_t>(bytes)) != sum) return corrupt("checksum");
  row.pages = begin + kRowHeaderBytes;
  return row;
}

// Reads up to the first row.
Result<SequenceInfo> read_header(const KvStoreConfig& config, const StoreView& s,
                                 const uint8_t* bytes, ByteReader* reader) {
  const size_t size = reader->left();
  if (reader->u32() != kMagic) return corrupt("not an exported sequence");
  if (const uint32_t version = reader->u32(); reader->ok() && version != kExportVersion) {
    return Status(StatusCode::kVersion, "version " + std::to_string(version));
  }
  const std::vector<uint8_t> expected = config_bytes(config, s);
  const uint8_t* found = reader->take(expected.size());
  const uint64_t basis = reader->u64();
  SequenceInfo info;
  info.num_tokens = reader->i32();
  info.window_first = reader->i32();
  info.window_origin = reader->i32();
  info.prompt_tokens = reader->i32();
  const size_t header_bytes = size - reader->left();
  const uint64_t sum = reader->u64();
  if (!reader->ok()) return corrupt("the bytes end early");
  if (xxh3(bytes, header_bytes) != sum) return corrupt("checksum of the header");
  if (!std::equal(expected.begin(), expected.end(), found)) {
    return Status(StatusCode::kInvalidArgument, "the sequence is of a store of another config");
  }
  if (basis != basis_identity(config)) {
    return Status(StatusCode::kInvalidArgument, "the sequence is of a store of another basis");
  }
  if (Status status = check_exported_info(config, info); !status) return status;
  return info;
}

}  // namespace

std::array<int32_t, kPageSegments> packed_segment_bytes(const PageLayout& layout, int32_t used) {
  std::array<int32_t, kPageSegments> bytes;
  const std::vector<Segment> segments = used_segments(layout, used);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = segments[i].bytes;
  return bytes;
}

int64_t packed_page_bytes(const PageLayout& layout, int32_t used) {
  int64_t bytes = 0;
  for (const int32_t n : packed_segment_bytes(layout, used)) bytes += n;
  return bytes;
}

Status check_exported_info(const KvStoreConfig& config, const SequenceInfo& info) {
  if (info.num_tokens < 0) return corrupt("tokens");
  if (info.num_tokens > config.max_tokens) {
    return Status(StatusCode::kOutOfRange, "the sequence exceeds max_tokens");
  }
  const TierPolicy& policy = config.policy;
  const int32_t first = ring_first(policy, info);
  const bool in_order = info.window_first >= 0 && info.window_first <= info.num_tokens &&
                        info.num_tokens - info.window_first <= policy.window_tokens &&
                        info.window_origin >= policy.sink_tokens && info.window_origin <= first &&
                        info.prompt_tokens >= 0 && info.prompt_tokens <= info.num_tokens;
  if (!in_order) return corrupt("the window is not where it can be");
  // A window that is not full has its tokens at the indices from 0 on.
  if (info.num_tokens - first < policy.window_tokens && info.window_origin != first) {
    return corrupt("the window has a gap");
  }
  return Status::ok();
}

bool row_counts_fit(const StoreView& s, const SequenceInfo& info, const SideCounts& tokens) {
  const int64_t high = tokens.of[kHighSide], low = tokens.of[kLowSide];
  return high >= 0 && low >= 0 &&
         high + low <= larger_of(0, info.window_first - s.policy.sink_tokens) &&
         tokens.of[kWindowSide] == window_side_tokens(s.policy, info);
}

std::vector<uint8_t> export_header(const KvStoreConfig& config, const StoreView& s,
                                   const SequenceInfo& info) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  w.u32(kMagic);
  w.u32(kExportVersion);
  const std::vector<uint8_t> fields = config_bytes(config, s);
  out.insert(out.end(), fields.begin(), fields.end());
  w.u64(basis_identity(config));
  w.i32(info.num_tokens);
  w.i32(info.window_first);
  w.i32(info.window_origin);
  w.i32(info.prompt_tokens);
  put_checksum(0, &out);
  return out;
}

void export_row(const StoreView& s, const RowPages& row, std::vector<uint8_t>* out) {
  const size_t first = out->size();
  ByteWriter w(out);
  for (int32_t side = 0; side < kStoreSides; ++side) w.i32(row.tokens.of[side]);
  for (int32_t side = 0; side < kStoreSides; ++side) {
    for (size_t i = 0; i < row.pages[side].size(); ++i) {
      const int32_t used = s.page_used(side, static_cast<int32_t>(i), row.tokens.of[side]);
      for (const Segment& segment : used_segments(s.layouts[side], used)) {
        const uint8_t* from = row.pages[side][i] + segment.first;
        out->insert(out->end(), from, from + segment.bytes);
      }
    }
  }
  put_checksum(first, out);
}

void export_packed_row(const SideCounts& tokens, const std::vector<uint8_t>& pages,
                       std::vector<uint8_t>* out) {
  const size_t first = out->size();
  ByteWriter w(out);
  for (int32_t side = 0; side < kStoreSides; ++side) w.i32(tokens.of[side]);
  out->insert(out->end(), pages.begin(), pages.end());
  put_checksum(first, out);
}

const uint8_t* unpack_page(const PageLayout& layout, const uint8_t* packed, int32_t used,
                           uint8_t* page) {
  for (const Segment& segment : used_segments(layout, used)) {
    std::copy_n(packed, segment.bytes, page + segment.first);
    packed += segment.bytes;
  }
  return packed;
}

Result<ImportedSequence> split_sequence(const KvStoreConfig& config, const StoreView& s,
                                        const uint8_t* bytes, size_t size) {
  if (bytes == nullptr) return Status(StatusCode::kInvalidArgument, "bytes is null");
  ByteReader reader(bytes, size);
  const Result<SequenceInfo> info = read_header(config, s, bytes, &reader);
  if (!info) return info.status();
  ImportedSequence sequence;
  sequence.info = *info;
  for (int32_t r = 0; r < s.rows_per_sequence(); ++r) {
    const Result<ImportedRow> row = read_row(s, *info, &reader);
    if (!row) return row.status().with_context("row " + std::to_string(r));
    sequence.rows.push_back(*row);
  }
  if (!reader.at_end()) return corrupt("bytes behind the last row");
  return sequence;
}

Result<ImportedSequence> read_sequence(const KvStoreConfig& config, const StoreView& s,
                                       const uint8_t* bytes, size_t size) {
  Result<ImportedSequence> sequence = split_sequence(config, s, bytes, size);
  if (!sequence) return sequence;
  for (size_t r = 0; r < sequence->rows.size(); ++r) {
    if (Status status = check_row(s, sequence->info, sequence->rows[r]); !status) {
      return status.with_context("row " + std::to_string(r));
    }
  }
  return sequence;
}

}  // namespace tierkv
