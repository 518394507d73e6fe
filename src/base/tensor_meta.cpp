#include "tessera/base/tensor_meta.h"

#include <limits>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera {

void validate_tensor_meta(const TensorMeta& meta, const std::string& path) {
  const auto refuse = [&](const std::string& expected, const std::string& found) {
    throw Error::expected(ErrorKind::corruption, {.path = path, .fqn = meta.fqn}, "shape", expected,
                          found);
  };
  if (meta.shape.size() > kMaxDims) {
    refuse("at most " + std::to_string(kMaxDims) + " dimensions",
           std::to_string(meta.shape.size()) + " dimensions");
  }
  for (const std::int64_t size : meta.shape) {
    if (size < 0) refuse("sizes of at least 0", shape_to_string(meta.shape));
  }
  const auto numel = checked_numel(meta.shape);
  if (!numel || !checked_mul(*numel, static_cast<std::int64_t>(itemsize(meta.dtype)))) {
    refuse("at most " + std::to_string(std::numeric_limits<std::int64_t>::max()) + " bytes",
           shape_to_string(meta.shape) + " of " + std::string(dtype_name(meta.dtype)));
  }
}

}  // namespace tessera
