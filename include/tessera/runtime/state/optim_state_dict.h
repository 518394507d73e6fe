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
/// here; frozen ones keep theirs. Parameters that a module updates within the backward
/// (FusedEmbeddingBagCollection, `shard`) have their state here too, in groups of their own behind
/// the optimizer's, whether that has them or not.
/// Optimizers: SGD, Adam, AdamW, Adagrad, RMSprop of torch::optim.
/// Collective over the model's mesh for FULL. Throws: Error(unsupported) naming another optimizer;
/// Error(invalid_argument) naming a parameter that the model does not have, or state that was made
/// before the parameter was sharded. Source: torch.distributed.checkpoint.state_dict;
/// github.com/pytorch/pytorch, change 91234.
StateDict optim_state_dict(torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                           const StateDictOptions& options = {});

/// The same of a model that has no optimizer but what its modules update by themselves.
StateDict optim_state_dict(torch::nn::Module& model, const StateDictOptions& options = {});

/// Replaces an optimizer's state and the fields of its groups by those of `state_dict`, whole
/// tensors or parts of any layout that hold what this rank needs, nested or flattened. Groups are
/// matched by their parameters. A parameter that was saved without state loses its own. All is
/// checked before anything is replaced. Not collective, but with `rank0_only`. Throws:
/// Error(mismatch) listing everything that is missing, unexpected or does not fit;
/// Error(unsupported) naming a field whose value libtorch cannot follow (`maximize`).
void load_optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                           const StateDict& state_dict, const LoadStateDictOptions& options = {});

/// The same of a model that has no optimizer but what its modules update by themselves.
void load_optim_state_dict(torch::nn::Module& model, const StateDict& state_dict,
                           const LoadStateDictOptions& options = {});

/// Returns the state with the fields of its groups told for each parameter:
/// `param_groups.<fqn>.lr` instead of `param_groups.0.lr` and `param_groups.0.params`; every key is
/// one step. So optimizers of parts of a model, pipeline stages for one, save into one checkpoint.
/// Not collective. Throws: Error(invalid_argument) where a group's parameters are not told by name.
/// Source: `flatten_optimizer_state_dict` of torch.distributed.checkpoint.state_dict.
StateDict flatten_optim_state_dict(const StateDict& state_dict);

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
