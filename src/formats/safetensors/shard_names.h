#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::formats::detail {

/// `model-00002-of-00003.safetensors` has the place 2 of 3.
struct PlaceInSeries {
  std::string series;  // the name without the place: `model-`
  std::uint64_t number;
  std::uint64_t count;
};

/// Returns the place that the name of a file says; nothing where it says none.
std::optional<PlaceInSeries> place_in_series(std::string_view name);

}  // namespace tessera::formats::detail
