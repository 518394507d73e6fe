#pragma once

#include <string>
#include <vector>

#include "recipe/transformation.h"
#include "tessera/formats/checkpoint.h"

// Finds what a recipe loses or changes besides names and shapes, so that a program can report it.
namespace tessera::recipe {

/// Returns notes about entries and elements that the recipe drops, operations `add` (they round),
/// tied tensors that become separate, and keys that become text. `path` is the source's path.
/// Requires: the tensors in `made.targets` still have their blocks.
std::vector<formats::Finding> find_losses(const Transformation& made,
                                          const formats::CheckpointContents& source,
                                          const std::string& path);

/// Returns the source's simplifications (what its reader has simplified) with the names that the
/// recipe gives. A dict or list gets as its new name the beginning that the new names of its
/// entries share. Leaves out entries that the recipe drops.
std::vector<formats::Simplification> renamed_simplifications(
    const Transformation& made, const formats::CheckpointContents& source);

}  // namespace tessera::recipe
