#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "tessera/runtime/state/module_state_dict.h"

namespace tessera {

/// Returns an optimizer's state by parameter names, flattened as by PyTorch's distributed
/// checkpoint: `state.<fqn>.exp_avg`, `param_groups.0.lr`, `param_groups.0.params` (a list of
/// names). Elementwise state is sharded like its parameter. `step` is a 0-d float32 tensor, as in
/// Python, or int64 if float32 would round it. Groups have all fields of Python's groups, and the
/// fields of a loaded checkpoint that libtorch does not know. A parameter without state has no
/// entries; a frozen one with state has them. Parameters that a module updates during the backward
/// (fused tables) are included, in groups of their own after the groups of the optimizer.
///
/// Optimizers: SGD, Adam, AdamW, Adagrad, RMSprop of torch::optim, not classes derived from them.
/// Collective over the model's mesh for FULL.
/// Throws:
/// - Error(unsupported) naming an optimizer of another class;
/// - Error(invalid_argument) within a pass or unshard_params, or if the optimizer has a parameter
///   twice, one that the model lacks, or state from before the parameter was sharded.
///
/// Source: torch.distributed.checkpoint.state_dict; github.com/pytorch/pytorch, change 91234.
StateDict optim_state_dict(torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                           const StateDictOptions& options = {});

/// Returns the state of modules that update their own parameters (fused tables). Use it if such
/// modules update all parameters of the model, so that there is no optimizer.
StateDict optim_state_dict(torch::nn::Module& model, const StateDictOptions& options = {});

/// Replaces an optimizer's state and its groups' fields by those of `state_dict`. Takes whole
/// tensors, or shards in any layout that include this rank's elements. Groups may be nested or
/// flattened (see `flatten_optim_state_dict`), and are matched by their parameters. A parameter
/// that was saved without state loses its state. Checks all before it replaces any. Collective only
/// with `rank0_only`: if one rank throws, all do, and none loads. Throws: as `optim_state_dict`;
/// Error(mismatch) listing all that is missing, unexpected or does not fit, or naming a bad `step`;
/// Error(unsupported) naming a field whose value libtorch does not support (`maximize`).
void load_optim_state_dict(torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                           const StateDict& state_dict, const LoadStateDictOptions& options = {});

/// Replaces the state of modules that update their own parameters (fused tables). Use it if such
/// modules update all parameters of the model, so that there is no optimizer.
void load_optim_state_dict(torch::nn::Module& model, const StateDict& state_dict,
                           const LoadStateDictOptions& options = {});

/// Returns `state_dict` with the fields of each group repeated for each of its parameters:
/// `param_groups.<fqn>.lr` instead of `param_groups.0.lr` and `param_groups.0.params`. Each name is
/// one key, dots included. So the optimizers of several parts of a model (pipeline stages) can save
/// into one checkpoint. Leaves out the fields of a group without parameters, with a warning
/// (TORCH_WARN). Not collective. Throws: Error(invalid_argument) if a group does not list its
/// parameters by name. Source: `flatten_optimizer_state_dict` of
/// torch.distributed.checkpoint.state_dict.
StateDict flatten_optim_state_dict(const StateDict& state_dict);

/// How optimizer state identifies its parameters.
enum class OptimStateKey {
  param_name,  // by FQN
  param_id,    // 0, 1, … in the order of the groups, as in torch.optim's state_dict
};

/// Returns `state_dict` with its keys converted to the kind `key`. They must be of the other kind.
/// The numbers of `param_id` follow the order of `optimizer`'s groups. Not collective. Throws:
/// Error(invalid_argument) naming a key that is of the kind `key` already or belongs to no
/// parameter, or if the state dict is flattened (see `flatten_optim_state_dict`). Source:
/// FullyShardedDataParallel.rekey_optim_state_dict.
StateDict rekey_optim_state_dict(const StateDict& state_dict, OptimStateKey key,
                                 const torch::nn::Module& model,
                                 const torch::optim::Optimizer& optimizer);

}  // namespace tessera
