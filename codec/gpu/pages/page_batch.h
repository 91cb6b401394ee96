// Many pages at once: tokens of keys and values into unified pages, and back, by one kernel each.
// The bytes are those of codec/host/page_codec.h.
//
// What is wrong with a token is reported in the status of its row: the slots before first_slot then
// keep their bytes, those from first_slot on are not defined. A warp works on a tile: it copies the
// rows to shared memory, reads them from there as tensor-core fragments, and then every lane holds
// the values of the words it stores.
//
// Bound: memory. A token of head_dim 128 reads 512 bytes of fp16 and 8 of score and position, and
// writes 208 (K8V4) or 112 (K4V2), metadata, score and position included.
#pragma once

#include <cstdint>

#include "codec/format/page_layout.h"
#include "tierkv/layout.h"
#include "tierkv/page.h"
#include "tierkv/status.h"

struct CUstream_st;

namespace tierkv {

using GpuStream = CUstream_st*;  // a cudaStream_t

inline constexpr int32_t kMaxPageFormats = 4;
inline constexpr int32_t kVectorBytes = 16;  // of the kernels' loads and stores

// The formats that the pages of a batch may have, all of one head_dim.
struct PageFormats {
  PageLayout layout[kMaxPageFormats] = {};
  int32_t count = 0;
  DType raw_dtype = DType::kFloat16;  // of raw components: kFloat16 or kBFloat16
  // How steps of keys and of values are found: kMinMax, or kNorm where codes have 2 bits. Decoding
  // needs neither.
  StepRule rule[kMaxPageFormats][2] = {};

  TKV_HD StepRule rule_of(int32_t format, Component c) const {
    return rule[format][static_cast<int32_t>(c)];
  }
  bool has_norm() const;
  // kInvalidArgument: no format or too many, a layout that is not one of ours or larger than
  // page_bytes, head_dims that differ, pages with and without records, a rule that no page of these
  // bits has, a bad raw_dtype.
  Status validate(int64_t page_bytes) const;
};

// `count` tokens in slots first_slot.. of a page. Token i of the job is token t(i) of its row:
// order[first + i], or first + i where the batch has no order.
struct alignas(16) PageJob {
  int64_t input = 0;    // element of token 0 of the row in k and v; its address is 16-byte aligned
  int64_t scalars = 0;  // element of token 0 of the row in scores and positions
  int64_t first = 0;    // of the job's tokens
  int32_t page = 0;     // id in the pool
  int32_t format = 0;   // index into the formats
  int32_t row = 0;      // whose status it reports to
  int32_t first_slot = 0;  // slots before it are in use and are kept
  int32_t count = 0;       // 0: nothing is done
};

// What encoding and decoding have in common. Pointers are all in host memory or all in device
// memory. Jobs are checked where they run; that their tokens lie inside the arrays is the caller's
// promise.
struct PageBatch {
  PageView pool;
  PageFormats formats;
  const PageJob* jobs = nullptr;      // [num_jobs], no page twice
  const int32_t* num_used = nullptr;  // [1] jobs in use, at most num_jobs; null: all
  const int32_t* order = nullptr;     // see PageJob, or null
  StatusCode* status = nullptr;       // [num_rows], kOk before; of several failures the greatest
  int64_t token_stride = 0;           // elements from a token to the next, a multiple of 16 bytes
  int32_t num_jobs = 0;
  int32_t num_rows = 0;
  DType dtype = DType::kFloat16;  // of k and v

  // kInvalidArgument naming the field. Reads no array.
  Status validate() const;
};

struct PageEncode {
  PageBatch batch;
  const void* k = nullptr;        // dtype, 16-byte aligned: token t of a job at job.input + t *
  const void* v = nullptr;        // token_stride, head_dim elements
  const float* scores = nullptr;  // token t at job.scalars + t; finite; null without records
  const int32_t* positions = nullptr;  // likewise, not negative; null: token t is at position t

  Status validate() const;
};

// Tokens are written where PageEncode reads them; null arrays are skipped, and so are scores and
// positions of pages without records.
struct PageDecode {
  PageBatch batch;
  void* k = nullptr;  // kFloat16 saturates as in TokenOutput
  void* v = nullptr;
  float* scores = nullptr;
  int32_t* positions = nullptr;

  Status validate() const;
};

// What a row's status says: kInvalidArgument for a job that names a page, format, slots or an
// alignment that is not there (a row that is not there is reported in row 0), for tokens and
// positions below 0 or above 2^31 - 1; kNonFinite for keys, values or scores; kOutOfRange for keys
// or values that the format cannot hold. The greatest code that one of the row's tokens, keys or
// values earns.
//
// One kernel each, no allocation, no synchronisation. kUnsupported when the tokens of one tile do
// not fit into the device's shared memory, kCuda when a launch fails.
Status encode_pages(const PageEncode& e, GpuStream stream);
Status decode_pages(const PageDecode& d, GpuStream stream);

// kOk, or what is wrong with the job's numbers.
TKV_HD StatusCode check_job(const PageBatch& b, const PageJob& job) {
  const bool known = job.format >= 0 && job.format < b.formats.count && job.page >= 0 &&
                     job.page < b.pool.num_pages && job.row >= 0 && job.row < b.num_rows;
  if (!known || job.count < 0 || job.first_slot < 0) return StatusCode::kInvalidArgument;
  const int32_t tokens = b.formats.layout[job.format].tokens;
  if (job.first_slot > tokens || job.count > tokens - job.first_slot) {
    return StatusCode::kInvalidArgument;
  }
  const int64_t elements = kVectorBytes / dtype_bytes(b.dtype);
  return job.input < 0 || job.input % elements != 0 || job.scalars < 0
             ? StatusCode::kInvalidArgument
             : StatusCode::kOk;
}

}  // namespace tierkv
