#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "inspect/pickle_scan/zip_entries.h"

namespace tessera::inspect {

/// A member of a tar.
struct TarEntry {
  std::string name{};
  ByteRange data{};  // in the file
};

struct TarListing {
  std::vector<TarEntry> entries{};
  std::vector<ArchiveFault> faults{};
};

/// Says whether a file that begins with `head` (512 bytes) is a tar, judged by the checksum of its
/// first header.
bool is_tar(std::string_view head);

/// Lists the files in a tar. Throws: Error(io).
TarListing list_tar_entries(const ReadableFile& file);

}  // namespace tessera::inspect
