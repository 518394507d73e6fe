#pragma once

#include <optional>
#include <string>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::torch_zip {

/// Says what a tensor of a foreign class is, from the arguments that torch rebuilds it from:
/// `a DTensor float32 [8, 3], placed Shard(0): one rank's part, [4, 3]`. `call` is a call of
/// `_rebuild_from_type_v2`, `type` its class. Names the class alone if it is not a sharded tensor
/// of torch, or its state is not what torch 2.11 writes.
std::string tensor_subclass_in_words(pickle::Object call, pickle::Object type);

// These functions say what a tensor that is not dense is, from the arguments that torch rebuilds it
// from. They leave out whatever is not as torch 2.11 writes it.

std::string sparse_tensor_in_words(
    pickle::Object arguments);  // `a sparse tensor sparse_coo [3, 3]`
std::string quantized_tensor_in_words(pickle::Object arguments);  // `a quantized tensor qint8 [2]`
std::string nested_tensor_in_words(pickle::Object arguments);     // `a nested tensor of 2 tensors`
std::string meta_tensor_in_words(pickle::Object arguments);

}  // namespace tessera::formats::torch_zip
