#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "reshard/load_renames.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/job_state.h"

namespace tessera::reshard {

/// A rename of a prefix that makes names of the checkpoint fit the job, and how many it fixes.
struct RenamedNames {
  Rename rename;  // prefix in the checkpoint, prefix in the job
  std::size_t num_tensors = 0;
  std::size_t num_optimizer_problems = 0;
};

/// A load that was refused.
struct RefusedLoad {
  const std::vector<formats::Finding>& problems;  // of plan_load, and others of the caller
  const formats::CheckpointContents& source;
  const std::string& source_path;
  const formats::CheckpointContents& wanted;
  int rank;
  const LoadPlanOptions& options;
  const ModelPrefixes& models_of_job;
  const std::vector<std::string>& held;  // the first components of all names of the job
  /// The job takes what state the checkpoint has of its parameters. So `wanted` lists no state of
  /// parameters that are missing.
  bool takes_any_state = false;
};

/// What the user can do about a load that was refused. These are data, because each caller writes
/// the options of its load differently: `.renames = {{"a.", "b."}}` in C++, `rename={"a.": "b."}`
/// in Python.
struct LoadHints {
  std::vector<RenamedNames> renames;  // they fix the problems that `is_renamed` tells
  std::vector<bool> is_renamed;       // one for each problem
  /// Problems of a load with these renames that the load without them does not have, such as
  /// dtypes of tensors that are missing without them.
  std::vector<formats::Finding> after_renames;
  /// Prefixes of the checkpoint's optimizers that have numbers instead of parameter names, as from
  /// an optimizer's own state_dict().
  std::vector<std::string> numbered;
  // The rest is about problems that no rename fixes, and that are not of optimizers with numbers.
  // If there are others than these, there is no hint about them.
  bool has_more = false;  // the checkpoint has more than the job, under other first components
  bool may_cast = false;  // floating-point dtypes differ
  /// The only missing name, and the unexpected name that is most similar to it.
  std::optional<std::pair<std::string, std::string>> nearest;
};

/// Returns the hints for the problems of a load. To see what its renames fix, plans the load again
/// with them.
LoadHints hints_for_load(const RefusedLoad& load);

/// Returns the line that replaces the lines of all problems that a rename would fix. `job`: how the
/// caller calls what is loaded into, such as `the model`.
std::string line_of(const RenamedNames& found, std::string_view job);

/// Returns whether one of the unexpected names is state of a numbered parameter:
/// `<prefix>0.exp_avg`.
bool has_state_by_number(const std::vector<formats::Finding>& problems, std::string_view prefix);

}  // namespace tessera::reshard
