#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace tessera::fsdp {

/// [Note: Touch] libtorch's modules have no forward hooks, so a unit is gathered when an operator
/// touches one of its parameters. While a pass is open, parameters are views that carry one extra
/// dispatch key, which views made from them inherit. A fallback for that key finds the unit behind
/// the storage of each tensor argument, has it gathered, and goes on below the key. Operators
/// without such an argument are never seen, and pay nothing.
/// The key is the one wrapper key that PyTorch leaves to its users.
inline constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// Hears of operators that use the storage that it stands behind.
class TouchListener {
 public:
  /// Called before the operator runs, on the thread that runs it, with the argument as the operator
  /// gets it. What it throws, the operator throws.
  virtual void touched(const at::Tensor& argument) = 0;

 protected:
  ~TouchListener() = default;
};

/// Lets `listener` hear of every use of `storage` through tensors with the key, until it is
/// destroyed. Thread-safe.
class TouchRegistration {
 public:
  TouchRegistration(const c10::Storage& storage, TouchListener& listener);
  ~TouchRegistration();
  TouchRegistration(const TouchRegistration&) = delete;
  TouchRegistration& operator=(const TouchRegistration&) = delete;

 private:
  const c10::StorageImpl* storage_;
};

/// Does what an operator does that uses `tensor`; nothing where it carries no key.
void touch_storage(const at::Tensor& tensor);

/// Returns the number of the operator whose arguments are being looked at on this thread: what one
/// operator uses must be there together.
std::uint64_t current_operator();
/// Numbers what is looked at from here on as another one.
void begin_operator();

/// Returns a tensor over the same storage that carries the key. Not a view as autograd knows it.
at::Tensor with_touch_key(const at::Tensor& tensor);

/// Between these two, the fallback sees every operator of this thread, and has what it makes made
/// on the meta device. They nest.
void enter_meta_device();
void leave_meta_device();

/// Keeps the runtime's own operators on this thread from touching, for as long as it lives.
class UntouchedScope {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::DispatchKeySet(kTouchKey)};
};

}  // namespace tessera::fsdp
