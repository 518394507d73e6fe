#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera::state {

/// How a report calls the source and the destination of a load.
struct LoadSides {
  std::string_view from;
  /// If empty, follows from each name: `the model` for `model.fc.weight`.
  std::string_view to;
};
inline constexpr LoadSides kCheckpointOfState{"the checkpoint", ""};
inline constexpr LoadSides kStateDictOfModule{"the state dict", "the module"};
inline constexpr LoadSides kStateDictOfOptimizer{"the state dict", "the optimizer"};

/// Reports an entry that the destination of the load does not have.
void add_unexpected(const StateDict::Item& item, LoadReport& report);

/// Returns a problem: the source has other elements for `fqn` than for `first`, although both are
/// names of one tensor in the model.
formats::Finding tied_problem(const std::string& fqn, const std::string& first);

/// Returns the line of a problem or note. With the rule `unexpected` (Finding::rule): `<name>:
/// unexpected: the checkpoint has a tensor of this name, but the model does not`. With any other
/// rule: the line of `finding_to_string`.
std::string line_of(const formats::Finding& finding, const LoadSides& sides);

/// Throws Error(mismatch) with one line per problem, followed by the hints; does nothing if there
/// are no problems.
void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems,
                     const std::vector<std::string>& hints = {},
                     const LoadSides& sides = kCheckpointOfState);

/// Throws Error(mismatch) with the given lines and hints; does nothing if `num_problems` is 0.
/// `num_problems`: how many problems the lines describe.
void refuse_lines(const std::string& what, std::size_t num_problems,
                  const std::vector<std::string>& lines, const std::vector<std::string>& hints);

/// Throws another rank's error on this rank. `text` is its message, which may have several lines.
[[noreturn]] void rethrow_text(ErrorKind kind, std::string_view text);

}  // namespace tessera::state
