// SPDX-License-Identifier: Apache-2.0
// decompress(): a container back into a dump.
//
// Without gzip the places of a layer's rows are known once HDF5 has created it, so that any number
// of threads decode and write rows around HDF5, in steps (step_log.h) and with one row's memory
// each.
#include <mutex>
#include <optional>

#include "codec/host/parallel.h"
#include "tools/container/container_file.h"
#include "tools/container/step_log.h"

namespace tierkv::analysis {
namespace {

// Significance and queries of the layer that was begun.
Status write_carried(const CarriedOver& carried, datasets::DumpWriter* writer) {
  for (size_t h = 0; h < carried.significance.size(); ++h) {
    const std::vector<float>& values = carried.significance[h];
    if (values.empty()) continue;
    const Status s = writer->write_significance(static_cast<int32_t>(h), values.data());
    if (!s) return s;
  }
  for (size_t q = 0; q < carried.queries.size(); ++q) {
    const Status s = writer->write_queries(static_cast<int32_t>(q), carried.queries[q].data());
    if (!s) return s;
  }
  return Status::ok();
}

Status begin_sequence(const CacheDecoder& decoder, int32_t seq, datasets::DumpWriter* writer) {
  const ContainerSequence& s = decoder.sequences()[seq];
  if (Status status = writer->begin_sequence(s.id, s.kind, s.tokens); !status) return status;
  return writer->annotate("compressed_by", decoder.model().preset);
}

Status begin_layer(const CarriedOver& carried, datasets::DumpWriter* writer) {
  return writer->begin_layer(carried.positions, !carried.significance[0].empty());
}

Status write_pruned(const DecodedRow& row, int32_t head, datasets::DumpWriter* writer) {
  return row.any_pruned ? writer->write_pruned(head, row.pruned.data()) : Status::ok();
}

// Through HDF5, one layer after the other.
Status write_layers(const CacheDecoder& decoder, const DecompressOptions& options,
                    datasets::DumpWriter* writer) {
  const auto write = [&](int32_t seq, int32_t layer, const DecodedRow* rows,
                         const CarriedOver& carried) {
    if (layer == 0) {
      if (Status s = begin_sequence(decoder, seq, writer); !s) return s;
    }
    if (Status s = begin_layer(carried, writer); !s) return s;
    for (int32_t h = 0; h < decoder.model().layout.num_kv_heads; ++h) {
      if (Status s = writer->write_row(h, Component::kKey, rows[h].k.data()); !s) return s;
      if (Status s = writer->write_row(h, Component::kValue, rows[h].v.data()); !s) return s;
      if (Status s = write_pruned(rows[h], h, writer); !s) return s;
    }
    return write_carried(carried, writer);
  };
  return decode_all(decoder, options.threads, write, options.progress);
}

enum Kind { kLoad, kBegin, kRow };

class RowWriter {
 public:
  RowWriter(const CacheDecoder& decoder, const DecompressOptions& options,
            datasets::DumpWriter* writer)
      : decoder_(decoder),
        options_(options),
        writer_(*writer),
        heads_(decoder.model().layout.num_kv_heads),
        layers_(int64_t{decoder.model().layout.num_layers} *
                static_cast<int64_t>(decoder.sequences().size())),
        log_(layers_),
        pending_(layers_) {}

  Status run() {
    parallel_for((layers_ + 2) * (2 + heads_), options_.threads,
                 [this](int64_t step) { take(step); });
    return log_.failure();
  }

 private:
  // What the begin of a layer needs, then what its rows need.
  struct Layer {
    CarriedOver carried;
    std::vector<DecodedRow> pruned;  // per kv_head, without keys and values
    std::vector<datasets::RowTarget> targets[2];
  };
  int32_t seq_of(int64_t i) const {
    return static_cast<int32_t>(i / decoder_.model().layout.num_layers);
  }
  int32_t layer_of(int64_t i) const {
    return static_cast<int32_t>(i % decoder_.model().layout.num_layers);
  }

