#include <torch/types.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/json.h"
#include "runtime/registry/state_tensor_conversion.h"
#include "runtime/state/broadcast_text.h"
#include "runtime/state/load_hints.h"
#include "runtime/state/load_problems.h"
#include "runtime/state/sharded_state_dict.h"
#include "runtime/state/value_tree.h"
#include "runtime/torch_bridge.h"
#include "tessera/base/error.h"
#include "tessera/runtime/state/module_state_dict.h"

namespace tessera {
namespace {

using torch::nn::Module;

struct Assignment {
  std::string fqn;
  const StateTensor* entry;
  at::Tensor to;
  at::Tensor from;
};

/// Returns whether `other` has the elements of `first` if both are loaded as `dtype`.
bool are_tied(const at::Tensor& first, const at::Tensor& other, at::ScalarType dtype) {
  return state::have_same_elements(first.to(dtype), other.to(dtype));
}

class LoadWalk {
 public:
  LoadWalk(StateDict& state_dict, LoadReport& report) : state_dict_(state_dict), report_(report) {}

  void visit(Module& module, const std::string& prefix) {
    if (const auto hooks = registry::find<registry::StateDictHooks>(module)) {
      for (const auto& [number, hook] :
           std::map(hooks->load_pre)) {  // a copy, because a hook may remove itself
        hook(module, state_dict_, prefix, report_);
      }
    }
    for (const auto& each : module.named_parameters(/*recurse=*/false)) {
      take(prefix + each.key(), each.value());
    }
    for (const auto& each : module.named_buffers(/*recurse=*/false)) {
      take(prefix + each.key(), each.value());
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), prefix + child.key() + ".");
    }
  }

  void report_unexpected() {
    if (report_.options.allow_unexpected) return;
    for (const StateDict::Item& item : state_dict_) {
      if (!wanted_.contains(item.fqn)) state::add_unexpected(item, report_);
    }
  }

  void assign() {
    for (Assignment& each : assignments_) each.to.detach().copy_(each.from);
  }

 private:
  /// Returns whether an entry is an alias without its target. A load pre hook may have given the
  /// target, which was loaded already, back the name that it has in the module.
  bool is_alias_of_renamed(const std::string& fqn) const {
    const StateEntry* const entry = std::as_const(state_dict_).find(fqn);
    const auto* const alias = entry == nullptr ? nullptr : std::get_if<StateAlias>(entry);
    return alias != nullptr && !state_dict_.contains(alias->target);
  }

  void take(const std::string& fqn, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    wanted_.insert(fqn);
    if (tensor.is_meta()) {
      report_.add("meta", fqn, "a tensor with memory to load into",
                  "a tensor on the meta device (initialize the module first)");
      return;
    }
    const auto tied = assigned_.find(tensor.unsafeGetTensorImpl());
    if (tied != assigned_.end() && is_alias_of_renamed(fqn)) return;
    const StateTensor* entry =
        find_fitting(state_dict_, fqn, dtype_of(tensor.scalar_type()),
                     Shape(tensor.sizes().begin(), tensor.sizes().end()), report_);
    if (entry == nullptr) return;
    const Assignment* const first = tied == assigned_.end() ? nullptr : &assignments_[tied->second];
    if (first != nullptr && first->entry == entry) return;
    const auto whole = state::cut(*entry, whole_box(entry->shape));
    if (!whole) {
      report_.add("hole", fqn, "every element", "shards that do not cover the tensor");
    } else if (first == nullptr) {
      assigned_.emplace(tensor.unsafeGetTensorImpl(), assignments_.size());
      assignments_.push_back({fqn, entry, tensor, whole->view(tensor.sizes())});
    } else if (!are_tied(first->from, *whole, tensor.scalar_type())) {
      report_.problems.push_back(state::tied_problem(fqn, first->fqn));
    }
  }

  StateDict& state_dict_;
  LoadReport& report_;
  std::unordered_set<std::string> wanted_;
  std::vector<Assignment> assignments_;
  std::unordered_map<const at::TensorImpl*, std::size_t> assigned_;  // index in assignments_
};

