#include "formats/safetensors/shard_names.h"

#include <cstddef>

namespace tessera::formats::detail {

std::optional<PlaceInSeries> place_in_series(std::string_view name) {
  static constexpr std::size_t kDigits = 5;
  static constexpr std::string_view kFileSuffix = ".safetensors";
  static constexpr std::string_view kOf = "-of-";
  if (!name.ends_with(kFileSuffix)) return std::nullopt;
  name.remove_suffix(kFileSuffix.size());
  const auto take_number = [&]() -> std::optional<std::uint64_t> {
    if (name.size() < kDigits) return std::nullopt;
    std::uint64_t number = 0;
    for (const char digit : name.substr(name.size() - kDigits)) {
      if (digit < '0' || digit > '9') return std::nullopt;
      number = number * 10 + static_cast<std::uint64_t>(digit - '0');
    }
    name.remove_suffix(kDigits);
    return number;
  };
  const auto count = take_number();
  if (!count || !name.ends_with(kOf)) return std::nullopt;
  name.remove_suffix(kOf.size());
  const auto number = take_number();
  if (!number) return std::nullopt;
  return PlaceInSeries{std::string(name), *number, *count};
}

}  // namespace tessera::formats::detail
