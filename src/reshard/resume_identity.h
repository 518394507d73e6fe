#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/base/value.h"
#include "tessera/formats/create.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Returns what must be equal so that a later run can resume the work of this plan: the plan's
/// digest, the source's contents, the destination's format and options, the values and, for each
/// data file of the source, its name, its size and the time of its last change. A file may be
/// missing if nothing in it is moved; then the text says so. `values` is parallel to
/// `plan.destination.values`. `source_files`: the states of the source's files when it was opened;
/// if not given, looks at each file. Throws: Error(io).
formats::ResumeIdentity resume_identity(const Plan& plan, const formats::CheckpointReader& reader,
                                        const std::vector<Value>& values,
                                        const formats::CreateOptions& options,
                                        const std::optional<FileStates>& source_files = {});

}  // namespace tessera::reshard
