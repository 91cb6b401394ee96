// Attention of the host back end: in double over all that a row decodes to.
#include <vector>

#include "codec/format/element.h"
#include "store/coded/coded_fixed.h"
#include "store/coded/coded_host.h"
#include "store/shared/double_attention.h"

namespace tierkv {
namespace {

// One component of all tokens of a row, [num_tokens, head_dim], the mean added back.
Status read_row(const CodedView& s, const CodedBooks& books, int32_t row, Component c, float step,
                std::vector<double>* x) {
  const SequenceInfo& info = s.infos[row / s.rows_per_sequence()];
  const bool prompt = info.window_origin == kInPrompt;
  const float* mean = s.means(c, row);
  std::vector<int16_t> codes(static_cast<size_t>(kBlockTokens) * s.head_dim);
  x->clear();
  std::vector<uint16_t> fixed(codes.size());
  for (int32_t b = 0; b < info.window_first / kBlockTokens; ++b) {
    if (is_fixed_block(s, row, b)) {
      if (Status status = read_block_values(s, books, row, c, b, fixed.data()); !status) {
        return status;
      }
      for (size_t i = 0; i < fixed.size(); ++i) {
        x->push_back(double{half_to_float(fixed[i])} + mean[i % s.head_dim]);
      }
      continue;
    }
    if (Status status = read_block(s, books, row, c, b, codes.data()); !status) return status;
    for (size_t i = 0; i < codes.size(); ++i) {
      x->push_back(static_cast<double>(step) * codes[i] + mean[i % s.head_dim]);
    }
  }
  std::vector<uint16_t> raw(s.head_dim);
  for (int32_t p = info.window_first; p < info.num_tokens; ++p) {
    get_raw_token(s, row, info, c, p, raw.data());
    for (int32_t d = 0; d < s.head_dim; ++d) {
      x->push_back(double{half_to_float(raw[d])} + (prompt ? 0.0 : mean[d]));
    }
  }
  return Status::ok();
}

}  // namespace

Status CodedHostStore::attend(const AttendRequest& request) {
  const Result<Slots> slots = table_.admit_attend(request);
  if (!slots) return slots.status();
  if (Status s = validate_coded_request(request); !s) return s;
  return attend_in_double(
      config_, request, *slots,
      [&](int32_t slot, int32_t kv_head, std::vector<double>* k, std::vector<double>* v) {
        const int32_t at = view_.row_of(slot, request.layer, kv_head);
        for (const Component c : {Component::kKey, Component::kValue}) {
          std::vector<double>* x = c == Component::kKey ? k : v;
          if (Status s = read_row(view_, books_, at, c, view_.step(c, at), x); !s) return s;
        }
        return Status::ok();
      });
}

}  // namespace tierkv
