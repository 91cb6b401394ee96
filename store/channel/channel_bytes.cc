#include "store/channel/channel_bytes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "codec/file/container_format.h"
#include "codec/format/byte_cursor.h"
#include "tierkv/half.h"

namespace tierkv {
namespace {

constexpr uint32_t kMagic = 0x51455348;  // "HSEQ"
constexpr uint32_t kChannelExportVersion = 1;

Status corrupt(std::string why) {
  return Status(StatusCode::kCorrupt, std::move(why));
}

// All that must agree between the stores: not capacities.
std::vector<uint8_t> config_bytes(const KvStoreConfig& config) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  const CacheLayout& layout = config.layout;
  for (const int32_t x :
       {layout.num_layers, layout.num_q_heads, layout.num_kv_heads, layout.head_dim,
        static_cast<int32_t>(layout.dtype), static_cast<int32_t>(layout.rope_applied),
        config.policy.window_tokens, config.channel.k_bits, config.channel.v_bits,
        config.channel.block_tokens}) {
    w.i32(x);
  }
  w.f64(layout.rope_theta);
  w.f64(layout.sm_scale);
  return out;
}

// Sections of a string, each followed by the checksum of its bytes.
class CheckedReader {
 public:
  CheckedReader(const uint8_t* bytes, size_t size) : bytes_(bytes), size_(size), in_(bytes, size) {}

  ByteReader& in() { return in_; }
  void begin() { first_ = at(); }
  bool end() {
    const size_t stop = at();
    const uint64_t sum = in_.u64();
    return in_.ok() && sum == xxh3(bytes_ + first_, stop - first_);
  }

 private:
  size_t at() const { return size_ - in_.left(); }

  const uint8_t* bytes_;
  size_t size_, first_ = 0;
  ByteReader in_;
};

bool is_finite_half(const uint8_t* p) {
  return (static_cast<uint32_t>(p[0] | p[1] << 8) & 0x7c00u) != 0x7c00u;
}

// A scale, not negative, and the zero point.
bool are_params(const uint8_t* scale, const uint8_t* zero_point) {
  return is_finite_half(scale) && (scale[1] & 0x80) == 0 && is_finite_half(zero_point);
}

// Whatever its codes are, a block of finite parameters reads as finite values.
bool is_block(const ChannelLayout& l, const uint8_t* block) {
  const uint8_t* keys = block + l.k_metadata;
  for (int32_t d = 0; d < l.head_dim(); ++d) {
    if (!are_params(keys + channel_scale_byte(d), keys + channel_zero_point_byte(d))) return false;
  }
  for (int32_t t = 0; t < l.tokens; ++t) {
    const uint8_t* value = block + l.value_metadata_byte(t);
    if (!are_params(value, value + 2)) return false;
  }
  const uint8_t* end = block + l.v_metadata + 4 * l.tokens;
  return std::all_of(end, block + l.bytes, [](uint8_t byte) { return byte == 0; });
}

Status check_info(const KvStoreConfig& config, const SequenceInfo& info) {
  const int32_t block = config.channel.block_tokens;
  if (info.num_tokens < 0) return corrupt("tokens");
  if (info.num_tokens > config.max_tokens) {
    return Status(StatusCode::kOutOfRange, "the sequence exceeds max_tokens");
  }
  const bool possible = info.window_first >= 0 && info.window_first <= info.num_tokens &&
                        info.window_first % block == 0 &&
                        info.num_tokens - info.window_first < config.policy.window_tokens + block;
  return possible ? Status::ok() : corrupt("the raw tokens are not where they can be");
}

Status read_row(const ChannelLayout& l, const SequenceInfo& info, ByteReader* in,
                ChannelRowContent* row) {
  const int64_t blocks = info.window_first / l.tokens;
  const uint8_t* bytes = in->take(static_cast<uint64_t>(blocks * l.bytes));
  if (bytes == nullptr) return corrupt("a row is cut off");
  row->blocks.assign(bytes, bytes + blocks * l.bytes);
  for (int64_t b = 0; b < blocks; ++b) {
    if (!is_block(l, row->blocks.data() + b * l.bytes)) return corrupt("a block");
  }
  const int64_t values = int64_t{info.num_tokens - info.window_first} * l.head_dim();
  for (std::vector<uint16_t>& raw : row->raw) {
    const uint8_t* from = in->take(static_cast<uint64_t>(values) * 2);
    if (from == nullptr) return corrupt("a row is cut off");
    for (int64_t i = 0; i < values; ++i) {
      if (!is_finite_half(from + 2 * i)) return corrupt("a raw value");
      raw.push_back(static_cast<uint16_t>(from[2 * i] | from[2 * i + 1] << 8));
    }
  }
  return Status::ok();
}

}  // namespace

std::vector<uint8_t> channel_sequence_bytes(const KvStoreConfig& config,
                                            const ChannelSequence& sequence) {
  std::vector<uint8_t> out;
  ByteWriter w(&out);
  size_t first = 0;
  const auto put_checksum = [&] {
    w.u64(xxh3(out.data() + first, out.size() - first));
    first = out.size();
  };
  w.u32(kMagic);
  w.u32(kChannelExportVersion);
  const std::vector<uint8_t> same = config_bytes(config);
  out.insert(out.end(), same.begin(), same.end());
  w.i32(sequence.info.num_tokens);
  w.i32(sequence.info.window_first);
  put_checksum();
  for (const ChannelRowContent& row : sequence.rows) {
    out.insert(out.end(), row.blocks.begin(), row.blocks.end());
    for (const std::vector<uint16_t>& raw : row.raw) {
      for (const uint16_t x : raw) w.u16(x);
    }
    put_checksum();
  }
  return out;
}

Result<ChannelSequence> read_channel_sequence(const KvStoreConfig& config,
                                              const ChannelLayout& layout, const uint8_t* bytes,
                                              size_t size) {
  if (bytes == nullptr && size > 0) return Status(StatusCode::kInvalidArgument, "bytes is null");
  CheckedReader reader(bytes, size);
  ByteReader& in = reader.in();
  if (in.u32() != kMagic) return corrupt("not an exported channel-wise sequence");
  const uint32_t version = in.u32();
  if (!in.ok()) return corrupt("the header is cut off");
  if (version != kChannelExportVersion) {
    return Status(StatusCode::kVersion,
                  "channel-wise sequence of version " + std::to_string(version));
  }
  const std::vector<uint8_t> same = config_bytes(config);
  const uint8_t* found = in.take(same.size());
  if (found == nullptr) return corrupt("the header is cut off");
  if (!std::equal(same.begin(), same.end(), found)) {
    return Status(StatusCode::kInvalidArgument, "the sequence is of another config");
  }
  ChannelSequence sequence;
  sequence.info.num_tokens = in.i32();
  sequence.info.window_first = in.i32();
  sequence.info.window_origin = 0;
  sequence.info.prompt_tokens = sequence.info.window_first;
  if (!reader.end()) return corrupt("checksum of the header");
  if (Status s = check_info(config, sequence.info); !s) return s;
  sequence.rows.resize(static_cast<size_t>(config.layout.num_layers) * config.layout.num_kv_heads);
  for (ChannelRowContent& row : sequence.rows) {
    reader.begin();
    if (Status s = read_row(layout, sequence.info, &in, &row); !s) return s;
    if (!reader.end()) return corrupt("checksum of a row");
  }
  if (!in.at_end()) return corrupt("bytes behind the last row");
  return sequence;
}

}  // namespace tierkv