using FoundTensors = std::unordered_map<std::string, const StateTensor*>;

void require_no_hole(const StateTensor& tensor, const std::string& fqn, LoadReport& report) {
  if (state::cut(tensor, whole_box(tensor.shape))) return;
  report.add("hole", fqn, "every element", "shards that do not cover the tensor");
}

/// Finds the second name of a tied tensor in `sent`, and adds it to `found` if `sent` lacks the
/// first name. Reports other elements than those of the first name. `alias`: an entry of `wanted`.
/// `found`: what `sent` has for the names before it.
void take_alias(const StateDict::Item& alias, const StateDict& wanted, FoundTensors& found,
                StateDict& sent, LoadReport& report) {
  const std::string& first = std::get<StateAlias>(alias.entry).target;
  const StateEntry* const target = wanted.find(first);
  const auto* const own = target == nullptr ? nullptr : std::get_if<StateTensor>(target);
  if (own == nullptr || !sent.contains(alias.fqn)) return;
  const StateTensor* const second = find_fitting(sent, alias.fqn, own->dtype, own->shape, report);
  if (second == nullptr) return;
  const auto [it, is_new] = found.emplace(first, second);
  if (is_new) return require_no_hole(*second, alias.fqn, report);
  if (second == it->second) return;
  const auto elements = state::cut(*second, whole_box(own->shape));
  const auto of_first = state::cut(*it->second, whole_box(own->shape));
  if (!elements || !of_first) return;  // the load reports holes of the first name
  if (!are_tied(*of_first, *elements, scalar_type_of(own->dtype))) {
    report.problems.push_back(state::tied_problem(alias.fqn, first));
  }
}

/// Adds the values of rank 0's state dict to `received`, on all ranks. Load pre hooks read them.
void receive_values(const StateDict& sent, dist::Group& world, StateDict& received) {
  Value::List values;
  for (const StateDict::Item& item : sent) {
    const auto* const value = std::get_if<Value>(&item.entry);
    if (value == nullptr || world.rank() != 0) continue;
    values.push_back(Value::List{item.fqn, formats::key_path_to_value(item.key_path), *value});
  }
  const std::string text = state::broadcast_text(value_to_json(std::move(values)), world);
  const Value of_first = state::parse_message(text);
  for (const Value& each : *of_first.get_if<Value::List>()) {
    const auto& item = *each.get_if<Value::List>();
    received.set(*item[0].get_if<std::string>(), item[2], *formats::key_path_from_value(item[1]));
  }
}

