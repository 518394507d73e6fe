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

// What an optimizer is given.

namespace tessera {

/// Returns the parameters at and below `module`, each once, in the order of the module tree. Use it
/// in the place of `module.parameters()`, which lists a tied parameter once under each of its
/// names: an optimizer would then step it as often. Not collective.
std::vector<at::Tensor> parameters(const torch::nn::Module& module);

/// Returns the same parameters with their names below `module`: a tied one under its first name.
torch::OrderedDict<std::string, at::Tensor> named_parameters(const torch::nn::Module& module);

/// A parameter as the unsharded model has it, and what this rank holds of it.
struct WholeParameter {
  std::string fqn;    // below the module that was asked; of a tied one the first
  Shape shape;        // of the whole parameter, equal on all ranks
  at::Tensor tensor;  // as the optimizer gets it: this rank's part where it is sharded
  /// Returns the number of dimensions of the whole parameter.
  std::int64_t dim() const { return static_cast<std::int64_t>(shape.size()); }
};

/// Returns what `named_parameters` does, with whole shapes: of parameters that `fully_shard` has
/// sharded, of tables that `shard` has, and of others, which are whole. Not collective.
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
/// Returns those that an optimizer of torch::optim has anything to do with: `whole_parameters`
/// without those that their module updates within the backward.
std::vector<WholeParameter> parameters_to_group(const torch::nn::Module& module);
}  // namespace detail

/// Returns parameter groups for an optimizer of torch::optim. `rule` is called with each
/// WholeParameter and returns its options; parameters with equal options are one group. Decide by
/// `parameter.dim()` or `parameter.shape`: `parameter.tensor` may be a part, which has one
/// dimension. Groups are in the order in which their first parameters are met, and equal on all
/// ranks for a rule that looks at names and whole shapes.
///
///     torch::optim::AdamW optimizer(tessera::parameter_groups(*model, [](const auto& parameter) {
///       return torch::optim::AdamWOptions(1e-3).weight_decay(parameter.dim() >= 2 ? 0.1 : 0);
///     }));
///
/// A rule that returns std::optional leaves out parameters for which it returns nothing. A frozen
/// parameter is asked about like any other: in a group it stays as it is, as it gets no gradient,
/// and is trained once it requires one. Parameters that their module updates within the backward
/// (fused tables) are in no group. Not collective.
template <class Rule>
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const torch::nn::Module& module,
                                                                Rule&& rule) {
  using Result = std::remove_cvref_t<std::invoke_result_t<Rule&, const WholeParameter&>>;
  using Options = typename detail::GroupOptions<Result>::Type;
  static_assert(std::derived_from<Options, torch::optim::OptimizerOptions>,
                "the rule returns options of an optimizer, such as torch::optim::AdamWOptions, or "
                "a std::optional of them");
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
