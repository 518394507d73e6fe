#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera::test {

/// A member as both headers describe it; what is set here is written as it is, right or wrong.
struct ZipMember {
  std::string name;
  std::string data{};
  std::uint16_t method = 0;
  std::uint16_t flags = 0;
  std::optional<std::uint32_t> crc{};            // else that of the data
  std::optional<std::uint64_t> nbytes{};         // else that of the data; in both headers
  std::optional<std::uint64_t> stored_nbytes{};  // likewise
  std::optional<std::uint64_t> header_offset{};  // in the directory
  std::string local_name{};                      // else `name`
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
