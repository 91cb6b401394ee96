// The host back end in a basis, by the plain forms of codec/host/basis.cc.
#pragma once

#include <memory>
#include <vector>

#include "store/tiers/basis_store.h"
#include "store/tiers/host_store.h"

namespace tierkv {

class HostBasisStore final : public BasisStore<KvStore, HostStore> {
 public:
  // The config has a basis.
  static Result<std::unique_ptr<HostBasisStore>> make(const KvStoreConfig& config);

  Status append(const AppendCall& call) override;
  Status attend(const AttendRequest& request) override;

 private:
  using BasisStore::BasisStore;
  // x of layout.dtype [vectors, num_kv_heads, head_dim].
  Result<std::vector<float>> coordinates(const void* x, Component c, const AppendCall& call) const;
  const Basis& row_basis(Component c, int32_t layer, int64_t head) const {
    return basis().of(c)[static_cast<size_t>(layer) * config_.layout.num_kv_heads + head];
  }
};

}  // namespace tierkv
