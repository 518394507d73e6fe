#include "runtime/state/configurations.h"

namespace tessera::test {

dist::MeshOptions Configuration::mesh_options() const {
  dist::MeshOptions options;
  if (is_hybrid()) options.axes = {{"replicate", num_replicas}, {"shard", -1}};
  return options;
}

std::string Configuration::name() const {
  std::string name;
  if (kind == Kind::replicated) {
    name = "replicate";
  } else {
    name = std::string(to_string(strategy));
    if (is_hybrid()) {
      name += "_" + std::to_string(num_replicas) + "x" + std::to_string(world_size / num_replicas);
    }
    if (kind == Kind::tied_head_apart) name += "_with_tied_head_apart";
    if (kind == Kind::replicated_inside) name += "_around_replicate";
  }
  return name + "_on_" + std::to_string(world_size);
}

void Configuration::apply(Transformer& model, const dist::Mesh& mesh) const {
  if (kind == Kind::replicated) return replicate(*model, {.mesh = mesh});
  if (kind == Kind::replicated_inside) replicate(*model->blocks[1], {.mesh = mesh});
  FullyShardOptions options{
      .mesh = mesh, .policy = ModuleWrapPolicy<Block>(), .strategy = strategy};
  if (kind == Kind::tied_head_apart) options.policy = ModuleWrapPolicy<Block, TiedHead>();
  fully_shard(*model, options);
}

std::vector<Configuration> configurations(int world_size) {
  using Kind = Configuration::Kind;
  std::vector<Configuration> all;
  for (const ShardingStrategy strategy : {NO_SHARD, FULL_SHARD, SHARD_GRAD_OP}) {
    all.push_back({Kind::fully_sharded, strategy, 1, world_size});
  }
  for (int num_replicas = 1; num_replicas <= world_size; ++num_replicas) {
    if (world_size % num_replicas != 0) continue;
    all.push_back({Kind::fully_sharded, HYBRID_SHARD, num_replicas, world_size});
  }
  if (world_size % 2 == 0) {
    all.push_back({Kind::fully_sharded, HYBRID_SHARD_ZERO2, 2, world_size});
  }
  all.push_back({Kind::tied_head_apart, FULL_SHARD, 1, world_size});
  all.push_back({Kind::replicated, FULL_SHARD, 1, world_size});
  all.push_back({Kind::replicated_inside, FULL_SHARD, 1, world_size});
  return all;
}

std::vector<Configuration> configurations(const std::vector<int>& world_sizes) {
  std::vector<Configuration> all;
  for (const int world_size : world_sizes) {
    for (const Configuration& each : configurations(world_size)) all.push_back(each);
  }
  return all;
}

}  // namespace tessera::test
