// SPDX-License-Identifier: Apache-2.0
// tkv_compress and tkv_decompress.
#include "capi/dumps/files.h"
#include "codec/file/output_file.h"
#include "tools/container/container_file.h"

namespace tierkv::capi {
namespace {

Status run_compress(const char* dump, const char* container, tkv_compress_options* options) {
  tkv_compress_options o;
  if (Status s = read_struct(options, "options", &o); !s) return s;
  if (container == nullptr) return invalid("container is null");
  analysis::CompressOptions c;
  if (Status s = read_threads(o.threads, &c.threads); !s) return s;
  Result<analysis::Preset> preset = read_preset(o.preset);
  if (!preset) return preset.status();
  c.preset = std::move(*preset);
  c.overwrite = o.overwrite != 0;
  c.without_queries = o.without_queries != 0;
  const Result<std::optional<Profile>> profile = open_profile(o.profile);
  if (!profile) return profile.status();
  if (profile->has_value()) c.profile = &profile->value();
  Result<std::function<void(double)>> progress = read_progress(o.progress);
  if (!progress) return progress.status();
  c.progress = std::move(*progress);
  Result<std::vector<datasets::DumpReader>> readers = open_dumps(&dump, 1);
  if (!readers) return readers.status();
  const std::string profile_path = o.profile == nullptr ? "" : o.profile;
  if (Status s = check_output(container, o.overwrite != 0, {dump, profile_path}); !s) return s;
  const Result<analysis::CompressSummary> summary =
      analysis::compress(readers->front(), c, container);
  if (!summary) return summary.status();
  o.values = summary->values;
  o.file_bytes = summary->file_bytes;
  o.carried_bytes = summary->query_bytes;
  static_assert(sizeof(o.tokens) == sizeof(summary->tokens));
  std::memcpy(o.tokens, summary->tokens, sizeof(o.tokens));
  write_struct(o, options);
  return Status::ok();
}

Status run_decompress(const char* container, const char* dump,
                      const tkv_decompress_options* options) {
  tkv_decompress_options o;
  analysis::DecompressOptions d;
  if (Status s = read_struct(options, "options", &o); !s) return s;
  if (container == nullptr || dump == nullptr) return invalid("container or dump is null");
  if (Status s = read_threads(o.threads, &d.threads); !s) return s;
  if (o.gzip_level < 0 || o.gzip_level > 9) return invalid("gzip_level must be 0 to 9");
  bool convert = false;
  if (Status s = read_flag(o.convert, "convert", &convert); !s) return s;
  if (o.dtype < TKV_FLOAT16 || o.dtype > TKV_FLOAT32) return invalid("dtype is unknown");
  Result<std::function<void(double)>> progress = read_progress(o.progress);
  if (!progress) return progress.status();
  Result<ContainerReader> reader = ContainerReader::open(container);
  if (!reader) return reader.status();
  const Result<CacheDecoder> decoder = CacheDecoder::open(std::move(*reader));
  if (!decoder) return decoder.status();
  if (Status s = check_output(dump, o.overwrite != 0, {container}); !s) return s;
  d.dtype = convert ? static_cast<DType>(o.dtype) : decoder->model().layout.dtype;
  d.overwrite = o.overwrite != 0;
  d.gzip_level = o.gzip_level;
  d.progress = std::move(*progress);
  return analysis::decompress(*decoder, d, dump);
}

}  // namespace
}  // namespace tierkv::capi

extern "C" {

tkv_status tkv_compress(const char* dump, const char* container, tkv_compress_options* options,
                        tkv_error* error) {
  return tierkv::capi::guarded(
      error, [&] { return tierkv::capi::run_compress(dump, container, options); });
}

tkv_status tkv_decompress(const char* container, const char* dump,
                          const tkv_decompress_options* options, tkv_error* error) {
  return tierkv::capi::guarded(
      error, [&] { return tierkv::capi::run_decompress(container, dump, options); });
}

}  // extern "C"
