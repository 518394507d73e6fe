#include "runtime/fsdp/traversal.h"

#include <algorithm>

#include "runtime/fsdp/pass.h"
#include "tessera/runtime/registry/fused_updates.h"

namespace tessera::fsdp {
namespace {

using torch::nn::Module;

bool is_ignored(const ModulePtr& module, const FullyShardOptions& options) {
  return std::ranges::find(options.ignored_modules, module) != options.ignored_modules.end();
}

bool is_ignored(const at::Tensor& parameter, const FullyShardOptions& options) {
  return std::ranges::any_of(options.ignored_states,
                             [&](const at::Tensor& each) { return each.is_same(parameter); });
}

std::int64_t total_numel(const ModulePtr& module, const FullyShardOptions& options) {
  std::int64_t numel = 0;
  for (const FoundParameter& parameter : unmanaged_parameters(module, options)) {
    numel += parameter.tensor.numel();
  }
  return numel;
}

/// Chooses the units of a module tree by a policy, from the leaves up. Each step returns the number
/// of elements in the units of one subtree.
class PolicyWalk {
 public:
  PolicyWalk(const FullyShardOptions& options, std::vector<NamedModule>& units)
      : options_(options), policy_(*options.policy.get()), units_(units) {}

  std::int64_t walk(const NamedModule& at, bool is_root) {
    const std::int64_t numel = total_numel(at.module, options_);
    if (!policy_.recurse(*at.module, numel)) return 0;
    const std::size_t position = units_.size();  // a unit is listed before the units inside it
    std::int64_t wrapped_numel = 0;
    for (const auto& child : at.module->named_children()) {
      const NamedModule below{join_fqn(at.fqn, child.key()), child.value()};
      if (!is_closed(below.module, options_) && is_new(below.module)) {
        wrapped_numel += walk(below, false);
      }
    }
    if (is_root || !policy_.wrap(*at.module, numel - wrapped_numel)) return wrapped_numel;
    units_.insert(units_.begin() + static_cast<std::ptrdiff_t>(position), at);
    return numel;
  }

 private:
  /// Returns whether the module is not in the list of units yet. A module may be in the tree twice.
  bool is_new(const ModulePtr& module) const {
    return std::ranges::find(units_, module, &NamedModule::module) == units_.end();
  }

  const FullyShardOptions& options_;
  const FsdpPolicy& policy_;
  std::vector<NamedModule>& units_;
};

void collect(const ModulePtr& module, const std::string& fqn, const FullyShardOptions& options,
             std::vector<FoundParameter>& found) {
  registry::refuse_own_updates(*module, fqn, "fully_shard");
  for (const auto& parameter : module->named_parameters(/*recurse=*/false)) {
    const at::Tensor& tensor = parameter.value();
    if (!tensor.defined() || is_ignored(tensor, options) || FlatParamHandle::of(tensor)) continue;
    found.push_back({join_fqn(fqn, parameter.key()), tensor});
  }
  for (const auto& child : module->named_children()) {
    if (!is_closed(child.value(), options)) {
      collect(child.value(), join_fqn(fqn, child.key()), options, found);
    }
  }
}

void collect_units(const Module& at, const std::string& fqn, std::vector<UnitInTree>& units) {
  const auto sharded = registry::find<ShardedModule>(at);
  const std::size_t number = units.size();
  if (sharded) {
    if (std::ranges::find(units, sharded, &UnitInTree::sharded) != units.end()) return;
    units.push_back({fqn, sharded, 0});
  }
  for (const auto& child : at.named_children()) {
    collect_units(*child.value(), join_fqn(fqn, child.key()), units);
  }
  if (sharded) units[number].subtree_end = units.size();
}

}  // namespace

std::vector<UnitInTree> units_in_tree(const Module& root) {
  std::vector<UnitInTree> units;
  collect_units(root, "", units);
  return units;
}

bool is_closed(const ModulePtr& module, const FullyShardOptions& options) {
  return is_ignored(module, options) || registry::applied_api(*module);
}

std::string join_fqn(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

std::vector<NamedModule> units_by_policy(const ModulePtr& root, const FullyShardOptions& options) {
  std::vector<NamedModule> units;
  if (options.policy.get() != nullptr) PolicyWalk(options, units).walk({"", root}, true);
  units.insert(units.begin(), {"", root});
  return units;
}

std::vector<FoundParameter> unmanaged_parameters(const ModulePtr& module,
                                                 const FullyShardOptions& options) {
  std::vector<FoundParameter> found;
  collect(module, "", options, found);
  return found;
}

}  // namespace tessera::fsdp
