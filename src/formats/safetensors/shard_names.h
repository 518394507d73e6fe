#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera::formats::detail {

/// The name of an index ends so. An index maps each tensor of a sharded checkpoint to its file.
inline constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
inline constexpr std::size_t kMaxIndexNbytes = std::size_t{64} << 20;

/// `model-00002-of-00003.safetensors` has the place 2 of 3.
struct PlaceInSeries {
  std::string series;  // the name without the place: `model-`
  std::uint64_t number;
  std::uint64_t count;
};

/// Returns the place that a file's name states; nothing if it states none.
std::optional<PlaceInSeries> place_in_series(std::string_view name);

}  // namespace tessera::formats::detail
