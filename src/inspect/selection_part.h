#pragma once

#include <map>
#include <string>
#include <string_view>

#include "inspect/summary.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// Divides a selection into `num_parts` parts, one for each of several processes, and returns part
/// `index` (without totals). Each name is in one part. Tensors are divided by bytes; an alias is in
/// the part of its tensor (if not selected: part 0); values are in part 0. Requires: a valid index.
Selection part_of_selection(const formats::CheckpointContents& contents, const Selection& selection,
                            int index, int num_parts);

/// Checks that the results of several processes together have each selected name exactly once.
class NamesOfParts {
 public:
  /// `parts` names the results in messages: `parts of a manifest`.
  explicit NamesOfParts(std::string_view parts) : parts_(parts) {}

  /// Adds a name that exactly one of the parts must have.
  void expect(const std::string& name) { path_of_[name]; }
  /// Records that the result file at `path` has the name. Throws: Error(mismatch) if another result
  /// has it too, or if `expect` was not called with it.
  void note(const std::string& name, const std::string& path);
  /// Throws: Error(mismatch) naming the first name that no part has.
  void require_all() const;

 private:
  std::string_view parts_;
  // Name to path of the part that has it; empty: no part yet.
  std::map<std::string, std::string> path_of_;
};

}  // namespace tessera::inspect
