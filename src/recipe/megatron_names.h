#pragma once

#include <optional>

#include "recipe/rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// Returns rules that show a checkpoint of Megatron's under the names and shapes of
/// `GPTModel.state_dict()` with Megatron's own layers (the local layer spec), which recipes have:
/// torch_dist stacks layers and experts, and TransformerEngine's layers name norms and experts
/// differently. Objects (`…/shard_0_1`), extra state and buffers of the optimizer without names of
/// parameters are dropped, because no other framework reads them. Two tensors for one norm must be
/// equal. Returns nothing if all names are those of the recipe already, or if the recipe's source
/// is not Megatron's (`"megatron"` in the recipe).
/// docs/formats/megatron.md has the names. Source: megatron-core 0.16, as torch_dist_names.h.
std::optional<Rules> rules_for_megatron(const Recipe& recipe, Direction direction,
                                        const formats::CheckpointContents& contents);

}  // namespace tessera::recipe
