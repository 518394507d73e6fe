#pragma once

#include <optional>
#include <string>

#include "recipe/rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// Returns rules that rename and unstack the tensors of a Megatron checkpoint, so that a recipe
/// fits them. The new names and shapes are those of `GPTModel.state_dict()` with Megatron's
/// own layers (the local layer spec): torch_dist stacks layers and experts, and TransformerEngine's
/// layers name norms and experts differently. Two tensors for one norm must be equal.
///
/// The rules drop what no other framework reads: objects (`…/shard_0_1`), extra state, and buffers
/// of the optimizer without names of parameters.
///
/// Returns nothing if nothing changes, or if the recipe's source is not Megatron's (`"megatron"` in
/// the recipe). `path`: of the checkpoint, for messages.
/// Throws: Error(unsupported) naming a tensor or value whose name is too long for a rule.
/// docs/formats/megatron.md has the names. Source: megatron-core 0.16, as torch_dist_names.h.
std::optional<Rules> rules_for_megatron(const Recipe& recipe, Direction direction,
                                        const formats::CheckpointContents& contents,
                                        const std::string& path);

/// Whether the names of a recipe's source are Megatron's: `"megatron"` in the recipe.
bool is_from_megatron(const Recipe& recipe, Direction direction);
/// Whether the names that a recipe gives are Megatron's.
bool is_to_megatron(const Recipe& recipe, Direction direction);

/// Returns a name with captures in place of numbers: those that are whole components, and those
/// after `/shard_`: `layers.{A}._extra_state/shard_{B}_{C}`.
std::string with_captures(const std::string& name);

}  // namespace tessera::recipe
