#pragma once

#include <cstdint>
#include <stop_token>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

struct ExecuteOptions {
  std::uint64_t memory_nbytes = std::uint64_t{256} << 20;  // all buffers of all threads together
  int num_threads = 0;                                     // 0: default_num_threads()
  std::stop_token stop{};
  formats::ProgressSink progress{};  // bytes of tensors written, or found written
  formats::ProgressSink resumed{};   // of these what an earlier writer had written
};

/// Moves the bytes that a plan names, block by block: never a whole tensor in memory, whatever its
/// size. Checksums of the source are checked as its bytes are read. What the
/// writer has of earlier work is not read. Does not commit; where it throws, the writer has been
/// abandoned.
/// Requires: `plan.problems` is empty; `writer` was made for `plan.destination`.
/// Throws: what reader and writer throw; Error(invalid_argument) where the memory does not suffice
/// for one block; Error(interrupted) on a stop request.
void execute(const Plan& plan, const formats::CheckpointReader& reader,
             formats::CheckpointWriter& writer, const ExecuteOptions& options);

/// Writes the checkpoint that a plan makes of an open one: values, tensors, commit. It appears
/// whole or not at all. Requires: `plan.problems` is empty; `create.format` is the plan's. Throws:
/// what create_checkpoint, execute and the writer's commit throw.
void move_checkpoint(const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
                     const std::string& destination, const formats::CreateOptions& create,
                     const ExecuteOptions& options);

}  // namespace tessera::reshard
