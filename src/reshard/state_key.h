#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

namespace tessera::reshard {

/// Returns the part of a key after its first component `state`: `w.exp_avg` for
/// `optim.state.w.exp_avg`. Returns nothing if there is no such component, or nothing after it. A
/// module or a table may be called `state` too: only StateRoots tells what is optimizer state.
std::optional<std::string_view> behind_state(std::string_view fqn);

/// Returns the part of a key before the first component that equals `component`, with the last dot:
/// `optim.` for `optim.state.w` and `state`. Returns nothing if there is no such component.
std::optional<std::string_view> before_component(std::string_view fqn, std::string_view component);

/// Returns whether a name is a number. Then the optimizer has numbered its parameters, and a tensor
/// that has this number as its name, or at its end, is not the parameter.
bool has_only_digits(std::string_view name);

/// Returns the number of components in the beginning of a name, such as `model.block.`, without
/// those of wrapper modules (`module`, `_orig_mod`), which optimizers leave out of names.
std::size_t count_components(std::string_view beginning);

/// Returns how many components in the beginning of a name, such as `state_dict.model.`, are names
/// that trainers give to the dict of the trained model. The dict of a copy (EMA) has fewer of them.
std::size_t count_model_components(std::string_view beginning);

/// A key that torchrec's fused optimizers give: `<prefix>state.<fqn>.<table>.<name>`. The component
/// `state` is before the table's module, because a table may have this name too. Views of the key.
struct FusedStateKey {
  std::string_view weight;  // `<prefix>state.<fqn>`
  std::string_view table;
  std::string_view name;
};
std::optional<FusedStateKey> parse_fused_state_key(std::string_view fqn);  // nothing: no such key

}  // namespace tessera::reshard
