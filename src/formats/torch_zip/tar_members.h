#pragma once

#include <map>
#include <string>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::torch_zip {

/// Whether a file that begins with these bytes is a tar archive.
bool begins_as_tar(std::string_view first_bytes);

/// Returns the names of a tar archive's members, and where their bytes are in the file. Reads plain
/// files with headers of POSIX (ustar, pax). Limits: 64 members, 1 MiB in a pax header.
/// Throws: Error(corruption) for a damaged header or a member that ends beyond the file;
/// Error(unsupported) for more than 64 members, and for links, sparse files and other members that
/// are not plain files; Error(io).
std::map<std::string, ByteRange> tar_members(const ReadableFile& file);

}  // namespace tessera::formats::torch_zip
