#pragma once

#include <string>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"

namespace tessera {

/// The logical, unsharded tensor: its name, dtype and shape.
struct TensorMeta {
  std::string fqn;  // flattened key, e.g. `optim.state.emb.weight.exp_avg`
  DType dtype = DType::float32;
  Shape shape;  // global, not of a shard

  std::int64_t numel() const { return numel_of(shape); }
  std::uint64_t nbytes() const { return static_cast<std::uint64_t>(numel()) * itemsize(dtype); }
  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

/// Throws Error(corruption) naming `path` unless the shape has at most kMaxDims non-negative sizes,
/// and both their product and the size in bytes fit into 63 bits. Every reader calls this for every
/// tensor before it computes anything from the shape.
void validate_tensor_meta(const TensorMeta& meta, const std::string& path);

}  // namespace tessera
