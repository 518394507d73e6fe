#pragma once

#include <cstdint>

#include "tessera/layout/region.h"
#include "tessera/runtime/dist/group.h"
#include "tessera/runtime/embedding/embedding_bag_collection.h"

namespace tessera::embedding {

/// Gives a whole table its first values, out of the default generator.
void initialize(const EmbeddingBagConfig& config, at::Tensor weight);

/// Gives a shard of a table its first values. Those of the default are a function of seed, table
/// and place in the table, so that the table is the same under every plan. An `init_fn` finds the
/// default generator seeded by seed, table and the shard's region, so that replicas are equal and
/// shards are not; behind it the generator is as it was.
void initialize_shard(const EmbeddingBagConfig& config, const Box& region, std::uint64_t seed,
                      at::Tensor weight);

/// Returns a number out of rank 0's default generator; every rank's takes one step. Collective.
std::uint64_t draw_seed(dist::Group& group);

}  // namespace tessera::embedding
