// decompress(): a container back into a dump.
#include "tools/analysis/container_file.h"

namespace tierkv::analysis {
namespace {

Status write_layer(const DecodedRow* rows, const CarriedOver& carried,
                   datasets::DumpWriter* writer) {
  const bool significance = !carried.significance[0].empty();
  if (Status s = writer->begin_layer(carried.positions, significance); !s) return s;
  for (size_t h = 0; h < carried.significance.size(); ++h) {
    const auto head = static_cast<int32_t>(h);
    if (Status s = writer->write_row(head, Component::kKey, rows[h].k.data()); !s) return s;
    if (Status s = writer->write_row(head, Component::kValue, rows[h].v.data()); !s) return s;
    if (rows[h].any_pruned) {
      if (Status s = writer->write_pruned(head, rows[h].pruned.data()); !s) return s;
    }
    if (!significance) continue;
    if (Status s = writer->write_significance(head, carried.significance[h].data()); !s) return s;
  }
  for (size_t q = 0; q < carried.queries.size(); ++q) {
    const auto head = static_cast<int32_t>(q);
    if (Status s = writer->write_queries(head, carried.queries[q].data()); !s) return s;
  }
  return Status::ok();
}

}  // namespace

Status decompress(const CacheDecoder& decoder, const DecompressOptions& options,
                  const std::string& path) {
  const ContainerModel& model = decoder.model();
  datasets::DumpInfo info;
  info.layout = model.layout;
  info.layout.dtype = options.dtype;
  info.model_id = model.model_id;
  info.created_by = model.created_by;
  Result<datasets::DumpWriter> writer =
      datasets::DumpWriter::create(path, info, {options.gzip_level});
  if (!writer) return writer.status();
  const auto write = [&](int32_t seq, int32_t layer, const DecodedRow* rows,
                         const CarriedOver& carried) {
    if (layer == 0) {
      const ContainerSequence& s = decoder.sequences()[seq];
      if (Status status = writer->begin_sequence(s.id, s.kind, s.tokens); !status) return status;
      if (Status status = writer->annotate("compressed_by", model.preset); !status) return status;
    }
    return write_layer(rows, carried, &writer.value());
  };
  if (Status s = decode_all(decoder, options.threads, write, options.progress); !s) return s;
  return writer->finish();
}

}  // namespace tierkv::analysis
