#pragma once

#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// A dict in a state dict that is pickled as an object of a class, with the dict as its attributes.
struct PickledObject {
  KeyPath path;
  std::string module;
  std::string name;
};

/// Returns the pickle of the nested dicts and lists that the key paths of all entries form. Keys
/// are in byte order. Tensor `i` is all of storage `i`; an alias is another tensor of that storage.
/// List positions without an entry are None, as in PyTorch's distributed checkpoint. The dicts at
/// the paths of `objects` become objects.
/// Requires: key paths that form one tree; `values` parallel to `contents.values`.
/// Throws: Error(invalid_argument) with `destination` and the name if a key path is too long or
/// skips too many positions; Error(unsupported) for a value that cannot be pickled.
std::string pickle_state_dict(const CheckpointContents& contents, const std::vector<Value>& values,
                              const std::string& destination,
                              const std::vector<PickledObject>& objects = {});

}  // namespace tessera::formats::torch_zip
