#pragma once

#include <cstddef>
#include <span>

#include "tessera/formats/checkpoint.h"

namespace tessera::formats {

/// A tensor of one of several checkpoints that are merged.
struct TensorOfSource {
  const CheckpointReader* reader;
  std::size_t tensor_index;
};

/// How tensors of the same name in several checkpoints are related, as far as names, shapes and
/// bytes show.
enum class TensorCollision {
  equal,      // shapes, dtypes and the bytes that were compared are equal
  different,  // versions of one tensor, or parts that shapes and names do not show
  parts,      // the parts that several ranks hold, as the shapes or the names of the files show
};

/// How much of each tensor is read.
enum class ComparedBytes {
  first,  // at most 64 KiB
  all,    // everything, as long as no difference is found
};

/// Compares tensors of one name with the first of them, bit by bit. A tensor that is damaged equals
/// no other. With ComparedBytes::first, reads only the first piece of each tensor: if dtypes and
/// shapes are equal, but a tensor has no pieces or the first pieces have different regions, the
/// tensors count as equal. Requires: two tensors or more. Throws: Error(io).
TensorCollision compare_tensors(std::span<const TensorOfSource> tensors, ComparedBytes compared);

}  // namespace tessera::formats
