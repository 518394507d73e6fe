#pragma once

#include <ostream>
#include <string>
#include <vector>

#include "runtime/support/checks.h"

namespace tessera::test {

/// A way to distribute a model over ranks.
struct Configuration {
  enum class Kind {
    fully_sharded,
    tied_head_apart,  // fully sharded; the head, whose weight is tied, is a unit
    replicated,
    replicated_inside,
  } kind = Kind::fully_sharded;
  ShardingStrategy strategy = FULL_SHARD;
  int num_replicas = 1;  // of hybrid strategies
  int world_size = 1;

  bool is_hybrid() const { return strategy == HYBRID_SHARD || strategy == HYBRID_SHARD_ZERO2; }
  dist::MeshOptions mesh_options() const;
  std::string name() const;
  /// Applies fully_shard or replicate to the model.
  void apply(Transformer& model, const dist::Mesh& mesh) const;

  friend void PrintTo(const Configuration& configuration, std::ostream* out) {
    *out << configuration.name();
  }
};

/// All configurations that are possible on `world_size` ranks.
std::vector<Configuration> configurations(int world_size);
std::vector<Configuration> configurations(const std::vector<int>& world_sizes);

}  // namespace tessera::test
