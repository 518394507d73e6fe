#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::formats::deepspeed {

// [Note: Members that clash] The reader gives its entries names that begin with `model`, `optim`,
// `deepspeed` or `per_rank`. An entry of the user's `client_state` can have the same name, for
// example {"deepspeed": {"global_steps": 99}}. The reader then adds all entries of that member
// below `client_state`: here as `client_state.deepspeed.global_steps`. The writer of universal
// checkpoints removes this `client_state` again, if a reader of the new files would add it.
inline constexpr std::string_view kClientState = "client_state";

/// The names of a checkpoint's own entries: all but the user's.
class OwnNames {
 public:
  explicit OwnNames(std::vector<std::string> names);
  /// Returns whether the user's entry `name` clashes with an own entry: both have the same name, or
  /// one is a dict with the other in it. If an own entry is below `model`, all user's entries below
  /// `model` clash, because the writer of universal checkpoints takes them for the module's. The
  /// same is true of `optim`.
  bool clashes(std::string_view name) const;

 private:
  bool has(std::string_view name) const;
  bool has_below(std::string_view name) const;

  std::vector<std::string> names_;  // sorted
};

}  // namespace tessera::formats::deepspeed
