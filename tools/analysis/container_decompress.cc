// decompress(): a container back into a dump.
#include "tools/analysis/container_file.h"

namespace tierkv::analysis {
namespace {

Status write_layer(const std::vector<DecodedRow>& rows, const CarriedOver& carried,
                   datasets::DumpWriter* writer) {
  const bool significance = !carried.significance[0].empty();
  if (Status s = writer->begin_layer(carried.positions, significance); !s) return s;
  for (size_t h = 0; h < rows.size(); ++h) {
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

Status decompress(const CacheDecoder& decoder, DType dtype, int32_t threads,
                  const std::string& path, const std::function<void(double)>& progress) {
  const ContainerModel& model = decoder.model();
  datasets::DumpInfo info;
  info.layout = model.layout;
  info.layout.dtype = dtype;
  info.model_id = model.model_id;
  info.created_by = model.created_by;
  Result<datasets::DumpWriter> writer = datasets::DumpWriter::create(path, info);
  if (!writer) return writer.status();
  const auto sequences = static_cast<int32_t>(decoder.sequences().size());
  const int32_t layers = model.layout.num_layers;
  for (int32_t seq = 0; seq < sequences; ++seq) {
    const ContainerSequence& s = decoder.sequences()[seq];
    if (Status status = writer->begin_sequence(s.id, s.kind, s.tokens); !status) return status;
    if (Status status = writer->annotate("compressed_by", model.preset); !status) return status;
    for (int32_t layer = 0; layer < layers; ++layer) {
      std::vector<DecodedRow> rows(model.layout.num_kv_heads);
      CarriedOver carried;
      if (Status status = decode_layer(decoder, seq, layer, threads, &rows); !status) return status;
      if (Status status = read_carried(decoder, seq, layer, &carried); !status) return status;
      if (Status status = write_layer(rows, carried, &writer.value()); !status) return status;
      if (progress) progress((seq * layers + layer + 1.0) / (sequences * layers));
    }
  }
  return writer->finish();
}

}  // namespace tierkv::analysis
