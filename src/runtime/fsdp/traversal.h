#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/runtime/fsdp/fully_shard.h"

namespace tessera::fsdp {

struct ShardedModule;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// A module and its name below the one that a walk began at.
struct NamedModule {
  std::string fqn;
  ModulePtr module;
};

/// Returns the modules below `root` that the policy makes units, and `root` itself at the front, in
/// the order of the module tree. Does not descend into ignored modules, nor into what is sharded or
/// replicated already.
std::vector<NamedModule> units_by_policy(const ModulePtr& root, const FullyShardOptions& options);

/// Returns whether `fully_shard` leaves the subtree of `module` alone: it is ignored, or an API has
/// been applied to it.
bool is_closed(const ModulePtr& module, const FullyShardOptions& options);

/// A parameter as it is found in the tree: the same tensor may come more than once (tied weights).
struct FoundParameter {
  std::string fqn;
  at::Tensor tensor;
};

/// Returns the parameters of `module` and of those below it that belong to no unit yet and are not
/// ignored, in the order of the module tree.
std::vector<FoundParameter> unmanaged_parameters(const ModulePtr& module,
                                                 const FullyShardOptions& options);

/// A fully sharded module in a tree. Its number is its place in the order of the tree.
struct UnitInTree {
  std::string fqn;
  std::shared_ptr<ShardedModule> sharded;
  std::size_t subtree_end;  // units from its own number to here are it and those inside
};

/// Returns the fully sharded modules at and below `root` in the order of the tree. One that stands
/// there twice counts where it comes first.
std::vector<UnitInTree> units_in_tree(const torch::nn::Module& root);

/// Calls `visit` with each parameter in the tree of `root`, a shared one as often as it stands
/// there.
template <class Visit>
void for_each_parameter(const torch::nn::Module& root, const Visit& visit) {
  for (const at::Tensor& parameter : root.parameters(/*recurse=*/false)) visit(parameter);
  for (const auto& child : root.children()) for_each_parameter(*child, visit);
}

std::string join_fqn(const std::string& prefix, const std::string& name);

}  // namespace tessera::fsdp
