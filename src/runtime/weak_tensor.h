#pragma once

#include <ATen/core/Tensor.h>

#include <utility>

namespace tessera {

/// A weak reference to a tensor: does not keep it alive.
class WeakTensor {
 public:
  explicit WeakTensor(const at::Tensor& tensor) : impl_(tensor.getIntrusivePtr()) {}
  /// Returns the tensor, or an undefined tensor if it was destroyed.
  at::Tensor lock() const {
    auto strong = impl_.lock();
    return strong ? at::Tensor(std::move(strong)) : at::Tensor();
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, at::UndefinedTensorImpl> impl_;
};

}  // namespace tessera
