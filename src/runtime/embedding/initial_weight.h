#pragma once

#include <cstdint>

#include "tessera/layout/region.h"
#include "tessera/runtime/dist/group.h"
#include "tessera/runtime/embedding/embedding_bag_collection.h"

namespace tessera::embedding {

/// Fills a whole table by its `init_fn`. Without one, draws from the default generator (uniform).
void initialize(const EmbeddingBagConfig& config, at::Tensor weight);

/// Fills a shard of a table with initial values. A default value depends only on the seed, the
/// table and the element's position, so the table is the same under every plan. If the table has an
/// `init_fn`, seeds the default generator for it by the seed, the table and the shard's offsets, so
/// that replicas are equal and different shards differ. Restores the generator's state afterwards.
void initialize_shard(const EmbeddingBagConfig& config, const Box& region, std::uint64_t seed,
                      at::Tensor weight);

/// Draws a number from rank 0's default generator. Returns the same number on all ranks. The
/// generator of every rank advances. Collective.
std::uint64_t draw_seed(dist::Group& group);

}  // namespace tessera::embedding
