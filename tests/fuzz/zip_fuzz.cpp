#include <algorithm>
#include <cstdint>
#include <vector>

#include "formats/zip/zip_reader.h"
#include "fuzz/packed_files.h"
#include "tessera/base/error.h"

/// Reads ranges, data and CRC-32s of the first 64 members of an archive. An Error is fine.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  using namespace tessera;
  using namespace tessera::formats;
  constexpr std::size_t kMaxMembers = 64;
  constexpr std::uint64_t kMaxNbytes = 4096;
  const fuzz::PackedFiles files(std::as_bytes(std::span(data, nbytes)), {""});
  try {
    const auto file = files.open(fuzz::kCheckpointPath);
    const zip::ZipReader archive(*file, {0, file->nbytes()});
    for (std::size_t m = 0; m < std::min(archive.members().size(), kMaxMembers); ++m) {
      const zip::Member& member = archive.members()[m];
      std::vector<std::byte> bytes(std::min(member.nbytes, kMaxNbytes));
      try {
        static_cast<void>(archive.data_range(m));
        archive.read_at(m, member.nbytes - bytes.size(), bytes);
        static_cast<void>(archive.read_all(m, kMaxNbytes));
      } catch (const Error&) {
      }
      try {
        static_cast<void>(archive.compute_crc(m, [](std::uint64_t) {}));
      } catch (const Error&) {
      }
    }
  } catch (const Error&) {
  }
  return 0;
}
