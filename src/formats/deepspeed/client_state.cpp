#include "formats/deepspeed/client_state.h"

#include <algorithm>
#include <utility>

namespace tessera::formats::deepspeed {

OwnNames::OwnNames(std::vector<std::string> names) : names_(std::move(names)) {
  std::ranges::sort(names_);
}

bool OwnNames::has(std::string_view name) const {
  return std::ranges::binary_search(names_, name, std::ranges::less(),
                                    [](const std::string& own) { return std::string_view(own); });
}

bool OwnNames::has_below(std::string_view name) const {
  const std::string prefix = std::string(name) + ".";
  const auto next = std::ranges::lower_bound(names_, prefix);
  return next != names_.end() && next->starts_with(prefix);
}

bool OwnNames::clashes(std::string_view name) const {
  if (has(name) || has_below(name)) return true;
  for (std::size_t dot = name.find('.'); dot != std::string_view::npos;
       dot = name.find('.', dot + 1)) {
    if (has(name.substr(0, dot))) return true;
  }
  const std::string_view member = name.substr(0, name.find('.'));
  return (member == "model" || member == "optim") && has_below(member);
}

}  // namespace tessera::formats::deepspeed
