#pragma once

#include <torch/nn/module.h>

#include <memory>

#include "runtime/embedding/sharded_tables.h"

namespace tessera::embedding {

/// Adds hooks to the modules of `collection` that have the weights of its tables. State dicts then
/// have whole tables (FULL) or this rank's shards (SHARDED, LOCAL), and `load_state_dict` loads
/// this rank's shards from them. All this is also true for a part of the collection.
void attach_state_dict_hooks(const torch::nn::Module& collection,
                             const std::shared_ptr<ShardedTables>& tables);

/// Returns the optimizer state of the fused tables, for saving and loading; nullptr if `tables` has
/// no fused optimizer.
std::shared_ptr<registry::FusedUpdates> fused_updates(const std::shared_ptr<ShardedTables>& tables);

}  // namespace tessera::embedding
