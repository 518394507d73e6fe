#pragma once

#include <string>
#include <vector>

#include "inspect/manifest.h"
#include "inspect/summary.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// Returns part `index` of `num_parts` of a selection, so that several processes can compute one
/// manifest. Each name is in one part. Tensors are divided by their bytes; an alias is in the part
/// of its tensor; values are in part 0. Requires: `0 <= index < num_parts`.
Selection part_of_selection(const formats::CheckpointContents& contents, const Selection& selection,
                            int index, int num_parts);

/// A manifest of some of the names, and the path where it was read.
struct PartOfManifest {
  std::string path;
  Manifest manifest;
};

/// Joins the manifests of all parts of a selection into the manifest that one process computes.
/// Throws: Error(mismatch) naming the first name that no part has, that two parts have, or that is
/// not selected.
Manifest join_manifests(const std::vector<PartOfManifest>& parts,
                        const formats::CheckpointContents& contents, const Selection& selection);

}  // namespace tessera::inspect
