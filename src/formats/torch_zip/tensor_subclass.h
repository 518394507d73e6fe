#pragma once

#include <optional>
#include <string>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::torch_zip {

/// The tensor that one rank holds of a DTensor or a ShardedTensor.
struct LocalTensor {
  pickle::Object tensor;
  bool is_whole;  // other ranks hold nothing else of it
};

/// Returns the local tensor in a call of `_rebuild_from_type_v2` for the class `type`; nothing for
/// another class, or if the rank holds no shard or several.
std::optional<LocalTensor> local_tensor(pickle::Object call, pickle::Object type);

/// Says what a tensor of a foreign class is, from the arguments that torch rebuilds it from:
/// `a DTensor float32 [8, 3], placed Shard(0): one rank's part, [4, 3]`. `call` is a call of
/// `_rebuild_from_type_v2`, `type` its class. Names the class alone if it is not a sharded tensor
/// of torch, or its state is not what torch 2.11 writes.
std::string tensor_subclass_in_words(pickle::Object call, pickle::Object type);

}  // namespace tessera::formats::torch_zip
