#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera::state {

/// The two sides of a load, as a report calls them.
struct LoadSides {
  std::string_view from;
  std::string_view to;  // empty: what the first step of a name says, the model, the optimizer, …
};
inline constexpr LoadSides kCheckpointOfState{"the checkpoint", ""};
inline constexpr LoadSides kStateDictOfModule{"the state dict", "the module"};
inline constexpr LoadSides kStateDictOfOptimizer{"the state dict", "the optimizer"};

/// Reports an entry that nothing takes.
void add_unexpected(const StateDict::Item& item, LoadReport& report);

/// Returns a problem or note as a line: `<name>: unexpected: the checkpoint has a tensor of this
/// name, which the model does not`; others as `finding_to_string` has them.
std::string line_of(const formats::Finding& finding, const LoadSides& sides);

/// Throws Error(mismatch) that lists all problems, a line each, and behind them the hints; nothing
/// where there are no problems.
void refuse_problems(const std::string& what, const std::vector<formats::Finding>& problems,
                     const std::vector<std::string>& hints = {},
                     const LoadSides& sides = kCheckpointOfState);

/// The same with the lines given. `num_problems`: how many they stand for.
void refuse_lines(const std::string& what, std::size_t num_problems,
                  const std::vector<std::string>& lines, const std::vector<std::string>& hints);

/// Throws an error that another rank has told of: its text, line by line.
[[noreturn]] void rethrow_text(ErrorKind kind, std::string_view text);

}  // namespace tessera::state
