// The cold tier on dumps: every sequence is the prompt of a tiered store (K8V4 above K4V2, alpha_h
// = 1, nothing pruned, a window of 64, the dump's significance), then bytes and rates of its pages
// as they are, entropy coded, and in zstd frames, one a page, levels 1 and 3; JSON on stdout.
//
// Rates count the fp16 bytes of keys and values, per second of the core's time for one thread and
// of the clock for all. "Pages" is the work on pages alone: for ours counting, codebooks, coding,
// checksums and chunks; for zstd the frames. "save" and "load" are the whole calls, with
// export_sequence() and import_sequence(), which run on one thread.
//
// bench_cold [--repeats N] DUMP...
#include <zstd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bench/host/dump_layer.h"
#include "codec/host/parallel.h"
#include "store/cold/cold_format.h"
#include "store/cold/sequence_bytes.h"
#include "store/tiers/host_store.h"

namespace {

using namespace tierkv;
using Bytes = std::vector<uint8_t>;

int32_t repeats = 5;

// Seconds of the clock on the wall or, of one thread, of its core: others may be at work.
double now(int32_t threads) {
  timespec t;
  clock_gettime(threads == 1 ? CLOCK_PROCESS_CPUTIME_ID : CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
}

// Median seconds.
double time_of(int32_t threads, const std::function<bool()>& body) {
  std::vector<double> seconds;
  for (int32_t i = 0; i < repeats; ++i) {
    const double begin = now(threads);
    if (!body()) return 0;
    seconds.push_back(now(threads) - begin);
  }
  std::nth_element(seconds.begin(), seconds.begin() + repeats / 2, seconds.end());
  return seconds[repeats / 2];
}

KvStoreConfig store_config(const datasets::DumpInfo& info) {
  KvStoreConfig c;
  c.layout = info.layout;
  c.max_sequences = 2 * static_cast<int32_t>(info.sequences.size());
  c.max_tokens = 1;
  int64_t pages = 0;
  for (const auto& sequence : info.sequences) {
    c.max_tokens = std::max(c.max_tokens, static_cast<int32_t>(sequence.num_tokens));
    pages += (sequence.num_tokens + 63) / 64 * 4 + 8;
  }
  c.num_pages = static_cast<int32_t>(pages * c.layout.num_layers * c.layout.num_kv_heads);
  return c;
}

Result<SequenceId> fill(const datasets::DumpReader& dump, int32_t sequence, HostStore* store) {
  const CacheLayout& layout = dump.info().layout;
  const auto tokens = static_cast<int32_t>(dump.info().sequences[sequence].num_tokens);
  const Result<SequenceId> id = store->add_sequence();
  if (!id) return id;
  const SequenceList list = {&*id, 1};
  if (Status s = store->begin_prompt(list, tokens); !s) return s;
  for (int32_t layer = 0; layer < layout.num_layers; ++layer) {
    Bytes k, v;
    if (Status s = bench::read_layer(dump, sequence, layer, Component::kKey, &k); !s) return s;
    if (Status s = bench::read_layer(dump, sequence, layer, Component::kValue, &v); !s) return s;
    if (Status s = store->append({list, layer, tokens, k.data(), v.data()}); !s) return s;
    std::vector<float> all, head;
    for (int32_t h = 0; h < layout.num_kv_heads; ++h) {
      if (Status s = dump.read_significance(sequence, layer, h, &head); !s) return s;
      all.insert(all.end(), head.begin(), head.end());
    }
    if (Status s = store->score_prompt({list, layer, all.data(), tokens}); !s) return s;
  }
  if (Status s = store->end_prompt(list); !s) return s;
  return id;
}

// Where the pages of an export lie in it.
struct PackedPage {
  const uint8_t* bytes;
  size_t size;
};
std::vector<PackedPage> pages_of(const HostStore& store, const ImportedSequence& sequence) {
  std::vector<PackedPage> pages;
  for (const ImportedRow& row : sequence.rows) {
    const uint8_t* next = row.pages;
    for (int32_t side = 0; side < kStoreSides; ++side) {
      const int32_t per_page = store.view().page_tokens(side);
      for (int32_t left = row.tokens.of[side]; left > 0; left -= per_page) {
        const int64_t bytes =
            packed_page_bytes(store.view().layouts[side], smaller_of(left, per_page));
        pages.push_back({next, static_cast<size_t>(bytes)});
        next += bytes;
      }
    }
  }
  return pages;
}

struct Rates {
  size_t bytes = 0;
  double encode = 0, decode = 0, save = 0, load = 0;  // seconds
};

template <class T, size_t (*kFree)(T*)>
struct Free {
  void operator()(T* p) const { kFree(p); }
};

Rates zstd(const std::vector<PackedPage>& pages, int level, int32_t threads) {
  using Compressor = std::unique_ptr<ZSTD_CCtx, Free<ZSTD_CCtx, ZSTD_freeCCtx>>;
  using Decompressor = std::unique_ptr<ZSTD_DCtx, Free<ZSTD_DCtx, ZSTD_freeDCtx>>;
  const auto count = static_cast<int64_t>(pages.size());
  std::vector<Bytes> frames(pages.size()), back(pages.size());
  std::vector<size_t> sizes(pages.size());
  for (size_t i = 0; i < pages.size(); ++i) {
    frames[i].resize(ZSTD_compressBound(pages[i].size));
    back[i].resize(pages[i].size);
  }
  Rates rates;
  rates.encode = time_of(threads, [&] {
    parallel_for(count, threads, [&](int64_t i) {
      thread_local const Compressor context(ZSTD_createCCtx());
      sizes[i] = ZSTD_compressCCtx(context.get(), frames[i].data(), frames[i].size(),
                                   pages[i].bytes, pages[i].size, level);
    });
    return true;
  });
  rates.decode = time_of(threads, [&] {
    parallel_for(count, threads, [&](int64_t i) {
      thread_local const Decompressor context(ZSTD_createDCtx());
      ZSTD_decompressDCtx(context.get(), back[i].data(), back[i].size(), frames[i].data(),
                          sizes[i]);
    });
    return true;
  });
  for (size_t i = 0; i < pages.size(); ++i) {
    if (std::memcmp(back[i].data(), pages[i].bytes, pages[i].size) != 0) return {};
    rates.bytes += sizes[i];
  }
  return rates;
}

Rates ours(HostStore* store, SequenceId id, const Bytes& exported, bool coded, int32_t threads) {
  Rates rates;
  const KvStoreConfig config = cold_config(*store);
  const ColdOptions options = {coded, threads};
  const Bytes cold = *save_sequence(*store, id, options);
  rates.bytes = cold.size();
  ColdSequence sequence;
  rates.encode = time_of(
      threads, [&] { return cold_tiered_chunks(config, exported, options, &sequence).is_ok(); });
  const ContainerReader reader = std::move(*ContainerReader::from_bytes(cold, "cold"));
  rates.decode = time_of(threads, [&] {
    ColdChunks chunks(reader);
    const Result<Bytes> back = exported_tiered_sequence(config, sequence, threads, &chunks);
    return back.is_ok() && *back == exported;
  });
  rates.save = time_of(threads, [&] { return save_sequence(*store, id, options).is_ok(); });
  rates.load = time_of(threads, [&] {
    const Result<SequenceId> back = load_sequence(*store, cold.data(), cold.size(), threads);
    return back.is_ok() && store->release(*back).is_ok();
  });
  return rates;
}

void add(const Rates& from, Rates* to) {
  to->bytes += from.bytes;
  to->encode += from.encode;
  to->decode += from.decode;
  to->save += from.save;
  to->load += from.load;
}

void print_rate(const char* name, double bytes, double seconds) {
  if (seconds > 0) std::printf(",\"%s\":%.3f", name, bytes * 1e-9 / seconds);
}

constexpr const char* kCoders[] = {"as they are", "entropy coded", "zstd -1", "zstd -3"};

Status run(const char* path, bool first) {
  Result<datasets::DumpReader> dump = datasets::DumpReader::open(path);
  if (!dump) return dump.status();
  const datasets::DumpInfo& info = dump->info();
  auto store = HostStore::make(store_config(info));
  if (!store) return store.status();
  const int32_t cores = static_cast<int32_t>(std::max(1u, std::thread::hardware_concurrency()));
  Rates total[4][2];
  size_t exported_bytes = 0, page_bytes = 0, raw_bytes = 0, codes = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(info.sequences.size()); ++i) {
    const Result<SequenceId> id = fill(*dump, i, store->get());
    if (!id) return id.status();
    const Bytes exported = *(*store)->export_sequence(*id);
    const Result<ImportedSequence> rows =
        split_sequence((*store)->config(), (*store)->view(), exported.data(), exported.size());
    if (!rows) return rows.status();
    const std::vector<PackedPage> pages = pages_of(**store, *rows);
    exported_bytes += exported.size();
    codes += pages.size();
    for (const PackedPage& page : pages) page_bytes += page.size;
    raw_bytes += static_cast<size_t>((*store)->stats()->raw_bytes);
    for (int32_t many = 0; many < 2; ++many) {
      const int32_t threads = many == 0 ? 1 : cores;
      for (int32_t coder = 0; coder < 4; ++coder) {
        add(coder < 2 ? ours(store->get(), *id, exported, coder == 1, threads)
                      : zstd(pages, coder == 2 ? 1 : 3, threads),
            &total[coder][many]);
      }
    }
    if (Status s = (*store)->release(*id); !s) return s;
  }
  const char* name = std::strrchr(path, '/');
  std::printf("%s\n{\"dump\":\"%s\",\"fp16_bytes\":%zu,\"page_bytes\":%zu,\"pages\":%zu,\"rows\":[",
              first ? "" : ",", name == nullptr ? path : name + 1, raw_bytes, page_bytes, codes);
  for (int32_t i = 0; i < 8; ++i) {
    const Rates& r = total[i / 2][i % 2];
    std::printf("%s\n{\"pages\":\"%s\",\"threads\":%d,\"bytes\":%zu", i == 0 ? "" : ",",
                kCoders[i / 2], i % 2 == 0 ? 1 : cores, r.bytes);
    const auto bytes = static_cast<double>(raw_bytes);
    print_rate("encode_gbps", bytes, r.encode);
    print_rate("decode_gbps", bytes, r.decode);
    print_rate("save_gbps", bytes, r.save);
    print_rate("load_gbps", bytes, r.load);
    std::printf("}");
  }
  std::printf("]}");
  return exported_bytes > 0 ? Status::ok() : Status(StatusCode::kNotFound, "no sequences");
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<const char*> dumps;
  for (int i = 1; i < argc; ++i) {
    const bool option = std::strncmp(argv[i], "--", 2) == 0;
    if (!option) dumps.push_back(argv[i]);
    if (option && std::strcmp(argv[i], "--repeats") == 0 && i + 1 < argc) {
      repeats = std::max(1, std::atoi(argv[++i]));
    }
  }
  double load[1] = {0};
  (void)getloadavg(load, 1);
  std::printf("{\"repeats\":%d,\"load_avg\":%.1f,\"dumps\":[", repeats, load[0]);
  for (size_t i = 0; i < dumps.size(); ++i) {
    if (const Status s = run(dumps[i], i == 0); !s) {
      std::fprintf(stderr, "%s: %s\n", dumps[i], s.message().c_str());
      return 1;
    }
  }
  std::printf("]}\n");
  return 0;
}
