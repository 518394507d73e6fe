#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <string>
#include <vector>

#include "tessera/runtime/registry/state_dict.h"

namespace tessera::state {

/// A parameter of an optimizer: what it is called in the model, and how it is sharded there.
struct OptimizerParameter {
  std::size_t group;
  at::Tensor tensor;   // as the optimizer has it
  std::string fqn;     // the first of a tied parameter's names
  StateTensor layout;  // the parameter itself
};

/// Returns the parameters of all groups, in order, without those that their modules update by
/// themselves (see registry::FusedUpdates). Throws: Error(invalid_argument) naming the group
/// and number of one that the model does not have.
std::vector<OptimizerParameter> parameters_of(torch::nn::Module& model,
                                              const torch::optim::Optimizer& optimizer);

/// Returns the names alone, by group.
std::vector<std::vector<std::string>> parameter_names(const torch::nn::Module& model,
                                                      const torch::optim::Optimizer& optimizer);

/// Returns an entry that is laid out as the parameter is, of another dtype, with `local` as what
/// this rank holds of it. Shape: `local` has as many elements as this rank holds.
StateTensor laid_out_as(const OptimizerParameter& parameter, const at::Tensor& local);

/// Returns `step` as Python has it: float32, or int64 where float32 would round it.
at::Tensor step_tensor(std::int64_t step);

}  // namespace tessera::state
