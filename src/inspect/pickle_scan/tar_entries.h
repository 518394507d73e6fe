#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "inspect/pickle_scan/zip_entries.h"

namespace tessera::inspect {

/// A file in a tar archive.
struct TarEntry {
  std::string name{};
  ByteRange data{};  // where its bytes are in the archive
};

struct TarListing {
  std::vector<TarEntry> entries{};
  std::vector<ArchiveFault> faults{};
};

/// Returns whether a file that begins with `head` (512 bytes) is a tar archive, which the checksum
/// of the first header shows.
bool is_tar(std::string_view head);

/// Lists the files in a tar archive. Throws: Error(io).
TarListing list_tar_entries(const ReadableFile& file);

}  // namespace tessera::inspect