/// Returns this rank's shards of the tensors in rank 0's state dict, and all its values.
StateDict receive(Module& module, const StateDict& of_first, const LoadStateDictOptions& options) {
  const dist::Mesh mesh = mesh_of(module);
  dist::Group& world = *mesh.world();
  StateDict wanted;
  std::string missing;  // keys, one per line
  StateDict sent = of_first;
  FoundTensors found_here;  // by the first name of each tensor
  state::check_on_all_ranks(world, [&] {
    wanted = state::sharded_state_dict(module);
    if (world.rank() != 0) return;  // only rank 0 has the state dict
    LoadReport report{options};
    for (const StateDict::Item& item : wanted) {
      if (std::holds_alternative<StateAlias>(item.entry)) {
        take_alias(item, wanted, found_here, sent, report);
        continue;
      }
      const auto* tensor = std::get_if<StateTensor>(&item.entry);
      if (tensor == nullptr) {
        const StateEntry* const entry = sent.find(item.fqn);
        if (entry != nullptr && !std::holds_alternative<Value>(*entry)) {
          report.add("missing", item.fqn, "a value that is not a tensor", "a tensor");
        }
        continue;
      }
      const StateTensor* found = find_fitting(sent, item.fqn, tensor->dtype, tensor->shape, report);
      if (found == nullptr) continue;
      found_here[item.fqn] = found;
      require_no_hole(*found, item.fqn, report);
    }
    for (const StateDict::Item& item : wanted) {
      const bool is_tensor = std::holds_alternative<StateTensor>(item.entry);
      if (is_tensor && !found_here.contains(item.fqn)) missing += item.fqn + "\n";
    }
    for (const StateDict::Item& item : sent) {
      if (const auto* value = std::get_if<Value>(&item.entry)) state::check_depth(item.fqn, *value);
    }
    if (!options.allow_unexpected) {
      for (const StateDict::Item& item : sent) {
        if (!wanted.contains(item.fqn)) state::add_unexpected(item, report);
      }
    }
    state::refuse_problems("state dict for " + module.name(), report.problems, {},
                           state::kStateDictOfModule);
  });
  missing = "\n" + state::broadcast_text(missing, world);
  StateDict received;
  for (const StateDict::Item& item : wanted) {
    if (missing.find("\n" + item.fqn + "\n") != std::string::npos) continue;
    if (std::holds_alternative<StateAlias>(item.entry)) received.set(item.fqn, item.entry);
    const auto* tensor = std::get_if<StateTensor>(&item.entry);
    if (tensor == nullptr) continue;
    StateTensor own = *tensor;
    for (LocalShard& local : own.local_shards) local.tensor = torch::empty_like(local.tensor);
    state::scatter(world.rank() == 0 ? found_here.at(item.fqn) : nullptr, own, world, item.fqn);
    received.set(item.fqn, std::move(own));
  }
  receive_values(sent, world, received);
  return received;
}

/// Runs the load post hooks of modules that are not in `done` yet: a module may be in the tree
/// twice, but was loaded once.
void run_post_hooks(Module& module, std::unordered_set<const Module*>& done) {
  if (!done.insert(&module).second) return;
  for (const auto& child : module.named_children()) run_post_hooks(*child.value(), done);
  const auto hooks = registry::find<registry::StateDictHooks>(module);
  if (!hooks) return;
  // Iterates over a copy, because a hook may remove itself.
  for (const auto& [number, hook] : std::map(hooks->load_post)) hook(module);
}

/// Returns hints about hooks; none if the module's load pre hooks undo its post hooks already.
std::vector<std::string> hints_for_hooks(const std::vector<formats::Finding>& problems,
                                         Module& module) {
  const auto is_about_names = [](const formats::Finding& problem) {
    return problem.rule == "missing" || problem.rule == "unexpected";
  };
  if (std::ranges::none_of(problems, is_about_names)) return {};
  StateDict own;
  try {
    own = state::sharded_state_dict(module);
    StateDict loaded = own;
    const LoadStateDictOptions strict;
    LoadReport report{strict};
    LoadWalk walk(loaded, report);
    walk.visit(module, "");
    walk.report_unexpected();
    if (std::ranges::none_of(report.problems, is_about_names)) return {};
  } catch (const std::exception&) {
    return {};  // a hook of the module failed; the report says more
  }
  return state::hints_for_hooks(problems, own);
}

}  // namespace

void state::run_load_post_hooks(Module& module) {
  std::unordered_set<const Module*> done;
  run_post_hooks(module, done);
}

void load_state_dict(Module& module, const StateDict& state_dict,
                     const LoadStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  StateDict work = options.rank0_only ? receive(module, state_dict, options) : state_dict;
  LoadReport report{options};
  LoadWalk walk(work, report);
  const auto check = [&] {
    walk.visit(module, "");
    walk.report_unexpected();
    std::vector<std::string> hints = state::hints_for_state_dict(state_dict, module, options);
    for (std::string& hint : hints_for_hooks(report.problems, module)) {
      hints.push_back(std::move(hint));
    }
    state::refuse_problems("state dict for " + module.name(), report.problems, hints,
                           state::kStateDictOfModule);
  };
  if (options.rank0_only) {
    // A load pre hook may fail or report a problem on one rank alone.
    state::check_on_all_ranks(*mesh_of(module).world(), check);
  } else {
    check();
  }
  walk.assign();
  state::run_load_post_hooks(module);
}

}  // namespace tessera
