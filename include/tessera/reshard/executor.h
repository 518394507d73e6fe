#pragma once

#include <cstdint>
#include <memory>
#include <stop_token>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// How a plan is executed. The files that it writes depend on none of it.
struct ExecuteOptions {
  std::uint64_t memory_nbytes = std::uint64_t{256} << 20;  // all buffers of all threads together
  int num_threads = 0;                                     // 0: default_num_threads()
  std::stop_token stop{};            // a request ends the work with Error(interrupted)
  formats::ProgressSink progress{};  // bytes of tensors written, or found written
  formats::ProgressSink resumed{};   // of these what an earlier writer had written
};

/// Moves the bytes that a plan names, block by block: never a whole tensor in memory, whatever its
/// size. Checksums of the source are checked as its bytes are read. What the
/// writer has of earlier work is not read. Does not commit; where it throws, the writer has been
/// abandoned.
/// Requires: `plan.problems` is empty; `writer` was made for `plan.destination`.
/// Throws: what source and writer throw; Error(invalid_argument) where the memory does not suffice
/// for one block; Error(interrupted) on a stop request.
void execute(const Plan& plan, const formats::TensorSource& source,
             formats::CheckpointWriter& writer, const ExecuteOptions& options);

/// Starts the checkpoint that a plan makes of an open one, with its values. Where `create` asks for
/// a journal, what the work is (identify_work) joins what the journal's identity says already.
/// Requires: `plan.problems` is empty; `create.format` is the plan's. Throws: what read_value,
/// identify_work and create_checkpoint throw.
std::unique_ptr<formats::CheckpointWriter> start_move(const Plan& plan,
                                                      const formats::CheckpointReader& reader,
                                                      FileSystem& fs,
                                                      const std::string& destination,
                                                      formats::CreateOptions create);
/// Looks for what would keep such a move from its first block, and changes nothing: what
/// `start_move` would refuse to replace, to take over or to go on with, and files of the source
/// that are lost. Throws: what the move would.
void check_move(const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
                const std::string& destination, formats::CreateOptions create);
/// Moves the tensors to what `start_move` returned, and commits. Throws: what execute and the
/// writer's commit throw.
void finish_move(const Plan& plan, const formats::CheckpointReader& reader,
                 formats::CheckpointWriter& writer, const ExecuteOptions& options);

/// Does both: the checkpoint appears whole or not at all.
void move_checkpoint(const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
                     const std::string& destination, const formats::CreateOptions& create,
                     const ExecuteOptions& options);

/// Finishes a move as `finish_move` does. Where that fails by what may pass (a full disk, an
/// interruption, too little memory), or had gone on with kept work, a writer with a journal keeps
/// what is finished, and the error says so: `kept: DST.partial, 43% done`, with the remedy to
/// resume it. Where nothing is kept, but somebody has put a file into DST.partial, it says that
/// this stays. Returns how many bytes of tensors an earlier writer had written. Requires:
/// `start_move` returned the writer for `destination` on `fs`. Throws: as finish_move.
std::uint64_t finish_or_keep(const Plan& plan, const formats::CheckpointReader& reader,
                             formats::CheckpointWriter& writer, const FileSystem& fs,
                             const std::string& destination, ExecuteOptions options);

}  // namespace tessera::reshard
