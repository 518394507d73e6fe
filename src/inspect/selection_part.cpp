#include "inspect/selection_part.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::inspect {
namespace {

/// Returns the number of the part for each selected tensor. Gives out the tensors from the largest
/// to the smallest, each to the part with the fewest bytes so far.
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

void NamesOfParts::note(const std::string& name, const std::string& path) {
  const auto refuse = [&](std::string_view expected, const std::string& found,
                          std::string_view cause) {
    throw Error::expected(ErrorKind::mismatch, {.path = path, .fqn = name}, std::string(parts_),
                          expected, found, cause);
  };
  const auto found = path_of_.find(name);
  if (found == path_of_.end()) {
    refuse("names of the checkpoint", "a name that the checkpoint does not have",
           "is this part from another checkpoint?");
  }
  if (!found->second.empty()) {
    refuse("each name in one part", "this name also in " + printable(found->second),
           "is one part given twice?");
  }
  found->second = path;
}

void NamesOfParts::require_all() const {
  for (const auto& [name, path] : path_of_) {
    if (!path.empty()) continue;
    throw Error::expected(ErrorKind::mismatch, {.fqn = name}, std::string(parts_),
                          "each name in one part", "this name in no part", "is a part missing?");
  }
}

}  // namespace tessera::inspect
