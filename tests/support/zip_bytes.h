#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::test {

/// A member of an archive, for tests of damaged archives. Fields that are set are written as they
/// are, right or wrong: those of the local header behind the data if `flags` has bit 3.
struct ZipMember {
  std::string name;
  std::string data{};
  std::uint16_t method = 0;
  std::uint16_t flags = 0;
  std::optional<std::uint32_t> crc{};            // empty: that of the data
  std::optional<std::uint64_t> nbytes{};         // in both headers; empty: that of the data
  std::optional<std::uint64_t> stored_nbytes{};  // in both headers; empty: that of the data
  std::optional<std::uint64_t> header_offset{};  // in the central directory; empty: the right one
  std::string local_name{};                      // in the local header; empty: `name`
  std::string local_extra{};
};

struct ZipTrailer {
  bool zip64 = false;
  std::string comment{};
  std::optional<std::uint64_t> num_members{};
  std::optional<std::uint64_t> directory_nbytes{};
  std::optional<std::uint64_t> directory_begin{};
  std::uint16_t disk = 0;
};

/// Returns the bytes of a zip archive.
std::string zip_bytes(const std::vector<ZipMember>& members, const ZipTrailer& trailer = {});

}  // namespace tessera::test
