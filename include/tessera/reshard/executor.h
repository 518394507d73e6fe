#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// How to execute a plan. The written files are the same for all values.
struct ExecuteOptions {
  std::uint64_t memory_nbytes = kDefaultMemoryNbytes;  // all buffers of all threads together
  int num_threads = 0;                                 // 0: default_num_threads()
  std::stop_token stop{};            // a stop request ends the work with Error(interrupted)
  formats::ProgressSink progress{};  // bytes of tensors written, now or by an interrupted run
  formats::ProgressSink resumed{};   // of these, the bytes that the interrupted run wrote
};

/// Moves the bytes that a plan names, block by block, so memory does not grow with the size of a
/// tensor. Checks the source's checksums as it reads. Does not read what the writer has from an
/// interrupted run. Does not commit. If it throws, it has abandoned the writer.
/// Requires: `plan.problems` is empty; `writer` was made for `plan.destination`.
/// Throws: what source and writer throw; Error(invalid_argument) if the memory is too small for one
/// block; Error(interrupted) on a stop request.
void execute(const Plan& plan, const formats::TensorSource& source,
             formats::CheckpointWriter& writer, const ExecuteOptions& options);

/// Creates the destination of a plan, with its values but without its tensors, and returns its
/// writer. If `create` asks for a journal, adds `resume_identity` to the journal's identity.
/// Requires: `plan.problems` is empty; `create.format` is the plan's. Throws: what read_value,
/// resume_identity and create_checkpoint throw.
std::unique_ptr<formats::CheckpointWriter> start_move(const Plan& plan,
                                                      const formats::CheckpointReader& reader,
                                                      FileSystem& fs,
                                                      const std::string& destination,
                                                      formats::CreateOptions create);
/// Checks whether a move could start, and changes nothing: whether `start_move` would refuse to
/// replace the destination or to resume the staging directory, and whether files of the source are
/// missing. Throws: what the move would.
void check_move(const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
                const std::string& destination, formats::CreateOptions create);
/// Moves the tensors to the writer that `start_move` returned, and commits. Throws: what execute
/// and the writer's commit throw.
void finish_move(const Plan& plan, const formats::CheckpointReader& reader,
                 formats::CheckpointWriter& writer, const ExecuteOptions& options);

/// Calls start_move and finish_move: the checkpoint appears only when it is complete.
void move_checkpoint(const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
                     const std::string& destination, const formats::CreateOptions& create,
                     const ExecuteOptions& options);

/// Finishes a move as `finish_move` does. After an error that may pass (Error(io), an interruption,
/// no memory), and after any error of resumed work, a writer with a journal keeps the finished
/// blocks. The error then says `kept: DST.partial, 43% done`, with the remedy to resume. If nothing
/// is kept, the error names a foreign file that stays in DST.partial. Returns how many bytes of
/// tensors an earlier writer had written. Requires: `start_move` returned the writer for
/// `destination` on `fs`. Throws: as finish_move.
std::uint64_t finish_or_keep(const Plan& plan, const formats::CheckpointReader& reader,
                             formats::CheckpointWriter& writer, const FileSystem& fs,
                             const std::string& destination, ExecuteOptions options);

}  // namespace tessera::reshard
