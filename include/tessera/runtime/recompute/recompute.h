#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/pimpl.h>

#include <functional>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace tessera {

/// How `recompute` gets back the tensors that the first call did not keep.
enum class Recomputation {
  /// Saved-tensor hooks: autograd stores a placeholder instead of each saved tensor. When a
  /// backward reads the first placeholder, the function runs again. Works with autograd::grad.
  /// `recompute` throws Error(unsupported) under Python's engine. In PyTorch: use_reentrant=False.
  saved_tensors,
  /// One autograd node for the whole function. The backward of this node runs the function again,
  /// and then runs a nested backward through the second call. Not for torch::autograd::grad. In
  /// PyTorch: use_reentrant=True.
  reentrant,
};

/// Whether the second call draws the same random numbers as the first, as dropout needs.
enum class RngState { preserve, leave };

/// Options of `recompute`.
struct RecomputeOptions {
  /// How the function is run again.
  Recomputation recomputation = Recomputation::saved_tensors;
  /// Default: both calls draw the same random numbers, on the CPU and on the devices of `args`.
  RngState rng_state = RngState::preserve;
};

namespace detail {

using RecomputeBody = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>&)>;
std::vector<at::Tensor> recompute(RecomputeBody body, const std::vector<at::Tensor>& inputs,
                                  const RecomputeOptions& options);

template <class T>
inline constexpr bool is_tensor = std::is_same_v<std::remove_cvref_t<T>, at::Tensor>;

/// Calls a function, or the `forward` of the module that a holder or pointer refers to.
template <class F, class... Args>
decltype(auto) call(F& function, Args&&... args) {
  if constexpr (std::is_invocable_v<F&, Args...>) {
    return std::invoke(function, std::forward<Args>(args)...);
  } else {
    return function->forward(std::forward<Args>(args)...);
  }
}

/// Assigns `tensors`, in order, to the tensors among `args`.
template <class Tuple>
void fill_tensors(Tuple& args, const std::vector<at::Tensor>& tensors) {
  std::size_t next = 0;
  const auto fill = [&](auto& arg) {
    if constexpr (is_tensor<decltype(arg)>) arg = tensors[next++];
  };
  std::apply([&](auto&... each) { (fill(each), ...); }, args);
}

template <class Result>
std::vector<at::Tensor> flatten(Result&& result) {
  if constexpr (is_tensor<Result>) {
    return {std::forward<Result>(result)};
  } else if constexpr (std::is_same_v<std::remove_cvref_t<Result>, std::vector<at::Tensor>>) {
    return std::forward<Result>(result);
  } else {
    return std::apply([](auto&&... each) { return std::vector<at::Tensor>{each...}; },
                      std::forward<Result>(result));
  }
}

template <class Result>
Result unflatten(std::vector<at::Tensor> tensors) {
  if constexpr (is_tensor<Result>) {
    return std::move(tensors[0]);
  } else if constexpr (std::is_same_v<Result, std::vector<at::Tensor>>) {
    return tensors;
  } else {
    Result result;
    fill_tensors(result, tensors);
    return result;
  }
}

}  // namespace detail

/// Calls `function(args...)` and keeps only the tensors among `args` for the backward (activation
/// checkpointing). The backward calls `function` again to compute the other tensors that it needs.
/// `function` is a callable, a module holder or a shared_ptr to a module. It returns a tensor, or a
/// vector or tuple of tensors, and must do the same in both calls. It may call `recompute` itself.
/// `function` and `args` are copied: what a lambda captures by reference must outlive the backward.
/// Not collective, but in a pass of fully sharded modules the second call gathers them again.
///
/// The backward throws: Error(mismatch) if the second call saves more or fewer tensors, or tensors
/// of other shapes (`reentrant` checks neither); Error(unsupported) for `reentrant` under
/// autograd::grad. Source: torch.utils.checkpoint; Chen et al., https://arxiv.org/abs/1604.06174.
template <class F, class... Args>
auto recompute(const RecomputeOptions& options, F&& function, Args&&... args) {
  using Result =
      std::remove_cvref_t<decltype(detail::call(std::declval<std::decay_t<F>&>(), args...))>;
  std::vector<at::Tensor> inputs;
  const auto collect = [&](const auto& arg) {
    if constexpr (detail::is_tensor<decltype(arg)>) inputs.push_back(arg);
  };
  (collect(args), ...);
  std::tuple<std::remove_cvref_t<Args>...> kept(std::forward<Args>(args)...);
  detail::fill_tensors(kept, std::vector<at::Tensor>(inputs.size()));
  detail::RecomputeBody body = [function = std::decay_t<F>(std::forward<F>(function)),
                                kept = std::move(kept)](
                                   const std::vector<at::Tensor>& tensors) mutable {
    auto filled = kept;
    detail::fill_tensors(filled, tensors);
    return detail::flatten(std::apply(
        [&](auto&... each) -> decltype(auto) { return detail::call(function, each...); }, filled));
  };
  return detail::unflatten<Result>(detail::recompute(std::move(body), inputs, options));
}
template <class F, class... Args>
  requires(!std::is_same_v<std::remove_cvref_t<F>, RecomputeOptions>)
auto recompute(F&& function, Args&&... args) {
  return recompute(RecomputeOptions{}, std::forward<F>(function), std::forward<Args>(args)...);
}

}  // namespace tessera
