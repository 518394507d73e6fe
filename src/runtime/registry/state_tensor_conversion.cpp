#include "runtime/registry/state_tensor_conversion.h"

#include <torch/types.h>

#include <algorithm>

#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"

namespace tessera::state {
namespace {

using at::Tensor;

Tensor flat(const Tensor& tensor) {
  return tensor.view({-1});
}

/// Returns the tensor's memory as bytes, because some backends cannot send every dtype.
Tensor bytes_of(const Tensor& tensor) {
  return flat(tensor).view(at::kByte);
}

std::int64_t held_numel(const StateTensor& entry, int rank) {
  std::int64_t numel = 0;
  for (const Region& region : regions_of_rank(entry, rank)) numel += numel_of(region);
  return numel;
}

std::int64_t most_held(const StateTensor& entry, int num_ranks) {
  std::int64_t most = 0;
  for (int rank = 0; rank < num_ranks; ++rank) most = std::max(most, held_numel(entry, rank));
  return most;
}

}  // namespace

std::int64_t copy_common(const Shape& shape, const LocalShard& source, LocalShard& destination) {
  const CopyRuns runs(shape, source.region, destination.region);
  const Tensor from = flat(source.tensor);
  const Tensor to = flat(destination.tensor);
  runs.for_each_in({0, numel_of(destination.region)}, [&](const CopyRuns::Run& run) {
    to.narrow(0, run.destination_begin, run.numel)
        .copy_(from.narrow(0, run.source_begin, run.numel));
  });
  return runs.numel();
}

std::optional<Tensor> cut(const StateTensor& entry, const Region& region) {
  const std::int64_t numel = numel_of(region);
  const auto options = [&] {
    return entry.local_shards.empty()
               ? at::TensorOptions(scalar_type_of(entry.dtype))
               : entry.local_shards.front().tensor.options().requires_grad(false);
  };
  if (numel == 0) return torch::empty({0}, options());
  for (const LocalShard& local : entry.local_shards) {
    const CopyRuns runs(entry.shape, local.region, region);
    if (runs.num_runs() != 1 || runs.numel() != numel) continue;
    Tensor view;
    runs.for_each_in({0, numel}, [&](const CopyRuns::Run& run) {
      view = flat(local.tensor).narrow(0, run.source_begin, run.numel);
    });
    return view;
  }
  LocalShard wanted{region, torch::empty({numel}, options())};
  std::vector<bool> is_there(static_cast<std::size_t>(numel));
  for (const LocalShard& local : entry.local_shards) {
    copy_common(entry.shape, local, wanted);
    CopyRuns(entry.shape, local.region, region)
        .for_each_in({0, numel}, [&](const CopyRuns::Run& run) {
          std::fill_n(is_there.begin() + run.destination_begin, run.numel, true);
        });
  }
  if (std::ranges::find(is_there, false) != is_there.end()) return std::nullopt;
  return wanted.tensor;
}

bool have_same_elements(const Tensor& a, const Tensor& b) {
  const Tensor of_a = a.contiguous();
  const Tensor of_b = b.to(a.device()).contiguous();
  return torch::equal(bytes_of(of_a), bytes_of(of_b));
}

std::vector<Shard> layout_of_own_copies(const Shape& shape) {
  return {{whole_box(shape), {0}}};
}

std::vector<Region> regions_of_rank(const StateTensor& entry, int rank) {
  std::vector<Region> regions;
  if (entry.layout.empty()) regions.push_back(whole_box(entry.shape));
  for (const Shard& shard : entry.layout) {
    if (std::ranges::binary_search(shard.ranks, rank)) regions.push_back(shard.region);
  }
  return regions;
}

namespace {

/// Calls `visit(region, rank, offset)` for each region: `rank` is the first rank that holds it, and
/// `offset` is its position in that rank's elements. The order is the same on all ranks.
template <class Visit>
void for_each_first_holder(const StateTensor& entry, int num_ranks, const Visit& visit) {
  std::vector<Region> done;
  for (int rank = 0; rank < num_ranks; ++rank) {
    std::int64_t begin = 0;
    for (const Region& region : regions_of_rank(entry, rank)) {
      if (std::ranges::find(done, region) == done.end()) {
        visit(region, rank, begin);
        done.push_back(region);
      }
      begin += numel_of(region);
    }
  }
}

Tensor own_shard(const StateTensor& entry, const Region& region) {
  const auto own = cut(entry, region);
  TESSERA_CHECK(own.has_value());
  return *own;
}

/// Sends each shard of the tensor to rank 0, one by one. Returns the whole tensor on rank 0, an
/// undefined tensor on the other ranks.
Tensor gather_on_first(const StateTensor& entry, dist::Group& world, const std::string& fqn) {
  const auto options = at::TensorOptions(scalar_type_of(entry.dtype)).device(world.device());
  const bool is_first = world.rank() == 0;
  LocalShard whole{whole_box(entry.shape), {}};
  if (is_first) whole.tensor = torch::empty({numel_of(entry.shape)}, options);
  for_each_first_holder(entry, world.size(), [&](const Region& region, int rank, std::int64_t) {
    if (numel_of(region) == 0) return;
    if (!is_first) {
      if (rank == world.rank()) {
        world.send(bytes_of(own_shard(entry, region).to(world.device())), 0, fqn);
      }
      return;
    }
    Tensor shard;
    if (rank == 0) {
      shard = own_shard(entry, region);
    } else {
      shard = torch::empty({numel_of(region)}, options);
      world.receive(bytes_of(shard), rank, fqn);
    }
    copy_common(entry.shape, {region, shard}, whole);
  });
  return whole.tensor;
}

Tensor gather_on_all(const StateTensor& entry, dist::Group& world, const std::string& fqn) {
  const std::int64_t most = most_held(entry, world.size());
  const at::ScalarType dtype = scalar_type_of(entry.dtype);
  Tensor own = torch::empty({most}, at::TensorOptions(dtype).device(world.device()));
  std::int64_t end = 0;
  for (const LocalShard& each : entry.local_shards) {
    own.narrow(0, end, each.tensor.numel()).copy_(flat(each.tensor));
    end += each.tensor.numel();
  }
  Tensor all = torch::empty({most * world.size()}, own.options());
  world.all_gather(bytes_of(all), bytes_of(own), fqn).wait();
  LocalShard whole{whole_box(entry.shape), torch::empty({numel_of(entry.shape)}, own.options())};
  const auto take = [&](const Region& region, int rank, std::int64_t begin) {
    const Tensor shard = all.narrow(0, rank * most + begin, numel_of(region));
    copy_common(entry.shape, {region, shard}, whole);
  };
  for_each_first_holder(entry, world.size(), take);
  return whole.tensor;
}

}  // namespace

StateTensor gather(const StateTensor& entry, dist::Group& world, const StateDictOptions& options,
                   const std::string& fqn) {
  const at::NoGradGuard no_grad;
  const bool keeps = !options.rank0_only || world.rank() == 0;
  StateTensor whole = entry;
  whole.local_shards.clear();
  whole.layout.clear();
  const bool all_hold_all = std::ranges::all_of(entry.layout, [&](const Shard& shard) {
    return static_cast<int>(shard.ranks.size()) == world.size();
  });
  Tensor tensor;
  if (!all_hold_all) {
    tensor =
        options.rank0_only ? gather_on_first(entry, world, fqn) : gather_on_all(entry, world, fqn);
  } else if (keeps) {
    tensor = own_shard(entry, whole_box(entry.shape));
    if (tensor.is_cpu() || !options.offload_to_cpu) tensor = tensor.clone();
  }
  if (!keeps) return whole;
  if (options.offload_to_cpu) {
    tensor = tensor.to(at::kCPU);
  } else if (!entry.local_shards.empty()) {
    tensor = tensor.to(entry.local_shards.front().tensor.device());
  }
  whole.local_shards.push_back({whole_box(entry.shape), std::move(tensor)});
  return whole;
}

StateTensor as_asked(StateTensor entry, dist::Group& world, const StateDictOptions& options,
                     const std::string& fqn) {
  if (options.type == FULL) return gather(entry, world, options, fqn);
  if (options.offload_to_cpu) {
    for (LocalShard& local : entry.local_shards) local.tensor = local.tensor.to(at::kCPU);
  }
  if (options.type == LOCAL) entry.layout.clear();
  return entry;
}

void show_whole(StateDict& state_dict, const std::string& fqn, StateTensor entry,
                dist::Group& world, const StateDictOptions& options) {
  StateEntry* const found = state_dict.find(fqn);
  if (found == nullptr || std::holds_alternative<StateAlias>(*found)) return;
  std::get<StateTensor>(*found).local_shards.clear();  // frees the copy of the shard first
  entry.module_fqn = fqn;
  *found = as_asked(std::move(entry), world, options, fqn);
}

void show_local_shard(StateDict& state_dict, const std::string& fqn, const StateTensor& own,
                      const Tensor& parameter, LoadReport& report) {
  StateEntry* const entry = state_dict.find(fqn);
  if (entry == nullptr || std::holds_alternative<StateAlias>(*entry)) return;
  const StateTensor* const found = find_fitting(state_dict, fqn, own.dtype, own.shape, report);
  Tensor shard = torch::empty(parameter.sizes(), parameter.options().requires_grad(false));
  if (found != nullptr && !own.local_shards.empty() && shard.numel() > 0) {
    const Region& region = own.local_shards.front().region;
    if (const auto elements = cut(*found, region)) {
      shard = elements->view(shard.sizes()).to(shard.scalar_type());
    } else {
      report.add("hole", fqn, region_to_string(region), "shards that do not cover it");
    }
  }
  *entry = StateTensor::whole(shard);
}

void scatter(const StateTensor* whole, const StateTensor& wanted, dist::Group& world,
             const std::string& fqn) {
  const at::NoGradGuard no_grad;
  const bool is_on_all = wanted.layout == layout_of_own_copies(wanted.shape);
  const std::int64_t most = most_held(wanted, world.size());
  if (most == 0) return;
  const auto options = at::TensorOptions(scalar_type_of(wanted.dtype)).device(world.device());
  Tensor own = torch::empty({most}, options);
  Tensor all;
  if (world.rank() == 0) {
    all = torch::zeros({most * world.size()}, options);
    for (int rank = 0; rank < world.size(); ++rank) {
      std::int64_t begin = rank * most;
      for (const Region& region : regions_of_rank(wanted, is_on_all ? 0 : rank)) {
        const std::int64_t numel = numel_of(region);
        all.narrow(0, begin, numel).copy_(own_shard(*whole, region));
        begin += numel;
      }
    }
  }
  if (world.size() == 1) {
    own = all;
  } else {
    world.scatter(bytes_of(own), all.defined() ? bytes_of(all) : all, 0, fqn);
  }
  std::int64_t begin = 0;
  for (const LocalShard& each : wanted.local_shards) {
    const std::int64_t numel = each.tensor.numel();
    flat(each.tensor).copy_(own.narrow(0, begin, numel));
    begin += numel;
  }
}

}  // namespace tessera::state
