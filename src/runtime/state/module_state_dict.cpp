#include "tessera/runtime/state/module_state_dict.h"

#include <torch/types.h>

#include <algorithm>
#include <map>
#include <unordered_map>

#include "runtime/registry/gradient_hook.h"
#include "runtime/registry/mesh_around.h"
#include "runtime/registry/own_state_dict_hooks.h"
#include "runtime/registry/parameter_shards.h"
#include "runtime/registry/state_tensor_conversion.h"
#include "runtime/state/sharded_state_dict.h"
#include "runtime/weak_tensor.h"
#include "tessera/base/error.h"
#include "tessera/runtime/registry/registry.h"

namespace tessera {
namespace {

using torch::nn::Module;

/// The options that a StateDictTypeScope sets for its module.
struct ConfiguredType final : registry::ModuleState {
  std::optional<StateDictOptions> options;
};

/// Returns whether `module` or a module below it has a state dict pre hook.
bool has_pre_hook(const Module& module) {
  const auto hooks = registry::find<registry::StateDictHooks>(module);
  if (hooks && !hooks->pre.empty()) return true;
  return std::ranges::any_of(module.children(),
                             [](const auto& child) { return has_pre_hook(*child); });
}

class Walk {
 public:
  enum class Scopes { obey, ignore };

  /// `equal`: all ranks have equal copies of a tensor. `own`: the copies may differ.
  enum class Copies { own, equal };

  explicit Walk(const Module& root, Scopes scopes)
      : scopes_(scopes), has_pre_hook_(has_pre_hook(root)) {
    const dist::Mesh mesh = mesh_of(root);
    is_first_rank_ = mesh.rank() == 0;
    num_ranks_ = mesh.world_size();
  }

  void visit(Module& module, const std::string& prefix, StateDictOptions options,
             Copies parameters = Copies::own) {
    if (registry::applied_api(module) == "replicate") parameters = Copies::equal;
    const auto configured = registry::find<ConfiguredType>(module);
    const bool is_own = scopes_ == Scopes::obey && configured && configured->options;
    if (is_own) options = *configured->options;
    if (options.rank0_only && options.type != FULL) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "rank0_only of " + module.name(),
                            "the type FULL", "another type",
                            "with other types, each rank has only its own shards: leave "
                            "rank0_only off");
    }
    const auto hooks = registry::find<registry::StateDictHooks>(module);
    if (hooks) {
      // Iterates over a copy, because a hook may remove itself.
      for (const auto& [number, hook] : std::map(hooks->pre)) hook(module, prefix, options);
    }
    const bool is_dropped = options.rank0_only && !is_first_rank_;
    // A post hook may undo what a pre hook did to the module, so it must run on all ranks, and all
    // ranks then need the elements. Without pre hooks, post hooks run only where entries are kept.
    StateDictOptions collected = options;
    if (has_pre_hook_) collected.rank0_only = false;
    for (const auto& each : module.named_parameters(/*recurse=*/false)) {
      // `replicate` does not keep the parameters of ignored_states equal; they lack its hook.
      const bool is_kept_equal =
          each.value().defined() && registry::gradient_hook(each.value()) != nullptr;
      take(prefix + each.key(), each.value(), collected, is_kept_equal ? parameters : Copies::own);
    }
    // Each rank has its own buffers, such as BatchNorm's running statistics.
    for (const auto& each : module.named_buffers(/*recurse=*/false)) {
      take(prefix + each.key(), each.value(), collected, Copies::own);
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), prefix + child.key() + ".", options, parameters);
    }
    if (hooks) {
      for (const auto& [number, hook] : std::map(hooks->post)) {
        const bool is_own_hook = registry::is_own_post_hook(number);
        if (is_dropped && !has_pre_hook_ && !is_own_hook) continue;
        hook(module, state_dict_, prefix, is_own_hook ? collected : options);
      }
    }
    if (prefix.empty()) refuse_shards();
    const bool is_boundary = prefix.empty() || is_own;
    if (is_boundary && is_dropped) drop(prefix);
  }

  StateDict result() {
    follow_renamed_targets();
    return std::move(state_dict_);
  }

 private:
  void take(const std::string& fqn, const at::Tensor& tensor, const StateDictOptions& options,
            Copies copies) {
    if (!tensor.defined()) return;
    const auto shard = registry::find_shard(tensor);
    const int num_holders = shard && shard->group ? shard->group->size() : 1;
    if (num_holders > num_ranks_) refuse_shard(fqn);
    const auto [first, is_new] = fqns_.emplace(tensor.unsafeGetTensorImpl(), fqn);
    if (!is_new) {
      state_dict_.set(fqn, StateAlias{first->second});
      return;
    }
    StateTensor entry = StateTensor::whole(tensor);
    entry.module_fqn = fqn;
    at::Tensor& own = entry.local_shards.front().tensor;
    if (options.offload_to_cpu && !own.is_cpu()) {
      own = own.to(at::kCPU);
    } else if (options.type == FULL && (is_first_rank_ || !options.rank0_only)) {
      own = own.clone();
    }
    // If the ranks' copies may differ, rank 0's copy is saved.
    if (options.type == SHARDED && copies == Copies::own && num_ranks_ > 1) {
      entry.layout = state::layout_of_own_copies(entry.shape);
    }
    if (num_holders > 1) shards_.push_back({fqn, WeakTensor(own)});
    state_dict_.set(fqn, std::move(entry));
  }

  /// If a hook has moved a tied tensor to another key, makes its aliases name that key.
  void follow_renamed_targets() {
    std::unordered_map<std::string, std::string> keys;  // by the tensor's name in the module tree
    for (const StateDict::Item& item : state_dict_) {
      const auto* const tensor = std::get_if<StateTensor>(&item.entry);
      if (tensor != nullptr) keys.emplace(tensor->module_fqn, item.fqn);
    }
    for (StateDict::Item& item : state_dict_) {
      auto* const alias = std::get_if<StateAlias>(&item.entry);
      if (alias == nullptr || state_dict_.contains(alias->target)) continue;
      if (const auto key = keys.find(alias->target); key != keys.end()) alias->target = key->second;
    }
  }

  /// Throws if an entry is still a shard: the hooks of the unit that has it have not replaced it,
  /// so the unit is not in this tree.
  void refuse_shards() const {
    for (const auto& [fqn, weak] : shards_) {
      const at::Tensor shard = weak.lock();
      if (!shard.defined()) continue;
      for (const StateDict::Item& item : state_dict_) {
        const auto* const entry = std::get_if<StateTensor>(&item.entry);
        if (entry == nullptr || entry->local_shards.size() != 1) continue;
        if (entry->local_shards.front().tensor.is_same(shard)) refuse_shard(fqn);
      }
    }
  }

  /// The parameter is a shard of a unit that is not in this tree: it is tied to a parameter of some
  /// other module.
  [[noreturn]] static void refuse_shard(const std::string& fqn) {
    throw Error::expected(ErrorKind::invalid_argument, {.fqn = fqn}, "sharded parameter",
                          "a module that contains the sharded module", "one that does not",
                          "is it tied to a weight of another module? use a module that has both");
  }

  void drop(const std::string& prefix) {
    std::vector<std::string> fqns;
    for (const StateDict::Item& item : state_dict_) {
      if (item.fqn.starts_with(prefix)) fqns.push_back(item.fqn);
    }
    for (const std::string& fqn : fqns) state_dict_.erase(fqn);
  }

  Scopes scopes_;
  bool has_pre_hook_ = false;
  bool is_first_rank_ = true;
  int num_ranks_ = 1;
  StateDict state_dict_;
  std::unordered_map<const at::TensorImpl*, std::string> fqns_;
  std::vector<std::pair<std::string, WeakTensor>> shards_;  // as taken, before hooks replace them
};

