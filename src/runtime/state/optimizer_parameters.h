#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/runtime/registry/state_dict.h"

namespace tessera::state {

/// The keys of parameters in a model's state dict. A key differs from the name in the module tree
/// only if a state dict hook has renamed the entry.
class ParameterKeys {
 public:
  /// Runs the model's state dict hooks.
  explicit ParameterKeys(torch::nn::Module& model);
  /// Returns the key of the parameter with this name in the module tree.
  const std::string& of(const std::string& module_fqn) const;
  /// Returns the parameter's entry, of type SHARDED; nullptr if the state dict has none.
  const StateTensor* entry(const std::string& module_fqn) const;

 private:
  StateDict state_dict_;
  std::unordered_map<std::string, std::string> keys_;  // by name in the module tree
};

/// Throws Error(invalid_argument) naming a parameter that the optimizer holds twice, in one group
/// or two, because it would be updated twice per step.
void refuse_parameters_held_twice(const torch::nn::Module& model,
                                  const torch::optim::Optimizer& optimizer);

/// A parameter of an optimizer, with its name and sharding in the model.
struct OptimizerParameter {
  std::size_t group;
  at::Tensor tensor;   // as the optimizer has it
  std::string fqn;     // key in the model's state dict; the first of a tied parameter's names
  StateTensor layout;  // the parameter itself
};

/// Returns the parameters of all groups, in order, without those that modules update by themselves
/// (see registry::FusedUpdates). Throws: Error(invalid_argument) naming group and number of a
/// parameter that the model does not have, or a parameter that is held twice; Error(unsupported)
/// naming a parameter whose shape a state dict hook has changed.
std::vector<OptimizerParameter> parameters_of(torch::nn::Module& model,
                                              const torch::optim::Optimizer& optimizer);

/// Returns only the keys of the parameters in `parameters_of`, by group.
std::vector<std::vector<std::string>> parameter_names(torch::nn::Module& model,
                                                      const torch::optim::Optimizer& optimizer);

/// Returns an entry with the parameter's layout and the dtype of `local`. `local` is this rank's
/// shard. Shape: `local` has as many elements as this rank holds.
StateTensor laid_out_as(const OptimizerParameter& parameter, const at::Tensor& local);

/// Returns `step` as Python saves it: float32, or int64 if float32 would round it.
at::Tensor step_tensor(std::int64_t step);

}  // namespace tessera::state
