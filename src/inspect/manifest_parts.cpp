#include "inspect/manifest_parts.h"

#include <algorithm>
#include <cstddef>

#include "inspect/selection_part.h"

namespace tessera::inspect {

Manifest join_manifests(const std::vector<PartOfManifest>& parts,
                        const formats::CheckpointContents& contents, const Selection& selection) {
  NamesOfParts names("parts of a manifest");
  for (const std::size_t t : selection.tensors) names.expect(contents.tensors[t].meta.fqn);
  for (const std::size_t a : selection.aliases) names.expect(contents.aliases[a].fqn);
  for (const std::size_t v : selection.values) names.expect(contents.values[v].name);
  Manifest joined;
  for (const PartOfManifest& part : parts) {
    for (const Manifest::Entry& entry : part.manifest.entries) {
      names.note(entry.name, part.path);
      joined.entries.push_back(entry);
    }
    joined.files.insert(joined.files.end(), part.manifest.files.begin(), part.manifest.files.end());
  }
  names.require_all();
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(joined.entries.begin(), joined.entries.end(), by_name);
  std::sort(joined.files.begin(), joined.files.end(), by_name);
  return joined;
}

}  // namespace tessera::inspect