  // Round r: what layer r carries, the begin of r - 1, the rows of r - 2.
  void take(int64_t step) {
    const int64_t round = step / (2 + heads_), rest = step % (2 + heads_);
    const Kind kind = rest == 0 ? kLoad : rest == 1 ? kBegin : kRow;
    const int64_t layer = round - static_cast<int64_t>(kind);
    if (layer < 0 || layer >= layers_) return;
    log_.take(step, [&] {
      const bool ready = kind == kLoad    ? true
                         : kind == kBegin ? log_.wait(step, kLoad, layer, 1) &&
                                                log_.wait(step, kBegin, layer - 1, 1)
                                          : log_.wait(step, kBegin, layer, 1);
      if (!ready) return Status::ok();
      const Status s = kind == kLoad    ? load(layer)
                       : kind == kBegin ? begin(layer)
                                        : write_row(layer, static_cast<int32_t>(rest - 2));
      if (s) log_.finish(kind, layer);
      return s;
    });
  }

  Status load(int64_t i) {
    Layer& l = pending_[i];
    l.pruned.resize(heads_);
    for (int32_t h = 0; h < heads_; ++h) {
      if (Status s = decoder_.read_pruned(seq_of(i), layer_of(i), h, &l.pruned[h]); !s) return s;
    }
    return read_carried(decoder_, seq_of(i), layer_of(i), &l.carried);
  }

  Status begin(int64_t i) {
    Layer& l = pending_[i];
    if (layer_of(i) == 0) {
      if (Status s = begin_sequence(decoder_, seq_of(i), &writer_); !s) return s;
    }
    if (Status s = begin_layer(l.carried, &writer_); !s) return s;
    for (int32_t h = 0; h < heads_; ++h) {
      for (const Component c : {Component::kKey, Component::kValue}) {
        Result<datasets::RowTarget> target = writer_.defer_row(h, c);
        if (!target) return target.status();
        l.targets[static_cast<int>(c)].push_back(std::move(target.value()));
      }
      if (Status s = write_pruned(l.pruned[h], h, &writer_); !s) return s;
    }
    const Status s = write_carried(l.carried, &writer_);
    l.carried = {};
    l.pruned.clear();
    return s;
  }

  Status write_row(int64_t i, int32_t head) {
    DecodedRow row = take_memory();
    Status s = decoder_.decode_row(seq_of(i), layer_of(i), head, &row);
    if (s) s = pending_[i].targets[0][head].write(row.k.data());
    if (s) s = pending_[i].targets[1][head].write(row.v.data());
    const std::lock_guard<std::mutex> lock(mutex_);
    memory_.push_back(std::move(row));
    ++rows_;
    if (options_.progress) {
      options_.progress(static_cast<double>(rows_) / static_cast<double>(layers_ * heads_));
    }
    return s;
  }

  DecodedRow take_memory() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (memory_.empty()) return {};
    DecodedRow row = std::move(memory_.back());
    memory_.pop_back();
    return row;
  }

  const CacheDecoder& decoder_;
  const DecompressOptions& options_;
  datasets::DumpWriter& writer_;
  int64_t heads_, layers_;
  StepLog log_;
  std::vector<Layer> pending_;
  std::mutex mutex_;  // of what follows
  std::vector<DecodedRow> memory_;
  int64_t rows_ = 0;
};

}  // namespace

Status decompress(const CacheDecoder& decoder, const DecompressOptions& options,
                  const std::string& path) {
  const ContainerModel& model = decoder.model();
  datasets::DumpInfo info;
  info.layout = model.layout;
  info.layout.dtype = options.dtype;
  info.model_id = model.model_id;
  info.created_by = model.created_by;
  info.rope = model.rope;
  Result<datasets::DumpWriter> writer =
      datasets::DumpWriter::create(path, info, {options.gzip_level});
  if (!writer) return writer.status();
  const Status s = options.gzip_level > 0 ? write_layers(decoder, options, &writer.value())
                                          : RowWriter(decoder, options, &writer.value()).run();
  if (!s) return s;
  return writer->finish(options.overwrite);
}

}  // namespace tierkv::analysis
