#include "formats/whole_tensors.h"

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

}  // namespace tessera::formats
