// SPDX-License-Identifier: Apache-2.0
// Dumps whose attributes, shapes, types, filters, chunks and links are drawn from the input, built
// by HDF5 itself in memory and read through DumpReader. The files are sound HDF5, so whatever goes
// wrong is the reader's fault and not HDF5's, which is not hardened against malicious bytes.
//
// The first byte is the length of the choices that follow. What is left of the input patches the
// built image where that leaves it sound: values of attributes, elements and stored chunks.
// Building takes ten times as long as reading, so images are kept, and most mutations change
// patches only.
#include <hdf5.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "datasets/dump.h"
#include "tests/fuzz/hdf5_input.h"

namespace tierkv::datasets {
namespace {

void layer(Input& in, hid_t group, const CacheLayout& l, hsize_t tokens) {
  const Handle type = hdf5_type(l.dtype);
  const hsize_t heads = l.num_kv_heads, q_heads = l.num_q_heads, d = l.head_dim;
  dataset(in, group, "k", type.id(), {heads, tokens, d});
  dataset(in, group, "v", type.id(), {heads, tokens, d});
  if (in.one_in(2)) dataset(in, group, "significance", H5T_IEEE_F32LE, {heads, tokens});
  if (in.one_in(2)) return;
  const hsize_t queries = 1 + in.byte() % tokens;
  dataset(in, group, "q", type.id(), {q_heads, queries, d});
  dataset(in, group, "q_positions", H5T_STD_I32LE, {queries});
}

void build(Input& in, hid_t file) {
  CacheLayout l;
  l.num_layers = 1 + in.byte() % 2;
  l.num_kv_heads = 1 + in.byte() % 2;
  l.num_q_heads = l.num_kv_heads * (1 + in.byte() % 3);
  l.head_dim = 1 + in.byte() % 9;
  l.dtype = static_cast<DType>(in.byte() % 3);
  const Handle root(H5Gopen2(file, "/", H5P_DEFAULT));
  attribute_string(in, root.id(), "format", "kv-dump");
  attribute_int(in, root.id(), "format_version", 1);
  attribute_int(in, root.id(), "num_layers", l.num_layers);
  attribute_int(in, root.id(), "num_q_heads", l.num_q_heads);
  attribute_int(in, root.id(), "num_kv_heads", l.num_kv_heads);
  attribute_int(in, root.id(), "head_dim", l.head_dim);
  attribute_string(in, root.id(), "dtype", dtype_name(l.dtype));
  attribute_int(in, root.id(), "rope_applied", 1);
  attribute_double(in, root.id(), "rope_theta", 10000);
  attribute_double(in, root.id(), "sm_scale", 0.5);
  attribute_string(in, root.id(), "model_id", "fuzz");
  const Handle seq = create_group(file, "seq");
  const int sequences = 1 + in.byte() % 2;
  for (int s = 0; s < sequences; ++s) {
    std::string id(1, static_cast<char>('a' + s));
    if (in.one_in(16)) id += static_cast<char>(in.byte());
    const Handle group = create_group(seq.id(), id.c_str());
    const hsize_t tokens = 1 + in.byte() % 20;
    attribute_string(in, group.id(), "kind", "text");
    dataset(in, group.id(), "tokens", H5T_STD_I32LE, {tokens});
    const Handle layers = create_group(group.id(), "layer");
    for (int i = 0; i < l.num_layers; ++i) {
      if (in.one_in(32)) continue;
      const Handle g = create_group(layers.id(), std::to_string(i).c_str());
      layer(in, g.id(), l, in.one_in(32) ? tokens + 1 : tokens);
    }
  }
}

// Bytes of an image that may hold anything in sound HDF5.
struct Region {
  size_t begin, size;
};

struct Image {
  std::vector<char> bytes;
  std::vector<Region> regions;

