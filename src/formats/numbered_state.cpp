#include "formats/numbered_state.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <variant>

namespace tessera::formats {

bool is_numbered_state(const KeyPath& path) {
  return front_of_numbered_state(path).has_value();
}

std::optional<std::string> front_of_numbered_state(const KeyPath& path) {
  // The innermost `state`, because a dict that holds several optimizers may have this name too.
  for (std::size_t i = path.size(); i-- > 1;) {
    const auto* const number = std::get_if<NonStringKey>(&path[i]);
    if (path[i - 1] != Key("state") || number == nullptr) continue;
    if (!dict_key_value(*number).is<std::int64_t>()) continue;
    return spell(KeyPath(path.begin(), path.begin() + static_cast<std::ptrdiff_t>(i) + 1)) + ".";
  }
  return std::nullopt;
}

bool has_only_flat_ranges(const TensorEntry& tensor) {
  return std::ranges::all_of(tensor.pieces, [](const Piece& piece) {
    return std::holds_alternative<FlatRange>(piece.region);
  });
}

}  // namespace tessera::formats
