#pragma once

#include <memory>
#include <span>
#include <string>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/base_checkpoint.h"

namespace tessera::formats::native {

/// As `BaseCheckpoint::open`.
std::shared_ptr<const BaseCheckpoint> open_base(const FileSystem& fs, const std::string& path);

/// Enters the linked pieces and their files into the index of a checkpoint to be written, which
/// then has kLinkedVersion. Requires: `open_base` returned `linked.base`.
void enter_linked_pieces(Index& index, const LinkedPieces& linked);

/// Makes hard links in `directory` for the linked files that hold some of `pieces`. A link that is
/// there already stays.
/// Throws: Error(not_found) if a file of the base is not there any more; Error(mismatch) if it is
/// another one; Error(unsupported) if the file system cannot make the link.
void link_files(const FileSystem& fs, const std::string& directory, const Index& index,
                const LinkedPieces& linked, std::span<const CheckpointWriter::PieceId> pieces);

}  // namespace tessera::formats::native
