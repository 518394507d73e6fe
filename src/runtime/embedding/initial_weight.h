#pragma once

#include "tessera/runtime/embedding/embedding_bag_collection.h"

namespace tessera::embedding {

/// Gives a table, or a shard of it, its first values.
void initialize(const EmbeddingBagConfig& config, at::Tensor weight);

}  // namespace tessera::embedding
