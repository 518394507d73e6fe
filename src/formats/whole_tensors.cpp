#include "formats/whole_tensors.h"

#include "formats/key_paths.h"
#include "tessera/base/error.h"
#include "tessera/layout/region.h"

namespace tessera::formats {
namespace {

bool is_whole(const TensorEntry& tensor) {
  if (tensor.pieces.size() != 1) return false;
  const auto range = as_flat_range(tensor.pieces[0].region, tensor.meta.shape);
  return range && range->numel() == tensor.meta.numel();
}

}  // namespace

void require_whole_tensors(const CheckpointContents& contents, const std::string& destination,
                           std::string_view format) {
  for (const TensorEntry& tensor : contents.tensors) {
    if (tensor.meta.numel() == 0 || is_whole(tensor)) continue;
    throw Error::expected(
        ErrorKind::invalid_argument, {.path = destination, .fqn = tensor.meta.fqn}, "pieces",
        "one piece, the whole tensor", std::to_string(tensor.pieces.size()) + " pieces",
        std::string(format) + " is written unsharded");
  }
}

CheckpointContents on_one_rank(CheckpointContents contents, const std::string& destination,
                               std::string_view format) {
  require_whole_tensors(contents, destination, format);
  check_key_paths(contents, destination);
  contents.world_size = 1;
  contents.units.clear();
  contents.annotations.clear();
  for (TensorEntry& tensor : contents.tensors) {
    const SharedVector<Piece> whole{{whole_box(tensor.meta.shape), 0}};
    // A list that does not change stays shared.
    if (tensor.pieces != whole) tensor.pieces = whole;
  }
  return contents;
}

}  // namespace tessera::formats
