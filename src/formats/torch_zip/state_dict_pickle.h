#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "formats/pickle/pickler.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// Says that the dict at a path is pickled as an object of a class, with the dict's entries as
/// attributes.
struct PickledObject {
  KeyPath path;
  std::string module;
  std::string name;
};

/// How many list positions may have no entry, in all lists of a state dict together.
inline constexpr std::int64_t kMaxHoles = std::int64_t{1} << 20;

/// Writes the tensor number `tensor` of the contents into the pickle.
using PushTensor = std::function<void(pickle::Pickler&, std::size_t tensor)>;

/// Returns the pickle of the nested dicts and lists that the key paths of all entries form. The
/// keys of a dict are in its order ([Note: Order of keys]). Tensor `i` is all of storage `i`; an
/// alias is another tensor of that storage. List positions without an entry are None, as in
/// PyTorch's distributed checkpoint. A list under `per_rank.<rank>` becomes a dict with positions
/// as keys if readers would not find the same entries in a list, for example if positions are
/// missing. The dicts at the paths of `objects` become objects of classes. `push_tensor` writes
/// each tensor; empty: writes ordinary tensors. Requires: the key paths form one tree; `values[i]`
/// is the value of `contents.values[i]`. Throws: Error(invalid_argument) with `destination` and the
/// name if a key path is too long or has a key that equals another; Error(unsupported) if more than
/// kMaxHoles list positions have no entry, and for a value that cannot be pickled.
std::string pickle_state_dict(const CheckpointContents& contents, const std::vector<Value>& values,
                              const std::string& destination,
                              const std::vector<PickledObject>& objects = {},
                              const PushTensor& push_tensor = {});

}  // namespace tessera::formats::torch_zip
