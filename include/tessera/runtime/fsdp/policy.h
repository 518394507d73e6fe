#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace tessera {

/// Decides which modules below a root become units; the root always becomes one. `recurse` is asked
/// from the root down, `wrap` from the leaves up, as in torch.distributed.fsdp.wrap.
class FsdpPolicy {
 public:
  virtual ~FsdpPolicy() = default;
  /// Returns whether `module` or modules below it may become units. `nonwrapped_numel`: the number
  /// of elements of all parameters at and below it that are neither ignored nor already in units.
  virtual bool recurse(const torch::nn::Module& module, std::int64_t nonwrapped_numel) const = 0;
  /// Returns whether `module`, which is not the root, becomes a unit. `nonwrapped_numel`: as for
  /// `recurse`, but also without the elements of units that this policy has made below `module`.
  virtual bool wrap(const torch::nn::Module& module, std::int64_t nonwrapped_numel) const = 0;
};

namespace detail {
template <class T, class = void>
struct ModuleImpl {
  using Type = T;
};
template <class Holder>
struct ModuleImpl<Holder, std::void_t<typename Holder::ContainedType>> {
  using Type = typename Holder::ContainedType;
};
}  // namespace detail

/// Makes a unit of each module of one of these types, or of a type derived from one. Name module
/// classes or TORCH_MODULE holders: `ModuleWrapPolicy<Block>()`.
template <class... Modules>
class ModuleWrapPolicy final : public FsdpPolicy {
 public:
  bool recurse(const torch::nn::Module&, std::int64_t) const override { return true; }
  bool wrap(const torch::nn::Module& module, std::int64_t) const override {
    return (module.as<typename detail::ModuleImpl<Modules>::Type>() || ...);
  }
};

/// Makes a unit of each module that has at least `min_nonwrapped_numel` parameter elements outside
/// of the units below it.
class SizeBasedPolicy final : public FsdpPolicy {
 public:
  explicit SizeBasedPolicy(std::int64_t min_nonwrapped_numel)
      : min_nonwrapped_numel_(min_nonwrapped_numel) {}
  bool recurse(const torch::nn::Module&, std::int64_t nonwrapped_numel) const override {
    return nonwrapped_numel >= min_nonwrapped_numel_;
  }
  bool wrap(const torch::nn::Module&, std::int64_t nonwrapped_numel) const override {
    return nonwrapped_numel >= min_nonwrapped_numel_;
  }

 private:
  std::int64_t min_nonwrapped_numel_;
};

/// Makes units of modules for which a function returns true.
class LambdaPolicy final : public FsdpPolicy {
 public:
  explicit LambdaPolicy(std::function<bool(const torch::nn::Module&)> wraps)
      : wraps_(std::move(wraps)) {}
  bool recurse(const torch::nn::Module&, std::int64_t) const override { return true; }
  bool wrap(const torch::nn::Module& module, std::int64_t) const override { return wraps_(module); }

 private:
  std::function<bool(const torch::nn::Module&)> wraps_;
};

/// Holds a policy of any kind, and can be copied. Without a policy, only the root becomes a unit.
class AnyFsdpPolicy {
 public:
  AnyFsdpPolicy() = default;
  template <class Policy, class = std::enable_if_t<std::is_base_of_v<FsdpPolicy, Policy>>>
  AnyFsdpPolicy(Policy policy) : policy_(std::make_shared<Policy>(std::move(policy))) {}

  const FsdpPolicy* get() const { return policy_.get(); }

 private:
  std::shared_ptr<const FsdpPolicy> policy_;  // shared: options are copied, policies are const
};

}  // namespace tessera
