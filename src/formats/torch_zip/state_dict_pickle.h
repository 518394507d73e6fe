#pragma once

#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Returns the pickle of the nested dicts and lists that the key paths of all entries make up. Keys
/// are in byte order. Tensor `i` is all of storage `i`, an alias another tensor of that storage.
/// Positions of a list that no entry has are None, as PyTorch's distributed checkpoint fills them.
/// Requires: key paths that make up one tree; `values` parallel to `contents.values`.
/// Throws: Error(invalid_argument) with `destination` and the name where a key path is too long or
/// leaves too many positions out; Error(unsupported) on a value that cannot be pickled.
std::string pickle_state_dict(const CheckpointContents& contents, const std::vector<Value>& values,
                              const std::string& destination);

}  // namespace tessera::formats::torch_zip
