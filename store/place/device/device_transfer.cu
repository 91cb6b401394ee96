// What a place in device memory tells of itself through host memory: usage, export and import.
#include <cuda_runtime.h>

#include <numeric>
#include <string>
#include <vector>

#include "gpu/cuda_device.cuh"
#include "store/place/device/device_place.h"

namespace tierkv::store {

Status DevicePlace::add_usage(const LayerMoves&, StoreUsage* usage) const {
  const PageAllocator& a = view_.pages.allocator;
  RingCursors cursors = {};
  int64_t least_free = 0;
  std::vector<PageRecord> records(static_cast<size_t>(a.shape.num_pages));
  if (Status s = copy(&cursors, a.ring.cursors, sizeof(cursors)); !s) return s;
  if (Status s = copy(&least_free, least_free_, sizeof(least_free)); !s) return s;
  const auto bytes = static_cast<int64_t>(records.size() * sizeof(PageRecord));
  if (Status s = copy(records.data(), a.records, bytes); !s) return s;
  if (Status s = wait(); !s) return s;
  usage->pages = a.shape.num_pages;
  usage->pages_free = cursors.end - cursors.start;
  usage->most_pages = a.shape.num_pages - least_free;
  usage->page_bytes = layout_.page_bytes;
  usage->slot_bytes = layout_.slot_bytes;
  for (const PageRecord& record : records) usage->pages_shared += record.reference_count > 1;
  return Status::ok();
}

Result<int64_t> DevicePlace::pages_of(int32_t slot) const {
  std::vector<SideCounts> pages(static_cast<size_t>(rows_per_sequence()));
  const SideCounts* from = view_.pages.allocator.pages + int64_t{slot} * rows_per_sequence();
  const auto bytes = static_cast<int64_t>(pages.size() * sizeof(SideCounts));
  if (Status s = copy(pages.data(), from, bytes); !s) return s;
  if (Status s = wait(); !s) return s;
  int64_t sum = 0;
  for (const SideCounts& row : pages) sum = std::accumulate(row.of, row.of + kMaxSides, sum);
  return sum;
}

Result<SequenceParts> DevicePlace::export_parts(const LayerMoves&) {
  return Status(StatusCode::kUnsupported, "export_sequence, in a store on a device");
}

Status DevicePlace::import_parts(int32_t, const SequenceParts&) {
  return Status(StatusCode::kUnsupported, "import_sequence, in a store on a device");
}

}  // namespace tierkv::store
