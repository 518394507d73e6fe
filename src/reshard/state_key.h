#pragma once

#include <optional>
#include <string_view>

namespace tessera::reshard {

/// Returns the part of the key after `state.`, if `state` is a whole component of the key.
std::optional<std::string_view> behind_state(std::string_view fqn);

/// Returns the part of the key before the first whole component `component`, with the last dot.
std::optional<std::string_view> before_component(std::string_view fqn, std::string_view component);

/// A key that torchrec's fused optimizers give: `<prefix>state.<fqn>.<table>.<name>`.
/// Views of the key.
struct FusedStateKey {
  std::string_view weight;  // `<prefix>state.<fqn>`
  std::string_view table;
  std::string_view name;
};
std::optional<FusedStateKey> parse_fused_state_key(std::string_view fqn);

}  // namespace tessera::reshard
