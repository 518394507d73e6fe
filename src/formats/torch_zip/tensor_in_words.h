#pragma once

#include <optional>
#include <string>

#include "formats/pickle/pickle_object.h"

namespace tessera::formats::torch_zip {

/// Describes a tensor of a class other than torch.Tensor, for messages: `a DTensor float32 [8, 3],
/// placed Shard(0): one rank's part, [4, 3] (save it …)`. `call`: the pickled call of
/// `_rebuild_from_type_v2`. `type`: the class that it makes. Names only the class if it is not a
/// sharded tensor of torch. Leaves out details that are not pickled in the form of torch 2.11.
std::string tensor_subclass_in_words(pickle::Object call, pickle::Object type);

// These functions describe a tensor that is not dense, from the arguments of the call that rebuilds
// the tensor. They leave out details that are not pickled in the form of torch 2.11.

std::string sparse_tensor_in_words(
    pickle::Object arguments);  // `a sparse tensor sparse_coo [3, 3]`
std::string quantized_tensor_in_words(pickle::Object arguments);  // `a quantized tensor qint8 [2]`
std::string nested_tensor_in_words(pickle::Object arguments);     // `a nested tensor of 2 tensors`
std::string meta_tensor_in_words(pickle::Object arguments);

}  // namespace tessera::formats::torch_zip
