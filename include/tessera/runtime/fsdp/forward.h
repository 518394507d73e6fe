#pragma once

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

/// A forward over a fully sharded root: while it lives, parameters have their full shapes, and an
/// operator that uses one gathers its unit. Where gradients are recorded the pass goes on after the
/// scope, up to the end of the backward; then parameters are shards again, and `.grad` holds this
/// rank's part of the average over the ranks. A scope that an exception leaves drops the pass.
/// Parameters are not to be written to meanwhile: the end of the pass throws where it sees that (a
/// write by way of `data()` or a pointer is not seen, and is lost where the unit is sharded).
/// Within it autocast keeps no copies of weights, which would be whole now, and stale in the next
/// pass. Collective in its effects: every rank does the same in the same order.
class [[nodiscard]] ForwardScope {
 public:
  /// Throws: Error(invalid_argument) where nothing at or below `root` is sharded or replicated, or
  /// a part of it has another root, or a parameter was replaced, moved or converted since.
  explicit ForwardScope(torch::nn::Module& root);
  ~ForwardScope() noexcept(false);
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;

  /// Lets a second backward through `output` (retain_graph) open the pass again; and lets the pass
  /// end where everything that was watched is dropped without a backward.
  void watch(const at::Tensor& output);
  /// Returns a floating-point tensor in the root's param_dtype, any other as it is.
  at::Tensor cast_input(at::Tensor input) const;

 private:
  std::shared_ptr<fsdp::Pass> pass_;
  int num_uncaught_;
  bool is_watched_ = false;
  bool was_autocast_cache_enabled_;
};

/// Gradients of passes that end within this scope are not reduced: they add up, unsharded, until a
/// pass outside of it does. Scopes nest. `zero_grad` does not reach what is kept here (see
/// `drop_unsynced_gradients`). Not collective.
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

/// Drops what NoSyncScope has kept in the units at and below `root`, as a step does that is given
/// up: what `zero_grad` is for `.grad`. Not collective, but for all ranks to do. Throws:
/// Error(invalid_argument) within a forward or a backward, or where nothing at or below `root` is
/// sharded or replicated.
void drop_unsynced_gradients(torch::nn::Module& root);

/// Returns whether a pass over `module`, or over a root above it, is open. Not collective.
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

/// Calls `module.forward(args...)` within a pass, with floating-point arguments in the root's
/// param_dtype. See ForwardScope.
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

}  // namespace tessera
