#include "formats/numbered_state.h"

#include <algorithm>
#include <cstdint>
#include <variant>

namespace tessera::formats {

bool is_numbered_state(const KeyPath& path) {
  // Not only the first `state`: the dict that holds the optimizer may have this name too.
  const auto is_numbered = [](const Key& key, const Key& next) {
    const auto* const number = std::get_if<NonStringKey>(&next);
    return key == Key("state") && number != nullptr && dict_key_value(*number).is<std::int64_t>();
  };
  return std::ranges::adjacent_find(path, is_numbered) != path.end();
}

}  // namespace tessera::formats
