#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace tessera::fsdp {

/// [Note: Touch] libtorch's modules have no forward hooks, so a unit (a fully sharded module) is
/// gathered when an operator uses one of its parameters. Parameters are tensors with one extra
/// dispatch key, kTouchKey: not within unshard_params, and without a buffer of their own only under
/// Tracing::on. Views inherit the key. Its fallback runs before autograd: it finds the unit by the
/// storage of a tensor argument, gathers it, and redispatches to the keys below. Operators on other
/// tensors cost nothing. PyTorch reserves this key for its own single-process tests:
/// c10/core/DispatchKey.h says "Don't use it for anything real". Tessera uses it all the same, as a
/// key above autograd that PyTorch itself does not use. A new PyTorch release may change or remove
/// it, and no other library in the process can use it.
inline constexpr c10::DispatchKey kTouchKey = c10::DispatchKey::TESTING_ONLY_GenericWrapper;

/// An object that is called for each operator that uses a storage. TouchRegistration registers the
/// object for the storage.
class TouchListener {
 public:
  /// Called before the operator runs, on its thread, with the operator's argument. The operator
  /// throws what this function throws.
  virtual void touched(const at::Tensor& argument) = 0;

 protected:
  ~TouchListener() = default;
};

/// Until this object is destroyed, `listener` is called for each operator (except `detach`) that
/// uses `storage` through a tensor with the touch key. Thread-safe.
class TouchRegistration {
 public:
  TouchRegistration(const c10::Storage& storage, TouchListener& listener);
  ~TouchRegistration();
  TouchRegistration(const TouchRegistration&) = delete;
  TouchRegistration& operator=(const TouchRegistration&) = delete;

 private:
  const c10::StorageImpl* storage_;
};

/// Calls the listener of the tensor's storage, as an operator would. Does nothing if `tensor` does
/// not have the touch key.
void touch_storage(const at::Tensor& tensor);

/// Returns the number of this thread's current operator. Units whose last use has this number must
/// stay gathered, because one operator may use parameters of several units.
std::uint64_t current_operator();
/// To be called when an operator of this thread begins. From then on, `current_operator` returns a
/// new number.
void begin_operator();

/// Returns a tensor with the touch key and the same storage as `tensor`. For autograd it is not a
/// view.
at::Tensor with_touch_key(const at::Tensor& tensor);

/// Between these two calls, operators of this thread that create a tensor without tensor arguments
/// (such as `zeros`) create it on the meta device. Calls nest.
void enter_meta_device();
void leave_meta_device();

/// In this scope, operators of this thread do not call listeners. For the runtime's own operators.
class UntouchedScope {
 private:
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::DispatchKeySet(kTouchKey)};
};

}  // namespace tessera::fsdp
