#include "runtime/fsdp/touch_dispatch.h"

#include <torch/library.h>
#include <algorithm>
#include <array>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/runtime/fsdp/forward.h"

namespace tessera::fsdp {
namespace {

/// The listener of each storage. The process has one map, also if ranks are threads, because no two
/// ranks share a storage.
struct Listeners {
  std::shared_mutex mutex;
  std::unordered_map<const c10::StorageImpl*, TouchListener*> by_storage;

  static Listeners& instance() {
    static auto* const listeners = new Listeners;  // outlives every static tensor
    return *listeners;
  }
};

/// Returns the listener of the tensor's storage, or nullptr.
TouchListener* find_listener(const at::Tensor& tensor) {
  if (!tensor.has_storage()) return nullptr;
  Listeners& listeners = Listeners::instance();
  const std::shared_lock lock(listeners.mutex);
  const auto it = listeners.by_storage.find(tensor.storage().unsafeGetStorageImpl());
  return it != listeners.by_storage.end() ? it->second : nullptr;
}

}  // namespace

void touch_storage(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kTouchKey)) return;
  if (TouchListener* const listener = find_listener(tensor)) listener->touched(tensor);
}

namespace {

/// Returns whether the operator may read the elements of its arguments. `detach` does not.
bool uses_memory(const c10::OperatorHandle& op) {
  static const c10::OperatorName detach("aten::detach", "");
  return op.operator_name() != detach;
}

/// Returns whether the operator is a norm. (The norm of a shard is not the norm of the whole
/// tensor.)
bool is_norm(const c10::OperatorHandle& op) {
  static constexpr std::array<std::string_view, 4> kNorms = {
      "aten::norm", "aten::linalg_vector_norm", "aten::linalg_norm", "aten::_foreach_norm"};
  return std::ranges::find(kNorms, op.operator_name().name) != kNorms.end();
}

/// Checks an argument of a norm. With gradients enabled, throws if `tensor` is a sharded gradient:
/// FlatParamGradients::leave_pass gives these the touch key, but no listener.
void see_norm(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.key_set().has(kTouchKey)) return;
  if (TouchListener* const listener = find_listener(tensor)) return listener->touched(tensor);
  if (!at::GradMode::is_enabled()) return;
  throw Error::expected(
      ErrorKind::invalid_argument, {}, "norm of a sharded gradient",
      "a call of tessera::clip_grad_norm_, which adds up all ranks",
      "a norm of this rank's shard only",
      "was torch::nn::utils::clip_grad_norm_ called? to read this rank's shard, use NoGradGuard");
}

thread_local std::uint64_t operator_number = 0;

/// Depth of nested operators on this thread. Nested operators share the number of the outermost
/// operator.
thread_local int operator_depth = 0;

class OperatorScope {
 public:
  OperatorScope() {
    if (operator_depth++ == 0) ++operator_number;
  }
  ~OperatorScope() { --operator_depth; }
  OperatorScope(const OperatorScope&) = delete;
  OperatorScope& operator=(const OperatorScope&) = delete;
};

/// Number of nested MetaDeviceScopes on this thread.
thread_local int meta_device_depth = 0;

/// Changes the device argument of an operator that creates a tensor (such as `zeros`) to meta.
/// Operators with tensor arguments take their device from these.
void make_on_meta_device(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  bool takes_tensors = false;
  std::optional<std::size_t> device;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    takes_tensors = takes_tensors || (*stack)[stack->size() - arguments.size() + i].isTensor();
    if (arguments[i].name() == "device") device = i;
  }
  if (!device || takes_tensors) return;
  (*stack)[stack->size() - arguments.size() + *device] = c10::Device(c10::kMeta);
}

void see_arguments(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  if (meta_device_depth > 0) make_on_meta_device(op, stack);
  const OperatorScope scope;
  const std::size_t num_arguments = uses_memory(op) ? op.schema().arguments().size() : 0;
  const auto see = is_norm(op) ? see_norm : touch_storage;
  for (std::size_t i = stack->size() - num_arguments; i < stack->size(); ++i) {
    const c10::IValue& argument = (*stack)[i];
    if (argument.isTensor()) {
      see(argument.toTensor());
    } else if (argument.isList()) {
      for (const c10::IValue& item : argument.toListRef()) {
        if (item.isTensor()) see(item.toTensor());
      }
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kTouchKey), stack);
}

}  // namespace

TouchRegistration::TouchRegistration(const c10::Storage& storage, TouchListener& listener)
    : storage_(storage.unsafeGetStorageImpl()) {
  Listeners& listeners = Listeners::instance();
  const std::unique_lock lock(listeners.mutex);
  TESSERA_CHECK(listeners.by_storage.emplace(storage_, &listener).second);
}

TouchRegistration::~TouchRegistration() {
  Listeners& listeners = Listeners::instance();
  const std::unique_lock lock(listeners.mutex);
  listeners.by_storage.erase(storage_);
}

void enter_meta_device() {
  if (meta_device_depth++ == 0) c10::impl::tls_set_dispatch_key_included(kTouchKey, true);
}

void leave_meta_device() {
  if (--meta_device_depth == 0) c10::impl::tls_set_dispatch_key_included(kTouchKey, false);
}

std::uint64_t current_operator() {
  return operator_number;
}

void begin_operator() {
  ++operator_number;
}

at::Tensor with_touch_key(const at::Tensor& tensor) {
  auto keyed = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set() | c10::DispatchKeySet(kTouchKey),
      tensor.dtype());
  keyed.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(),
                                                     tensor.storage_offset());
  return keyed;
}

}  // namespace tessera::fsdp

void tessera::touch(const at::Tensor& parameter) {
  fsdp::begin_operator();
  fsdp::touch_storage(parameter);
}

// Registers see_arguments as the fallback for all operators with this key (torch/library.h).
TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericWrapper, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&tessera::fsdp::see_arguments>());
}
