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
  /// Returns the key of the parameter with this name in the module tree; the name if it has no key.
  const std::string& of(const std::string& module_fqn) const;
  /// Returns the parameter's entry, of type SHARDED; nullptr if the state dict has none.
  const StateTensor* entry(const std::string& module_fqn) const;

 private:
  StateDict state_dict_;
  // Keys in the state dict, by name in the module tree.
  std::unordered_map<std::string, std::string> keys_;
};

/// Throws Error(invalid_argument) with the name of a parameter that the optimizer has twice, in one
/// group or in two, because each step would update it twice.
void refuse_parameters_held_twice(const torch::nn::Module& model,
                                  const torch::optim::Optimizer& optimizer);

/// A parameter of an optimizer, with its name and sharding in the model.
struct OptimizerParameter {
  std::size_t group;
  at::Tensor tensor;   // the tensor that the optimizer updates
  std::string fqn;     // key in the model's state dict; of a tied parameter, the first key
  StateTensor layout;  // the parameter's entry in the state dict, with its shards
};

/// Returns the parameters of all groups, in order, except those that modules update in the backward
/// (registry::FusedUpdates). Throws: Error(invalid_argument) for a parameter that the model lacks
/// (naming group and index), that a state dict hook has removed, or that the optimizer has twice;
/// Error(unsupported) if a state dict hook has changed a parameter's shape.
std::vector<OptimizerParameter> parameters_of(torch::nn::Module& model,
                                              const torch::optim::Optimizer& optimizer);

/// Returns only the keys of the parameters in `parameters_of`, by group.
std::vector<std::vector<std::string>> parameter_names(torch::nn::Module& model,
                                                      const torch::optim::Optimizer& optimizer);

/// Returns a state dict entry for optimizer state: it has the parameter's layout, and `local` with
/// its dtype as this rank's shard. Shares the memory of `local` if `local` is contiguous. Throws:
/// Error(invalid_argument) if `local` has not as many elements as this rank holds of the parameter.
StateTensor laid_out_as(const OptimizerParameter& parameter, const at::Tensor& local);

/// Returns `step` as Python saves it: float32, or int64 if float32 would round it.
at::Tensor step_tensor(std::int64_t step);

}  // namespace tessera::state
