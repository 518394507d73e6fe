#pragma once

#include <string>
#include <vector>

#include "recipe/transformation.h"
#include "tessera/formats/checkpoint.h"

// Finds what a recipe changes besides names and shapes, so that a program can tell its user.
namespace tessera::recipe {

/// Returns notes about what rules and slices drop, about additions, about tied tensors that are
/// tied no longer, and about keys that become text. `path` is that of the source. Requires: the
/// targets still have their elements.
std::vector<formats::Finding> find_losses(const Transformation& made,
                                          const formats::CheckpointContents& source,
                                          const std::string& path);

/// Returns what the source's reader made simpler, under the names that the recipe gives. A
/// container gets the common beginning of its entries' new names. Leaves out what is dropped.
std::vector<formats::Simplification> renamed_simplifications(
    const Transformation& made, const formats::CheckpointContents& source);

}  // namespace tessera::recipe
