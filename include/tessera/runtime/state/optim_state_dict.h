#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/runtime/state/state_dict.h"

namespace tessera {

/// Returns an optimizer's state by the names of its parameters, as PyTorch's distributed checkpoint
/// flattens it: `state.<fqn>.exp_avg`, `param_groups.0.lr`, `param_groups.0.params` (a list of
/// names). State that goes element by element with its parameter is sharded as that is; `step` is a
/// float32 tensor without dimensions, as in Python. Groups have every field that Python has, and
/// those that a checkpoint brought and libtorch does not know. Parameters without state have none
/// here; frozen ones keep theirs.
/// Optimizers: SGD, Adam, AdamW, Adagrad, RMSprop of torch::optim.
/// Collective over the model's mesh for FULL. Throws: Error(unsupported) naming another optimizer;
/// Error(invalid_argument) naming a parameter that the model does not have, or state that was made
/// before the parameter was sharded. Source: torch.distributed.checkpoint.state_dict;
/// github.com/pytorch/pytorch, change 91234.
StateDict optim_state_dict(torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                           const StateDictOptions& options = {});

/// Replaces an optimizer's state and the fields of its groups by those of `state_dict`, whole
/// tensors or parts of any layout that hold what this rank needs. Groups are matched by their
/// parameters. State that the checkpoint does not have for a parameter is dropped. All is checked
/// before anything is replaced.
/// Not collective. Throws: Error(mismatch) listing everything that is missing, unexpected or does
/// not fit; Error(unsupported) naming a field whose value libtorch cannot follow (`maximize`).
void load_optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                           const StateDict& state_dict, const LoadStateDictOptions& options = {});

/// How optimizer state names its parameters.
enum class OptimStateKey {
  param_name,  // by FQN
  param_id,    // 0, 1, … in the order of the groups, as torch.optim's own state_dict
};

/// Returns the state under the other kind of keys. The order of numbers is that of `optimizer`'s
/// groups. Not collective. Throws: Error(invalid_argument) naming a key that is of neither kind or
/// stands for no parameter. Source: FullyShardedDataParallel.rekey_optim_state_dict.
StateDict rekey_optim_state_dict(const StateDict& state_dict, OptimStateKey key,
                                 const torch::nn::Module& model,
                                 const torch::optim::Optimizer& optimizer);

}  // namespace tessera
