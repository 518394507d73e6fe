#pragma once

#include <optional>
#include <vector>

#include "reshard/work_shares.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {

/// Does what `execute` does, but only for some blocks of the writer. `blocks`: ascending ranges
/// that do not overlap.
void execute_blocks(const Plan& plan, const formats::TensorSource& source,
                    formats::CheckpointWriter& writer, const ExecuteOptions& options,
                    const std::vector<BlockRange>& blocks);

/// Throws Error(mismatch) if a file of the source has changed during the move. Some blocks may then
/// come from the old file, and others from the new one.
void require_unchanged(const FileStates& before, const FileStates& after);

/// Reads and returns the values that a plan moves. If `create` has a journal, adds to it everything
/// that must be equal so that a later run can resume this move. `source_files`: as for
/// `resume_identity`.
std::vector<Value> prepare_move(const Plan& plan, const formats::CheckpointReader& reader,
                                formats::CreateOptions& create,
                                const std::optional<FileStates>& source_files);

}  // namespace tessera::reshard
