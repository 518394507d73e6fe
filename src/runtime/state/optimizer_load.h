#pragma once

#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "runtime/state/optimizer_adapters.h"
#include "runtime/state/optimizer_parameters.h"
#include "runtime/state/value_tree.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/runtime/registry/fused_updates.h"
#include "tessera/runtime/registry/state_dict.h"
#include "tessera/runtime/registry/state_dict_hooks.h"

namespace tessera::state {

/// A tensor of saved optimizer state.
struct SavedTensor {
  DType dtype;
  bool is_read = true;  // false: saved, but not selected for loading
};

/// Loads optimizer state in three calls. `want` returns the tensors to load; `take_groups` reads
/// the fields of the parameter groups; `replace`, when all tensors have been read, replaces the
/// optimizer's state. Keys are those of `optim_state_dict`.
class OptimizerLoad {
 public:
  /// `optimizer`: null if modules update all parameters.
  OptimizerLoad(torch::nn::Module& model, torch::optim::Optimizer* optimizer);

  /// Returns the tensors to load for each parameter's state. A tensor is in the optimizer's own
  /// memory if it fits there and all state of its parameter will be replaced, else in new memory.
  StateDict want(const std::map<std::string, SavedTensor>& saved);

  /// Reads the fields of the saved groups, for `replace` (see `saved_groups`). Reports parameters
  /// in no saved group (not if `only` selects a part and no group is saved), and groups whose
  /// parameters are in several. Throws: Error(unsupported), Error(mismatch) for invalid fields.
  void take_groups(const ValueTree& tree, const formats::KeyPath& root, const NameSelection& only,
                   LoadReport& report);

  /// Returns the saved values, and the parameters in saved groups, that nothing loads, as findings
  /// with the rule `unexpected`. Leaves out parameters that `problems` already report.
  std::vector<formats::Finding> find_unused(const ValueTree& tree, const formats::KeyPath& root,
                                            const std::vector<formats::Finding>& problems) const;

  /// Throws: Error(mismatch) if a loaded step is not a valid number of steps. `filled`: as for
  /// `replace`.
  void check_steps(const std::set<std::string>& filled) const;
  /// Returns `state.<fqn>` of each parameter that keeps its old state, because only some of the
  /// state that it needs was loaded. `filled`: as for `replace`.
  std::vector<std::string> find_incomplete(const std::set<std::string>& filled) const;
  /// Replaces the optimizer's state and fields. `filled`: the keys that were loaded. A parameter
  /// keeps its old state if some of its wanted keys were not loaded. Exception: state that may
  /// begin at zero (`max_exp_avg_sq`) stays as it was, or is zero, beside what was loaded. A
  /// parameter that was saved without state has none afterwards, unless `only` leaves out its
  /// state. Requires: `check_steps(filled)` has not thrown.
  void replace(const std::set<std::string>& filled);

 private:
  struct Step {
    std::int64_t* to;  // where the optimizer's state has the step
    at::Tensor from;   // 0-d; the load writes the saved step into it
  };
  /// The new state of a parameter.
  struct Loaded {
    std::unique_ptr<torch::optim::OptimizerParamState> state;
    std::vector<std::string> wanted;      // keys of its state to load
    std::set<std::string> may_be_absent;  // those of `wanted` that may begin at zero
    std::vector<Step> steps;              // one if the optimizer counts steps, else none
  };

  std::vector<OptimizerParameter> fused_members() const;
  void take_fused_groups(const std::vector<OptimizerParameter>& fused,
                         const std::vector<Value::Dict>& saved, LoadReport& report);
  static void check_step(const std::string& key, const Step& step);
  static void take_step(const Step& step);
  static bool is_complete(const Loaded& loaded, const std::set<std::string>& filled);
  void keep_absent(const OptimizerParameter& parameter, const Loaded& loaded,
                   const std::set<std::string>& filled) const;
  Loaded want_of(const OptimizerParameter& parameter,
                 const std::map<std::string, SavedTensor>& saved, StateDict& wanted) const;
  std::map<std::string, at::Tensor> held_by(const OptimizerParameter& parameter) const;

  void want_fused(const registry::FusedParameter& parameter, const std::string& fqn,
                  const std::map<std::string, SavedTensor>& saved, StateDict& wanted);

  /// A module that updates its parameters in the backward (fused optimizer), and the fields and
  /// steps to load for it.
  struct Fused {
    registry::FoundFusedUpdates found;
    std::vector<registry::FusedParameter> parameters;
    std::vector<std::string> fqns;  // keys in the model's state dict, parallel to parameters
    std::optional<Value::Dict> fields;
  };

  torch::optim::Optimizer* optimizer_;
  const OptimizerAdapter* adapter_;
  std::vector<OptimizerParameter> parameters_;
  std::vector<Loaded> loaded_;  // by parameter, as parameters_
  std::vector<Fused> fused_;
  std::vector<std::pair<std::string, Step>> fused_steps_;  // with the key of each step
  // Names of parameters that are in a saved group and whose state is selected.
  std::unordered_set<std::string> known_;
  std::unordered_set<std::string> names_in_model_;  // all names of all parameters
  // By group; null: unchanged.
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options_;
};

}  // namespace tessera::state
