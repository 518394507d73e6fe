#pragma once

#include <cstdint>
#include <string>

#include "tessera/base/file_system.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

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
