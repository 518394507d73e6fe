#include "inspect/manifest_parts.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

/// Returns the part of each selected tensor: the largest tensor goes first, to the part with the
/// fewest bytes.
std::map<std::size_t, int> parts_of_tensors(const formats::CheckpointContents& contents,
                                            const Selection& selection, int num_parts) {
  const auto nbytes_of_tensor = [&](std::size_t t) { return contents.tensors[t].meta.nbytes(); };
  std::vector<std::size_t> order = selection.tensors;
  std::ranges::stable_sort(order, std::ranges::greater(), nbytes_of_tensor);
  std::vector<std::uint64_t> nbytes(static_cast<std::size_t>(num_parts));
  std::map<std::size_t, int> parts;
  for (const std::size_t t : order) {
    const auto least = std::ranges::min_element(nbytes);
    *least += nbytes_of_tensor(t);
    parts[t] = static_cast<int>(least - nbytes.begin());
  }
  return parts;
}

[[noreturn]] void refuse(const std::string& path, const std::string& name,
                         std::string_view expected, const std::string& found,
                         std::string_view cause) {
  throw Error::expected(ErrorKind::mismatch, {.path = path, .fqn = name}, "parts of a manifest",
                        expected, found, cause);
}

}  // namespace

Selection part_of_selection(const formats::CheckpointContents& contents, const Selection& selection,
                            int index, int num_parts) {
  TESSERA_CHECK(0 <= index && index < num_parts);
  const std::map<std::size_t, int> parts = parts_of_tensors(contents, selection, num_parts);
  Selection part;
  for (const std::size_t t : selection.tensors) {
    if (parts.at(t) == index) part.tensors.push_back(t);
  }
  for (const std::size_t a : selection.aliases) {
    const auto found = parts.find(tensor_of(contents, contents.aliases[a]));
    if ((found == parts.end() ? 0 : found->second) == index) part.aliases.push_back(a);
  }
  if (index == 0) part.values = selection.values;
  return part;
}

Manifest join_manifests(const std::vector<PartOfManifest>& parts,
                        const formats::CheckpointContents& contents, const Selection& selection) {
  Manifest joined;
  std::map<std::string, std::string> path_of;  // by name; empty: no part has had it yet
  for (const std::size_t t : selection.tensors) path_of[contents.tensors[t].meta.fqn];
  for (const std::size_t a : selection.aliases) path_of[contents.aliases[a].fqn];
  for (const std::size_t v : selection.values) path_of[contents.values[v].name];
  for (const PartOfManifest& part : parts) {
    for (const Manifest::Entry& entry : part.manifest.entries) {
      const auto found = path_of.find(entry.name);
      if (found == path_of.end()) {
        refuse(part.path, entry.name, "names of the checkpoint", "another one",
               "is it of another checkpoint?");
      }
      if (!found->second.empty()) {
        refuse(part.path, entry.name, "each name in one part",
               "the name in " + printable(found->second) + ", too", "is one part given twice?");
      }
      found->second = part.path;
      joined.entries.push_back(entry);
    }
    joined.files.insert(joined.files.end(), part.manifest.files.begin(), part.manifest.files.end());
  }
  for (const auto& [name, path] : path_of) {
    if (path.empty()) {
      refuse({}, name, "each name in one part", "the name in none", "is a part missing?");
    }
  }
  const auto by_name = [](const auto& a, const auto& b) { return a.name < b.name; };
  std::sort(joined.entries.begin(), joined.entries.end(), by_name);
  std::sort(joined.files.begin(), joined.files.end(), by_name);
  return joined;
}

}  // namespace tessera::inspect
