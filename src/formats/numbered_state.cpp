#include "formats/numbered_state.h"

#include <algorithm>
#include <cstdint>
#include <variant>

namespace tessera::formats {

bool is_numbered_state(const KeyPath& path) {
  const auto state = std::ranges::find(path, Key("state"));
  if (state == path.end() || state + 1 == path.end()) return false;
  const auto* const key = std::get_if<NonStringKey>(&state[1]);
  return key != nullptr && dict_key_value(*key).is<std::int64_t>();
}

}  // namespace tessera::formats
