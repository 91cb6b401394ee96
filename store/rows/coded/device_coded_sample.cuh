// SPDX-License-Identifier: Apache-2.0
// What the host works out from the first tokens of a layer: means, steps, codebooks.
#pragma once

#include "store/rows/coded/device_coded_format.cuh"

namespace tierkv::store {

template <class Machine>
Status DeviceCodedRows<Machine>::prepare(const DeviceWorks& works, const HostPlan& host) {
  for (int32_t e = 0; works.moves != nullptr && e < works.entries(); ++e) {
    const bool makes_books = std::count(host.samples.begin(), host.samples.end(), e) > 0;
    const bool fits = std::count(host.fits.begin(), host.fits.end(), e) > 0;
    if (!makes_books && !fits) continue;
    if (Status s = sample(works, e, makes_books); !s) {
      return s.with_context("sequence " + std::to_string(works.moves[e].slot) + ", layer " +
                            std::to_string(works.moves[e].layer));
    }
  }
  if (host.hints.empty()) return Status::ok();
  return upload(hints_, host.hints);
}

// The first blocks of an entry come to the host.
template <class Machine>
Status DeviceCodedRows<Machine>::sample(const DeviceWorks& works, int32_t entry, bool makes_books) {
  const LayerMove& move = works.moves[entry];
  const int32_t i = entry / works.num_layers;
  DeviceWorks one = works;
  one.slots += i, one.from += entry, one.to += entry;
  one.count = one.num_layers = 1, one.first_layer = move.layer;
  if (one.chunk.k != nullptr) {
    const int64_t skip = int64_t{i} * one.chunk.tokens * heads() * head_dim();
    one.chunk.k += skip, one.chunk.v += skip;
    if (one.chunk.significance != nullptr) one.chunk.significance += i * heads() * one.chunk.stride;
  }
  Result<CodedCall> call = call_of(one, block_count(move.to.body_end));
  if (!call) return call.status();
  uint32_t* const hint = hints_ + config_.max_sequences * layers();
  call->hints = hint;
  if (Status s = machine_.upload(hint, &kFixesEntry, sizeof(kFixesEntry)); !s) return s;
  if (Status s = run(OpenEntries{*call}, 1, 1); !s) return s;
  const CellGroup group{0, least(kSampleBlocks, call->blocks)};
  if (Status s = load_group(*call, group); !s) return s;
  std::vector<CodedRows::BlockTokens> tokens(static_cast<size_t>(heads()) * group.cells);
  if (Status s = download_tokens(*call, move.to.body_end, &tokens); !s) return s;
  std::vector<WeightedRow> fitted;
  const int64_t record_bytes = device_.shape.row_byte(1) - device_.shape.row_byte(0);
  std::vector<uint8_t> records(static_cast<size_t>(heads() * record_bytes));
  for (int32_t h = 0; h < heads(); ++h) {
    std::vector<float> keys;
    for (int32_t b = 0; b < group.cells; ++b) {
      const std::vector<float>& of = tokens[h * group.cells + b].x[0];
      keys.insert(keys.end(), of.begin(), of.end());
    }
    Result<WeightedRow> row = host_->fit_row(move.layer, h, keys);
    const Status usable = row && per_slot_ ? weighted_key_channels(*row).status() : row.status();
    if (!usable) return usable.with_context("kv_head " + std::to_string(h));
    put_record(*row, records.data() + h * record_bytes);
    fitted.push_back(std::move(*row));
  }
  if (per_slot_) {
    if (Status uploaded = upload(records_, records); !uploaded) return uploaded;
    const MakeRowTables make{device_, records_, record_bytes, move.slot, 1, move.layer, 1};
    Status made = run(make, heads(), MakeRowTables::kThreads / kWarpLanes);
    if (!made) return made;
  }
  return makes_books ? make_books(move.layer, fitted, tokens) : Status::ok();
}

// Staged tokens of a call's only entry: [num_kv_heads, blocks].
template <class Machine>
Status DeviceCodedRows<Machine>::download_tokens(const CodedCall& call, int32_t body_end,
                                                 std::vector<CodedRows::BlockTokens>* tokens) {
  const size_t rows = tokens->size(), blocks = rows / heads();
  const size_t block = static_cast<size_t>(kBlockTokens) * head_dim();
  std::vector<uint16_t> x[2];
  std::vector<uint8_t> decided(rows * kBlockTokens * 4);
  for (const Component c : {Component::kKey, Component::kValue}) {
    std::vector<uint16_t>& of = x[static_cast<int32_t>(c)];
    of.resize(rows * block);
    const auto bytes = static_cast<int64_t>(2 * of.size());
    if (Status s = machine_.download(of.data(), call.staged(c, 0), bytes); !s) return s;
  }
  Status s = machine_.download(decided.data(), call.decided, static_cast<int64_t>(decided.size()));
  if (!s) return s;
  for (size_t i = 0; i < rows; ++i) {
    const auto b = static_cast<int32_t>(i % blocks);
    const size_t row = b * static_cast<size_t>(heads()) + i / blocks;
    CodedRows::BlockTokens& of = (*tokens)[i];
    of.first = device_.shape.first_of(b);
    of.count = CodedShape::end_of(b, body_end) - of.first;
    for (int32_t c = 0; c < 2; ++c) {
      const uint16_t* from = x[c].data() + row * block;
      for (int32_t n = 0; n < of.count * head_dim(); ++n) of.x[c].push_back(half_to_float(from[n]));
    }
    for (int32_t t = 0; t < of.count; ++t) {
      const uint8_t* word = decided.data() + (row * kBlockTokens + t) * 4;
      of.decided.push_back(
          DecidedExponents::of(word[0] | uint32_t{word[1]} << 8 | uint32_t{word[2]} << 16));
      of.importance.push_back(static_cast<int8_t>(of.decided.back().importance));
    }
  }
  return Status::ok();
}

template <class Machine>
Status DeviceCodedRows<Machine>::make_books(int32_t layer, const std::vector<WeightedRow>& rows,
                                            const std::vector<CodedRows::BlockTokens>& tokens) {
  std::vector<CodedRows::BlockCodes> samples(rows.size());
  LayerSample sample;
  const size_t blocks = tokens.size() / rows.size();
  for (size_t h = 0; h < rows.size(); ++h) {
    for (size_t b = 0; b < blocks; ++b) {
      CodedRows::BlockCodes codes;
      Status s = host_->quantize(rows[h], tokens[h * blocks + b], &codes);
      if (!s) return s.with_context("kv_head " + std::to_string(h));
      for (int32_t c = 0; c < 2; ++c) {
        samples[h].codes[c].insert(samples[h].codes[c].end(), codes.codes[c].begin(),
                                   codes.codes[c].end());
      }
    }
    for (int32_t c = 0; c < 2; ++c) {
      const auto count = static_cast<int64_t>(samples[h].codes[c].size()) / head_dim();
      sample.rows[c].push_back({samples[h].codes[c].data(), count});
    }
  }
  Result<LayerBooks> books = make_layer_books(host_->format(), head_dim(), sample);
  if (!books) return books.status();
  host_->set_books(layer, *books);
  Status s = upload_books(layer);
  return s ? upload_layers() : s;
}

}  // namespace tierkv::store
