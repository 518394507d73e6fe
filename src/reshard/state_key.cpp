#include "reshard/state_key.h"

#include <algorithm>
#include <iterator>

#include "tessera/layout/table_plan.h"

namespace tessera::reshard {
namespace {

/// Returns the number of components in the beginning of a name for which `is_it` returns true.
template <class Predicate>
std::size_t count_if(std::string_view beginning, const Predicate& is_it) {
  std::size_t count = 0;
  for (std::size_t begin = 0; begin < beginning.size();) {
    const std::size_t end = std::min(beginning.find('.', begin), beginning.size());
    if (is_it(beginning.substr(begin, end - begin))) ++count;
    begin = end + 1;
  }
  return count;
}

}  // namespace

std::optional<std::string_view> behind_state(std::string_view fqn) {
  constexpr std::string_view kState = "state.";
  if (fqn.starts_with(kState)) return fqn.substr(kState.size());
  const std::size_t at = fqn.find(".state.");
  if (at == std::string_view::npos) return std::nullopt;
  return fqn.substr(at + 1 + kState.size());
}

std::optional<std::string_view> before_component(std::string_view fqn, std::string_view component) {
  for (std::size_t begin = 0; begin <= fqn.size();) {
    const std::size_t end = std::min(fqn.find('.', begin), fqn.size());
    if (fqn.substr(begin, end - begin) == component) return fqn.substr(0, begin);
    begin = end + 1;
  }
  return std::nullopt;
}

std::size_t count_components(std::string_view beginning) {
  constexpr std::string_view kWrappers[] = {"module", "_orig_mod", "_fsdp_wrapped_module",
                                            "_checkpoint_wrapped_module"};
  return count_if(beginning, [&](std::string_view component) {
    return std::ranges::find(kWrappers, component) == std::end(kWrappers);
  });
}

std::size_t count_model_components(std::string_view beginning) {
  constexpr std::string_view kModels[] = {"model", "module", "state_dict", "model_state_dict",
                                          "net"};
  return count_if(beginning, [&](std::string_view component) {
    return std::ranges::find(kModels, component) != std::end(kModels);
  });
}

bool has_only_digits(std::string_view name) {
  return std::ranges::all_of(name, [](char c) { return c >= '0' && c <= '9'; });
}

std::optional<FusedStateKey> parse_fused_state_key(std::string_view fqn) {
  const std::size_t last = fqn.rfind('.');
  if (last == std::string_view::npos) return std::nullopt;
  const std::string_view rest = fqn.substr(0, last);
  for (std::size_t dot = rest.rfind('.'); dot != std::string_view::npos && dot != 0;
       dot = rest.rfind('.', dot - 1)) {
    const auto table = table_of_weight(rest.substr(0, dot));
    if (table && *table == rest.substr(dot + 1)) {
      const std::size_t module_nbytes = dot - table->size() - std::string_view(".weight").size();
      if (!behind_state(rest.substr(0, module_nbytes))) return std::nullopt;
      return FusedStateKey{rest.substr(0, dot), rest.substr(dot + 1), fqn.substr(last + 1)};
    }
  }
  return std::nullopt;
}

}  // namespace tessera::reshard
