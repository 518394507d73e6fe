#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::formats::deepspeed {

// [Note: Members that clash] The reader gives entries names that begin with `model`, `optim`,
// `deepspeed` or `per_rank`. The user's `client_state` can have a member with the same name, for
// example {"deepspeed": {"global_steps": 99}}. The reader then adds all entries of this member as
// `client_state.<member>`, here `client_state.deepspeed.global_steps`. The writer of universal
// checkpoints gives such a member its own name back, if the reader would find the same clash.
inline constexpr std::string_view kClientState = "client_state";

/// The names of a checkpoint's own entries: all but the user's.
class OwnNames {
 public:
  explicit OwnNames(std::vector<std::string> names);
  /// Returns whether the user's entry `name` clashes with an own entry: both have the same name, or
  /// one is a dict with the other in it. Under `model` and `optim` all user's entries clash, if
  /// there is an own entry there: the writer of universal checkpoints takes all that is there for
  /// the module's and the optimizer's.
  bool clashes(std::string_view name) const;

 private:
  bool has(std::string_view name) const;
  bool has_below(std::string_view name) const;

  std::vector<std::string> names_;  // sorted
};

}  // namespace tessera::formats::deepspeed
