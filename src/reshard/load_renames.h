#pragma once

#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/job_state.h"

// Renames of a checkpoint's names during a load.

namespace tessera::reshard {

/// Returns what comes before `state.` and `param_groups.` in the names of a checkpoint's
/// optimizers, such as `optim.`. A dict that has only `state`, such as `rng`, is an optimizer only
/// if its name begins with `optim`.
std::set<std::string> optimizer_prefixes(const formats::CheckpointContents& contents);

/// Returns the parameter in a name of an optimizer: `fc.weight` in `optim.state.fc.weight.exp_avg`.
std::string_view parameter_in_name(std::string_view name, std::string_view optimizer);

/// What comes before a parameter's name in the names of the model, by optimizer: `{"optim.",
/// "model."}` if `optim.state.fc.weight.exp_avg` is the state of `model.fc.weight`.
using ModelPrefixes = std::map<std::string, std::string>;

/// Returns the model's prefix for each optimizer in the names of a checkpoint or of a job: the one
/// under which the names have the most of the optimizer's parameters. Leaves out optimizers without
/// such parameters, for example because they number them.
ModelPrefixes model_prefixes(const std::vector<std::string>& names);
ModelPrefixes model_prefixes(const formats::CheckpointContents& source);

/// The renames of optimizer state that follow from a rename of parameters.
class ImpliedRenames {
 public:
  /// `models_of_job`: for optimizers that it lacks, the prefix is as in the checkpoint.
  ImpliedRenames(const formats::CheckpointContents& source, const ModelPrefixes& models_of_job);
  /// Returns the implied renames, if the checkpoint has such names: `optim.state.fc.` to
  /// `optim.state.up.` for `{"model.fc.", "model.up."}`.
  std::vector<Rename> of(const Rename& rename) const;

 private:
  struct Optimizer {
    std::string prefix;
    std::string model_in_source;
    std::string model_in_job;
    bool has_numbered_groups = false;  // the names of their fields contain no parameter names
  };
  bool has_name_below(const std::string& prefix) const;

  std::vector<std::string> names_;  // of the checkpoint, sorted
  std::vector<Optimizer> optimizers_;
};

/// Returns `renames`, followed by the renames of optimizer state that they imply.
std::vector<Rename> with_optimizer_renames(const std::vector<Rename>& renames,
                                           const formats::CheckpointContents& source,
                                           const ModelPrefixes& models_of_job);

/// Returns `value`, which the checkpoint calls `name`. If `value` is the list of a group's
/// parameters (`optim.param_groups.0.params`), renames the parameters in the list as their state is
/// renamed. `models_of_source`: the prefixes in `source`, found once for all groups.
Value with_renamed_members(const std::string& name, Value value, const std::vector<Rename>& renames,
                           const formats::CheckpointContents& source,
                           const ModelPrefixes& models_of_source,
                           const ModelPrefixes& models_of_job);

/// Matches missing tensors with unexpected tensors of equal shape, apart from optimizer state, if
/// each is the other's only best match (most common name components). Returns renames of prefixes
/// that turn unexpected names into missing ones, longest first, because a load uses the first that
/// fits. Leaves out renames that change names which fit already or which `options.renames` changes,
/// or that move a whole optimizer.
std::vector<Rename> likely_renames(const std::vector<formats::Finding>& problems,
                                   const formats::CheckpointContents& source,
                                   const formats::CheckpointContents& wanted,
                                   const LoadPlanOptions& options, const ImpliedRenames& implied);

}  // namespace tessera::reshard
