#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/base/shape.h"

// The parameters to pass to an optimizer.

namespace tessera {

/// Returns the parameters at and below `module`, each once, in the order of the module tree. Pass
/// these to an optimizer, not `module.parameters()`: the latter lists a tied weight once per name,
/// and an optimizer would then update the weight once per name. Not collective.
std::vector<at::Tensor> parameters(const torch::nn::Module& module);

/// Returns the parameters at and below `module` by name, each once. A tied weight has its first
/// name.
torch::OrderedDict<std::string, at::Tensor> named_parameters(const torch::nn::Module& module);

/// A parameter with its shape in the unsharded model, and the shard that this rank holds.
struct WholeParameter {
  std::string fqn;    // relative to the module; the first name if it is a tied weight
  Shape shape;        // of the whole parameter, equal on all ranks
  at::Tensor tensor;  // the tensor that the optimizer gets; if sharded, this rank's shard
  /// Returns the number of dimensions of the whole parameter.
  std::int64_t dim() const { return static_cast<std::int64_t>(shape.size()); }
};

/// Returns the parameters of `named_parameters`, each with its shape in the unsharded model, even
/// if `fully_shard` or `shard` has sharded the parameter. Not collective.
std::vector<WholeParameter> whole_parameters(const torch::nn::Module& module);

namespace detail {
template <class Result>
struct GroupOptions {
  using Type = Result;
};
template <class Options>
struct GroupOptions<std::optional<Options>> {
  using Type = Options;
};
/// Returns `whole_parameters` without the parameters that a module updates during the backward.
std::vector<WholeParameter> parameters_to_group(const torch::nn::Module& module);
}  // namespace detail

/// Returns parameter groups for an optimizer of torch::optim. Calls `rule` with each
/// WholeParameter; `rule` returns the parameter's options. Parameters with equal options form one
/// group. Decide by `parameter.dim()` or `parameter.shape`: `parameter.tensor` may be a 1-d shard.
/// Groups are in the order of their first parameters. They are equal on all ranks if the rule uses
/// only names and shapes.
///
///     torch::optim::AdamW optimizer(tessera::parameter_groups(*model, [](const auto& parameter) {
///       return torch::optim::AdamWOptions(1e-3).weight_decay(parameter.dim() >= 2 ? 0.1 : 0);
///     }));
///
/// A rule that returns an empty std::optional leaves the parameter out. The rule also sees frozen
/// parameters. In a group, a frozen parameter does not change until it requires a gradient.
/// Parameters that a module updates during the backward (fused tables) are in no group. Not
/// collective.
template <class Rule>
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& module,
                                                                Rule&& rule) {
  using Result = std::remove_cvref_t<std::invoke_result_t<Rule&, const WholeParameter&>>;
  using Options = typename detail::GroupOptions<Result>::Type;
  static_assert(std::derived_from<Options, torch::optim::OptimizerOptions>,
                "the rule must return the options of an optimizer, such as "
                "torch::optim::AdamWOptions, or a std::optional of such options");
  std::vector<Options> options;
  std::vector<std::vector<at::Tensor>> members;  // parallel to options
  for (const WholeParameter& parameter : detail::parameters_to_group(module)) {
    std::optional<Options> its_options = rule(parameter);
    if (!its_options) continue;
    const auto same =
        std::ranges::find_if(options, [&](const Options& each) { return each == *its_options; });
    const auto group = static_cast<std::size_t>(same - options.begin());
    if (group == options.size()) {
      options.push_back(std::move(*its_options));
      members.emplace_back();
    }
    members[group].push_back(parameter.tensor);
  }
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (std::size_t group = 0; group < options.size(); ++group) {
    groups.emplace_back(std::move(members[group]), std::make_unique<Options>(options[group]));
  }
  return groups;
}

}  // namespace tessera