  void add(uint64_t begin, uint64_t size) {
    if (size > 0 && begin < bytes.size() && size <= bytes.size() - begin) {
      regions.push_back({begin, size});
    }
  }
};

// The values of all attributes of a name, from the attribute messages of version 1 (HDF5 file
// format, IV.A.2.m): eight bytes with the sizes of the name, the type and the space, then these
// three padded to multiples of eight, then the value.
void add_attribute_values(const std::string& name, Image* image) {
  const std::string text = name + '\0';
  const auto u16 = [&](size_t at) {
    return static_cast<size_t>(static_cast<uint8_t>(image->bytes[at]) |
                               static_cast<uint8_t>(image->bytes[at + 1]) << 8);
  };
  const auto padded = [](size_t n) { return (n + 7) / 8 * 8; };
  for (size_t next = 0;;) {
    const auto* at = static_cast<const char*>(
        memmem(image->bytes.data() + next, image->bytes.size() - next, text.data(), text.size()));
    if (at == nullptr) return;
    const auto begin = static_cast<size_t>(at - image->bytes.data());
    next = begin + 1;
    if (begin < 8 || u16(begin - 8) != 1 || u16(begin - 6) != text.size()) continue;
    const size_t type = begin + padded(text.size());
    const size_t value = type + padded(u16(begin - 4)) + padded(u16(begin - 2));
    if (value > image->bytes.size()) continue;
    const bool in_heap = (image->bytes[type] & 15) == H5T_VLEN;  // a reference, not a value
    if (!in_heap) image->add(value, u16(type + 4));
  }
}

// The elements of a contiguous dataset, or its stored chunks.
extern "C" herr_t add_elements(hid_t group, const char* name, const H5O_info_t* info, void* data) {
  auto* image = static_cast<Image*>(data);
  if (info->type != H5O_TYPE_DATASET) return 0;
  const Handle d(H5Dopen2(group, name, H5P_DEFAULT)), space(H5Dget_space(d.id()));
  const haddr_t begin = H5Dget_offset(d.id());
  if (begin != HADDR_UNDEF) image->add(begin, H5Dget_storage_size(d.id()));
  hsize_t chunks = 0;
  if (H5Dget_num_chunks(d.id(), space.id(), &chunks) < 0) return 0;
  for (hsize_t i = 0; i < std::min<hsize_t>(chunks, 4); ++i) {
    hsize_t origin[4], size = 0;
    unsigned skipped = 0;
    haddr_t at = HADDR_UNDEF;
    // Where there are no filters HDF5 gives a chunk the room of its shape, whatever is stored.
    hsize_t room = 0;
    if (H5Dget_chunk_info(d.id(), space.id(), i, origin, &skipped, &at, &size) >= 0 &&
        H5Dget_chunk_storage_size(d.id(), origin, &room) >= 0 && at != HADDR_UNDEF) {
      image->add(at, std::min(size, room));
    }
  }
  return 0;
}

Image make_image(Input& in) {
  const Hdf5Lock lock;
  const Handle access(H5Pcreate(H5P_FILE_ACCESS));
  H5Pset_fapl_core(access.id(), 1 << 16, false);
  const Handle file(H5Fcreate("fuzz", H5F_ACC_TRUNC, H5P_DEFAULT, access.id()));
  build(in, file.id());
  H5Fflush(file.id(), H5F_SCOPE_GLOBAL);
  Image image;
  image.bytes.resize(std::max<ssize_t>(0, H5Fget_file_image(file.id(), nullptr, 0)));
  H5Fget_file_image(file.id(), image.bytes.data(), image.bytes.size());
  H5Ovisit2(file.id(), H5_INDEX_NAME, H5_ITER_INC, add_elements, &image, H5O_INFO_BASIC);
  for (const char* name :
       {"format", "format_version", "num_layers", "num_q_heads", "num_kv_heads", "head_dim",
        "dtype", "rope_applied", "rope_theta", "sm_scale", "model_id", "kind"}) {
    add_attribute_values(name, &image);
  }
  return image;
}

// The image of these choices, kept for the next input that makes them.
const Image& image_of(const std::string& choices) {
  static std::map<std::string, Image> kept;
  constexpr size_t kMost = 2048;
  if (const auto found = kept.find(choices); found != kept.end()) return found->second;
  if (kept.size() == kMost) kept.clear();
  Input in(reinterpret_cast<const uint8_t*>(choices.data()), choices.size());
  return kept.emplace(choices, make_image(in)).first->second;
}

// Three bytes a patch: the region, the place in it and the byte.
std::vector<char> patched(const Image& image, const uint8_t* patches, size_t size) {
  std::vector<char> bytes = image.bytes;
  for (size_t i = 0; i + 3 <= size && !image.regions.empty(); i += 3) {
    const Region& r = image.regions[patches[i] % image.regions.size()];
    bytes[r.begin + patches[i + 1] % r.size] = static_cast<char>(patches[i + 2]);
  }
  return bytes;
}

// What an opened dump promises must be what its reads deliver, of one head of one layer.
void read(const DumpReader& dump, uint8_t choice) {
  const DumpInfo& info = dump.info();
  if (!info.layout.validate()) std::abort();
  RowData row;
  std::vector<float> x;
  std::vector<int32_t> ids;
  const int32_t s = choice % static_cast<int32_t>(info.sequences.size());
  const int32_t l = choice / 2 % info.layout.num_layers;
  const int32_t h = choice / 4 % info.layout.num_kv_heads;
  const int64_t tokens = info.sequences[s].num_tokens;
  if (tokens < 1) std::abort();
  if (dump.read_tokens(s, &ids) && static_cast<int64_t>(ids.size()) != tokens) std::abort();
  for (const Component c : {Component::kKey, Component::kValue}) {
    if (dump.read_row(s, l, h, c, &row) &&
        static_cast<int64_t>(row.bytes.size()) !=
            tokens * info.layout.head_dim * dtype_bytes(row.dtype)) {
      std::abort();
    }
  }
  if (dump.read_significance(s, l, h, &x) && static_cast<int64_t>(x.size()) != tokens) {
    std::abort();
  }
  const int64_t queries = info.sequences[s].layers[l].num_queries;
  if (dump.read_query_positions(s, l, &ids) &&
      (static_cast<int64_t>(ids.size()) != queries || ids.back() >= tokens)) {
    std::abort();
  }
  if (dump.read_queries(s, l, 0, info.layout.num_q_heads, &x) &&
      static_cast<int64_t>(x.size()) != info.layout.num_q_heads * queries * info.layout.head_dim) {
    std::abort();
  }
}

}  // namespace
}  // namespace tierkv::datasets

#ifdef TIERKV_LIBFUZZER
extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

// Leaves the choices alone most of the time.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  const size_t kept = size == 0 ? 0 : std::min<size_t>(size, size_t{1} + data[0]);
  if (seed % 64 == 0 || kept == 0 || kept == max_size) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  data[0] = static_cast<uint8_t>(kept - 1);  // so that what is appended becomes no choice
  return kept + LLVMFuzzerMutate(data + kept, size - kept, max_size - kept);
}
#endif

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tierkv::datasets;
  // HDF5 keeps what it frees, so that not every file takes fresh memory.
  static const herr_t limits = H5set_free_list_limits(-1, -1, -1, -1, -1, -1);
  if (size == 0 || limits < 0) return 0;
  const size_t choices = std::min<size_t>(size - 1, data[0]);
  const Image& made = image_of(std::string(data + 1, data + 1 + choices));
  const std::vector<char> image = patched(made, data + 1 + choices, size - 1 - choices);
  const tierkv::Result<DumpReader> dump =
      DumpReader::open_image("fuzz", image.data(), image.size());
  if (dump) {
    read(*dump, data[size - 1]);
  } else if (dump.status().message().rfind("fuzz: ", 0) != 0) {
    std::abort();
  }
  return 0;
}
