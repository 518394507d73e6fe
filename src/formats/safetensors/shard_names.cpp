#include "formats/safetensors/shard_names.h"

namespace tessera::formats::detail {

std::optional<PlaceInSeries> place_in_series(std::string_view name) {
  return place_in_series(name, ".safetensors");
}

}  // namespace tessera::formats::detail
