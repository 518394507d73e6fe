#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/runtime/fsdp/fully_shard.h"

namespace tessera::fsdp {

struct ShardedModule;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

/// A module and its name below the start of the walk.
struct NamedModule {
  std::string fqn;
  ModulePtr module;
};

/// Returns `root`, then the modules below it that the policy makes units, in the order of the
/// module tree. Skips ignored modules and those that are sharded or replicated already.
std::vector<NamedModule> units_by_policy(const ModulePtr& root, const FullyShardOptions& options);

/// Returns whether `fully_shard` skips the subtree of `module`, because the module is ignored or an
/// API (`fully_shard`, `replicate`, `shard`) was applied to it.
bool is_closed(const ModulePtr& module, const FullyShardOptions& options);

/// A parameter in the tree. A tied tensor may be found more than once.
struct FoundParameter {
  std::string fqn;
  at::Tensor tensor;
};

/// Returns the parameters at and below `module` that no unit has yet and that are not ignored, in
/// tree order. Throws: Error(unsupported) if a module updates its parameters itself.
std::vector<FoundParameter> unmanaged_parameters(const ModulePtr& module,
                                                 const FullyShardOptions& options);

/// A fully sharded module in a tree. Its number is its index in tree order.
struct UnitInTree {
  std::string fqn;
  std::shared_ptr<ShardedModule> sharded;
  std::size_t subtree_end;  // units with numbers in [its number, subtree_end) are inside it
};

/// Returns the fully sharded modules at and below `root` in tree order. A module that is in the
/// tree twice counts at its first place.
std::vector<UnitInTree> units_in_tree(const torch::nn::Module& root);

/// Calls `visit` with each parameter in the tree of `root`; with a tied parameter once per place.
template <class Visit>
void for_each_parameter(const torch::nn::Module& root, const Visit& visit) {
  for (const at::Tensor& parameter : root.parameters(/*recurse=*/false)) visit(parameter);
  for (const auto& child : root.children()) for_each_parameter(*child, visit);
}

std::string join_fqn(const std::string& prefix, const std::string& name);

}  // namespace tessera::fsdp