void collect_meshes(const Module& module, std::optional<dist::Mesh>& found) {
  auto mesh = registry::applied_mesh(module);
  if (const auto around = registry::find<registry::MeshAround>(module); around && !mesh) {
    mesh = around->mesh;
  }
  if (mesh) {
    if (found && found->world_size() != mesh->world_size() && found->world_size() > 1 &&
        mesh->world_size() > 1) {
      throw Error::expected(ErrorKind::invalid_argument, {}, "meshes of the modules in one model",
                            "one world size",
                            "meshes of " + std::to_string(found->world_size()) + " and of " +
                                std::to_string(mesh->world_size()) + " ranks",
                            "give all modules of a model the same mesh");
    }
    if (!found || mesh->world_size() > found->world_size()) found = std::move(mesh);
  }
  for (const auto& child : module.children()) collect_meshes(*child, found);
}

}  // namespace

dist::Mesh mesh_of(const Module& module) {
  std::optional<dist::Mesh> found;
  collect_meshes(module, found);
  return found.value_or(dist::Mesh());
}

StateDict state_dict(Module& module, const StateDictOptions& options) {
  const at::NoGradGuard no_grad;
  Walk walk(module, Walk::Scopes::obey);
  walk.visit(module, "", options);
  return walk.result();
}

StateDict state::sharded_state_dict(Module& module) {
  const at::NoGradGuard no_grad;
  Walk walk(module, Walk::Scopes::ignore);
  walk.visit(module, "", {.type = SHARDED});
  return walk.result();
}

StateDictTypeScope::StateDictTypeScope(Module& module, const StateDictOptions& options)
    : module_(registry::weak_module(module)) {
  auto configured = registry::find<ConfiguredType>(module);
  if (!configured) {
    configured = std::make_shared<ConfiguredType>();
    registry::attach(module, configured);
  }
  before_ = std::exchange(configured->options, options);
}

StateDictTypeScope::~StateDictTypeScope() {
  const auto module = module_.lock();
  if (!module) return;
  if (const auto configured = registry::find<ConfiguredType>(*module)) {
    configured->options = before_;
  }
}

}  // namespace tessera
