#pragma once

#include <vector>

#include "tessera/base/value.h"
#include "tessera/formats/create.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// Describes the work of a plan, so that a later run goes on with the same work only: the plan's
/// digest and what the source holds, format and options of the destination, the values, and of the
/// source each file of data by its name, size and time of last change, or that it is not there, as
/// a lost file may hold nothing that is moved. `values` is parallel to `plan.destination.values`.
/// Throws: Error(io).
formats::WorkIdentity identify_work(const Plan& plan, const formats::CheckpointReader& reader,
                                    const std::vector<Value>& values,
                                    const formats::CreateOptions& options);

}  // namespace tessera::reshard
