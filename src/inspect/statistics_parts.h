#pragma once

#include <string>
#include <vector>

#include "inspect/statistics.h"
#include "inspect/summary.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// The statistics that one of several processes has printed for its part of the tensors: for each
/// tensor its `name` and the members of `exact_statistics`, as JSON.
struct PartOfStatistics {
  std::string path;  // path of the file with the document
  Value document;    // an object with the list `stats`
};

/// Returns statistics as members of a JSON object. `join_statistics` reads them back bit for bit,
/// because sums are written as hexadecimal floating-point text, as by C's `%La`.
Value::Dict exact_statistics(const Statistics& statistics);

/// Reads the statistics of each selected tensor from the documents of all parts, and returns them
/// in the order of the selection. Throws: Error(corruption) with file and member if a document has
/// no valid statistics; Error(mismatch) naming the first tensor that no part has, that two parts
/// have, that is not selected, or that has another numel in the checkpoint.
std::vector<Statistics> join_statistics(const std::vector<PartOfStatistics>& parts,
                                        const formats::CheckpointContents& contents,
                                        const Selection& selection);

}  // namespace tessera::inspect
