#pragma once

#include <set>
#include <string>

#include "tessera/runtime/dist/group.h"

namespace tessera::dist {

/// Sends rank 0's tensors to all ranks of a group, each tensor once.
class StateSync {
 public:
  explicit StateSync(Group& group) : group_(group) {}
  /// Overwrites `tensor` on all ranks with rank 0's `tensor`. Does nothing if `tensor` is
  /// undefined, or its TensorImpl was sent already (a view of its memory is sent again). Requires:
  /// tensors that were sent live as long as this object. `fqn` names the tensor in errors.
  /// Collective.
  void sync(const std::string& fqn, const at::Tensor& tensor);

 private:
  Group& group_;
  std::set<const c10::TensorImpl*> sent_;
};

}  // namespace tessera::dist
