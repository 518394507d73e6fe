#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/runtime/registry/registry.h"

namespace tessera {
namespace fsdp {
class Pass;
}

/// Opens a pass: a forward over `root` and its backward. The scope is the forward; see also
/// `tessera::forward`. During a pass parameters have full shapes: an operator that uses one
/// all-gathers its unit (the parameters of one sharded module). The pass ends with the backward or,
/// under NoGradGuard, with the scope. Then parameters are shards again, and `.grad` is this rank's
/// shard of the average over the ranks. An exception that leaves the scope cancels the pass.
/// Autocast's weight cache is off in the scope. Collective: all ranks run the same passes in the
/// same order. Do not write to parameters during a pass: its end throws if it detects a write.
/// Writes through `data()` or a pointer are not detected, and are lost if the unit is sharded.
class [[nodiscard]] ForwardScope {
 public:
  /// Throws: Error(mismatch) if ranks have different units; Error(invalid_argument) if
  /// - nothing at or below `root` is sharded or replicated;
  /// - a unit in it belongs to another root (a forward was run on a submodule or outer module);
  /// - its units are on several devices, or embedding tables were added after the first forward;
  /// - a parameter was replaced, moved or converted, or is within `unshard_params`.
  explicit ForwardScope(torch::nn::Module& root);
  ~ForwardScope() noexcept(false);
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// Call it for each output of the forward. Then a second backward through `output` (retain_graph)
  /// opens the pass again, and the pass also ends if all outputs are destroyed without a backward.
  void watch(const at::Tensor& output);
  /// Casts a float tensor to the root's param_dtype, unless MixedPrecision::inputs is `keep`.
  at::Tensor cast_input(at::Tensor input) const;

 private:
  std::shared_ptr<fsdp::Pass> pass_;
  int num_uncaught_;
  bool is_watched_ = false;
  bool was_autocast_cache_enabled_;
};

/// A scope in which gradients are not averaged over the ranks. Gradients of passes that end within
/// the scope accumulate unsharded on each rank; the next pass that ends outside of it averages them
/// too. Within the scope, FULL_SHARD keeps parameters gathered from the forward to the backward, as
/// SHARD_GRAD_OP does. Scopes nest. `zero_grad` does not clear gradients of units that accumulate
/// (see `drop_unsynced_gradients`). All ranks must use the scope for the same passes; entering it
/// is not collective. Give it ForwardScope's root. Throws: Error(invalid_argument) if nothing at or
/// below `root` is sharded or replicated, or if a unit in it belongs to another root.
class [[nodiscard]] NoSyncScope {
 public:
  explicit NoSyncScope(torch::nn::Module& root);
  ~NoSyncScope();
  NoSyncScope(const NoSyncScope&) = delete;
  NoSyncScope& operator=(const NoSyncScope&) = delete;

 private:
  std::shared_ptr<fsdp::Pass> pass_;
  bool is_outermost_;
};

/// Drops the unsharded gradients that NoSyncScope has accumulated for units at and below `root`.
/// (Gradients of replicated modules are in `.grad`; `zero_grad` clears them.) Not collective, but
/// all ranks must call it. Throws: Error(invalid_argument) within a forward or backward, if `root`
/// has no sharded or replicated module, or if its units belong to another root (see ForwardScope).
void drop_unsynced_gradients(torch::nn::Module& root);

/// Returns whether sharded parameters at or below `module` are in an open pass. Not collective.
bool is_in_pass(const torch::nn::Module& module);

namespace detail {

template <class T>
decltype(auto) cast_input(const ForwardScope& scope, T&& value) {
  if constexpr (std::is_same_v<std::remove_cvref_t<T>, at::Tensor>) {
    return scope.cast_input(std::forward<T>(value));
  } else {
    return std::forward<T>(value);
  }
}

inline void watch(ForwardScope& scope, const at::Tensor& output) {
  scope.watch(output);
}
template <class T>
void watch(ForwardScope& scope, const std::vector<T>& outputs) {
  for (const T& output : outputs) watch(scope, output);
}
template <class... Ts>
void watch(ForwardScope& scope, const std::tuple<Ts...>& outputs);
template <class A, class B>
void watch(ForwardScope& scope, const std::pair<A, B>& outputs) {
  watch(scope, outputs.first);
  watch(scope, outputs.second);
}
template <class T>
void watch(ForwardScope& /*scope*/, const T& /*no tensor*/) {}
template <class... Ts>
void watch(ForwardScope& scope, const std::tuple<Ts...>& outputs) {
  std::apply([&](const Ts&... each) { (watch(scope, each), ...); }, outputs);
}

}  // namespace detail

/// Returns `module.forward(args...)`, called in a ForwardScope. Applies `cast_input` to arguments
/// that are tensors, and `watch` to tensors in the output (also in a vector, pair or tuple).
template <class Module, class... Args>
  requires std::is_base_of_v<torch::nn::Module, Module>
auto forward(Module& module, Args&&... args) {
  ForwardScope scope(module);
  auto output = module.forward(detail::cast_input(scope, std::forward<Args>(args))...);
  detail::watch(scope, output);
  return output;
}
template <class Module, class... Args>
auto forward(const std::shared_ptr<Module>& module, Args&&... args) {
  return forward(*module, std::forward<Args>(args)...);
}
template <class Impl, class... Args>
auto forward(const torch::nn::ModuleHolder<Impl>& module, Args&&... args) {
  return forward(*module.ptr(), std::forward<Args>(args)...);
}

/// All-gathers the unit of a sharded parameter now, for code that reads `data_ptr()`. Does nothing
/// for other tensors. Collective if the unit is not gathered yet. Throws: Error(invalid_argument)
/// outside of a pass, if the parameter has requires_grad and gradients are enabled.
void touch(const at::Tensor& parameter);

}  // namespace tessera
