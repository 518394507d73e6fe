#pragma once

#include <string>
#include <vector>

#include "inspect/manifest.h"
#include "inspect/summary.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// The manifest of one part of the names, which one of several processes computed, and the path of
/// the file that has it.
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
