#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::inspect {

/// A contradiction in an archive. Normal writers never produce one.
struct ArchiveFault {
  std::string member{};
  std::uint64_t offset = 0;  // position in the file
  std::string expected{};
  std::string found{};
  bool is_looked_at = true;  // false: the member's bytes cannot be scanned
};

/// A member of a zip archive.
struct ZipEntry {
  std::string name{};  // as in the central directory
  ByteRange data{};    // where its bytes are in the file; compressed if `is_deflated`
  bool is_deflated = false;
  std::uint32_t crc = 0;  // 0: not known
};

struct ZipListing {
  std::vector<ZipEntry> entries{};
  std::uint64_t end = 0;  // behind the last archive and its comment; 0: there is no archive
  std::vector<ArchiveFault> faults{};
};

/// Lists the members of all zip archives that a reader could see in the file: at its end, at its
/// beginning, one after the other. [Note: Lenient zip]
///
/// Readers disagree about damaged archives: which directory counts, whether the local header must
/// agree, whether a checksum or a flag matters. A scanner that is as strict as one reader would
/// miss members that another reader loads. So the members of every directory that any reader could
/// use are listed, and each contradiction is a fault. Cost: bounded by the number of members.
/// Throws: Error(io).
ZipListing list_zip_entries(const ReadableFile& file);

}  // namespace tessera::inspect
