#pragma once

#include <memory>
#include <span>
#include <string>

#include "formats/native/index.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/base_checkpoint.h"

namespace tessera::formats::native {

/// Opens a base. Implements `BaseCheckpoint::open`, which states the errors.
std::shared_ptr<const BaseCheckpoint> open_base(const FileSystem& fs, const std::string& path);

/// Adds linked pieces, the files that hold them and empty patches to the index of a checkpoint to
/// be written. Sets the index's format version to kLinkedVersion or kPatchedVersion. Does nothing
/// if `linked` has no pieces. Requires: `open_base` returned `linked.base`.
void enter_linked_pieces(Index& index, const LinkedPieces& linked);

/// Makes hard links in `directory` to the files of the base that hold some of `pieces`. Keeps a
/// link that already exists. Throws: Error(not_found) if a file of the base has been removed;
/// Error(mismatch) if it has changed, or the link's name is that of another file;
/// Error(unsupported) if the file system cannot make the link.
void link_files(const FileSystem& fs, const std::string& directory, const Index& index,
                const LinkedPieces& linked, std::span<const PieceId> pieces);

}  // namespace tessera::formats::native
