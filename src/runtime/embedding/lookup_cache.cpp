// The functions of Lookup for tables whose rows are cached on the device.
#include <torch/types.h>

#include <algorithm>

#include "runtime/embedding/lookup.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::embedding {
namespace {

/// Returns the ids of one output. They are in host memory.
std::span<const std::int64_t> ids_of(const LocalBags& bags, std::size_t output) {
  const std::int64_t begin = bags.output_begins[output];
  return {bags.host_ids.const_data_ptr<std::int64_t>() + begin,
          static_cast<std::size_t>(bags.output_begins[output + 1] - begin)};
}

}  // namespace

/// Calls `visit(looked, ids)` for each cached table. `ids`: all ids of the batch in this table.
template <class Visit>
void Lookup::for_cached(const LocalBags& bags, const Visit& visit) const {
  for (std::size_t i = 0; i < looked_.size(); ++i) {
    if (!looked_[i]->cache) continue;
    std::vector<std::int64_t> ids;
    for (std::size_t output = 0; output < table_of_feature_.size(); ++output) {
      if (table_of_feature_[output] != static_cast<int>(i)) continue;
      const auto of_output = ids_of(bags, output);
      ids.insert(ids.end(), of_output.begin(), of_output.end());
    }
    visit(i, ids);
  }
}

bool Lookup::has_caches() const {
  return std::ranges::any_of(looked_,
                             [](const LocalTable* table) { return table->cache != nullptr; });
}

void Lookup::check_room(const LocalBags& bags) const {
  for_cached(bags, [&](std::size_t looked, std::span<const std::int64_t> ids) {
    looked_[looked]->cache->check_room(ids);
  });
}

ResidentBags Lookup::fetch(const LocalBags& bags) {
  ResidentBags resident{bags, {}, {}};
  if (!has_caches()) return resident;
  at::Tensor all = pinned(bags.host_ids.sizes(), at::kLong);
  all.copy_(bags.host_ids);
  auto* const to = all.mutable_data_ptr<std::int64_t>();
  for_cached(bags, [&](std::size_t looked, std::span<const std::int64_t> ids) {
    std::vector<std::int64_t> slots(ids.size());
    looked_[looked]->cache->fetch(ids, slots);
    auto next = slots.begin();
    for (std::size_t output = 0; output < table_of_feature_.size(); ++output) {
      if (table_of_feature_[output] != static_cast<int>(looked)) continue;
      const auto num_ids = static_cast<std::ptrdiff_t>(ids_of(bags, output).size());
      std::copy(next, next + num_ids, to + bags.output_begins[output]);
      next += num_ids;
    }
    resident.slots.push_back(std::move(slots));
    resident.generations.push_back(looked_[looked]->cache->generation());
  });
  resident.bags.ids = all.to(device_, /*non_blocking=*/true);
  return resident;
}

void Lookup::keep(ResidentBags& resident, const LocalBags& bags) {
  bool has_all = true;
  std::size_t next = 0;
  for (const LocalTable* const table : looked_) {
    if (table->cache) has_all &= table->cache->generation() == resident.generations[next++];
  }
  if (!has_all) resident = fetch(bags);
}

void Lookup::mark_changed(const ResidentBags& resident) {
  std::size_t next = 0;
  for (const LocalTable* const table : looked_) {
    if (table->cache) table->cache->mark_changed(resident.slots[next++]);
  }
}

}  // namespace tessera::embedding
