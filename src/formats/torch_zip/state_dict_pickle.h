#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "formats/pickle/pickler.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// A dict in a state dict that is pickled as an object of a class, with the dict as its attributes.
struct PickledObject {
  KeyPath path;
  std::string module;
  std::string name;
};

/// Pushes the tensor with an index in the contents.
using PushTensor = std::function<void(pickle::Pickler&, std::size_t tensor)>;

/// Returns the pickle of the nested dicts and lists that the key paths of all entries form. Keys
/// are in byte order. Tensor `i` is all of storage `i`; an alias is another tensor of that storage.
/// List positions without an entry are None, as in PyTorch's distributed checkpoint. The dicts at
/// the paths of `objects` become objects. `push_tensor` pushes each tensor; empty: as an ordinary
/// tensor.
/// Requires: key paths that form one tree; `values` parallel to `contents.values`.
/// Throws: Error(invalid_argument) with `destination` and the name if a key path is too long or
/// skips too many positions; Error(unsupported) for a value that cannot be pickled.
std::string pickle_state_dict(const CheckpointContents& contents, const std::vector<Value>& values,
                              const std::string& destination,
                              const std::vector<PickledObject>& objects = {},
                              const PushTensor& push_tensor = {});

}  // namespace tessera::formats::torch_zip
