// The codebooks of a coded store: a list per layer and component, of one for that layer or of a
// given family. A block names its codebook by table id.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "codec/format/codebook.h"
#include "tierkv/store.h"

namespace tierkv {

class CodedBooks {
 public:
  // The given family; without one, not ready. The config is valid.
  static CodedBooks of_config(const KvStoreConfig& config);
  // Of histograms [num_layers][2], keys first: one codebook per layer and component.
  static Result<CodedBooks> of_histograms(const KvStoreConfig& config,
                                          const std::vector<CodeHistogram>& histograms);
  // Of codebooks [num_layers][2] lists.
  static CodedBooks of_lists(std::vector<std::vector<Codebook>> lists);

  bool ready() const { return !lists_.empty(); }
  const std::vector<Codebook>& of(int32_t layer, Component c) const {
    return lists_[2 * static_cast<size_t>(layer) + static_cast<size_t>(c)];
  }
  // Serialised, each codebook once.
  int64_t stored_bytes() const;

  // codes: [kBlockTokens, head_dim]. Appends the smallest of the encodings; of equal ones the
  // first.
  void encode(const int16_t* codes, int32_t head_dim, int32_t layer, Component c,
              std::vector<uint8_t>* out) const;
  // The inverse, for any bytes: kCorrupt with what is wrong, and then codes are zeros.
  Status decode(const uint8_t* bytes, int64_t size, int32_t head_dim, int32_t layer, Component c,
                int16_t* codes) const;

  friend bool operator==(const CodedBooks& a, const CodedBooks& b);

 private:
  bool shared_ = false;                       // every layer has the same lists
  std::vector<std::vector<Codebook>> lists_;  // [num_layers][2]
};

}  // namespace tierkv
