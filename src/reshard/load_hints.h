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

/// What the user can do about a load that was refused. These are data, because each caller writes
/// the options of its load differently: `.renames = {{"a.", "b."}}` in C++, `rename={"a.": "b."}`
/// in Python.
struct LoadHints {
  std::vector<RenamedNames> renames;  // they fix the problems that `is_renamed` tells
  std::vector<bool> is_renamed;       // one for each problem
  /// The checkpoint has numbers instead of parameter names, as from an optimizer's own
  /// state_dict(). If so, there is no hint other than the renames.
  bool has_numbered_state = false;
  // The rest is about problems that no rename fixes. If there are others than these, there is no
  // hint about them.
  bool has_more = false;  // the checkpoint has more than the job, under other first components
  bool may_cast = false;  // floating-point dtypes differ
  /// The only missing name, and the unexpected name that is most similar to it.
  std::optional<std::pair<std::string, std::string>> nearest;
};

/// Returns the hints for the problems of plan_load, and for problems that the caller has added.
/// `options`: those of the refused load. `held`: the first components of all names of the job.
LoadHints hints_for_load(const std::vector<formats::Finding>& problems,
                         const formats::CheckpointContents& source,
                         const formats::CheckpointContents& wanted, const LoadPlanOptions& options,
                         const std::vector<std::string>& held);

/// Returns the line that replaces the lines of all problems that a rename would fix. `job`: how the
/// caller calls what is loaded into, such as `the model`.
std::string line_of(const RenamedNames& found, std::string_view job);

/// Returns whether one of the unexpected names is state of a numbered parameter:
/// `<prefix>0.exp_avg`.
bool has_state_by_number(const std::vector<formats::Finding>& problems, std::string_view prefix);

}  // namespace tessera::reshard
