#pragma once

#include <string>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"

namespace tessera {

/// The logical, unsharded tensor: what it is called, what it holds, how large it is.
struct TensorMeta {
  std::string fqn;  // flattened key, e.g. `optim.state.emb.weight.exp_avg`
  DType dtype = DType::float32;
  Shape shape;  // global, whatever any rank holds

  std::int64_t numel() const { return numel_of(shape); }
  std::uint64_t nbytes() const { return static_cast<std::uint64_t>(numel()) * itemsize(dtype); }
  friend bool operator==(const TensorMeta&, const TensorMeta&) = default;
};

/// Throws Error(corruption) naming `path` unless the shape has at most kMaxDims non-negative
/// sizes whose product, and its size in bytes, fit into 63 bits. Every reader calls this on every
/// tensor before anything is computed from its shape.
void validate_tensor_meta(const TensorMeta& meta, const std::string& path);

}  // namespace tessera
