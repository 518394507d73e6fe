#pragma once

#include <optional>
#include <vector>

#include "reshard/work_shares.h"
#include "tessera/base/error.h"
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

/// Returns a clearer error to throw instead of `error`, with which a writer refused the contents of
/// a plan. If it refused a value, the error says how the user can leave the value out. If new names
/// do not fit into one nested dict, the error is a mismatch: the arguments have a meaning, but do
/// not fit the source. Returns nothing for any other error.
std::optional<Error> clearer_refusal(const Error& error, const Plan& plan,
                                     const formats::CheckpointReader& reader);

/// Calls `write`, which gives the contents of the plan to a writer, and returns its result. Throws:
/// the `clearer_refusal` of an error, if there is one; otherwise what `write` throws.
template <class Write>
auto with_clearer_refusal(const Plan& plan, const formats::CheckpointReader& reader,
                          const Write& write) {
  try {
    return write();
  } catch (const Error& error) {
    if (const auto clearer = clearer_refusal(error, plan, reader)) throw Error(*clearer);
    throw;
  }
}

}  // namespace tessera::reshard
