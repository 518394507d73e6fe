#pragma once

#include <string>
#include <vector>

#include "inspect/statistics.h"
#include "inspect/summary.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// Statistics of some of a checkpoint's tensors, as one of several processes prints them: the JSON
/// of `exact_statistics` for each tensor, with its `name`.
struct PartOfStatistics {
  std::string path;  // where the document was read
  Value document;    // an object with the list `stats`
};

/// Returns the members of the JSON object from which `join_statistics` makes the same statistics
/// again, bit for bit: sums are hexadecimal floating-point text, as of C's `%La`.
Value::Dict exact_statistics(const Statistics& statistics);

/// Returns the statistics of each selected tensor, in the order of the selection, out of the
/// documents of all parts. Reads no elements. Throws: Error(corruption) naming file and member for
/// a document of another kind; Error(mismatch) naming the first tensor that no part has, that two
/// parts have, or that is not selected.
std::vector<Statistics> join_statistics(const std::vector<PartOfStatistics>& parts,
                                        const formats::CheckpointContents& contents,
                                        const Selection& selection);

}  // namespace tessera::inspect
