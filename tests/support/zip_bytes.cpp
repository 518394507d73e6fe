#include "support/zip_bytes.h"

#include <span>

#include "base/digest.h"

namespace tessera::test {
namespace {

std::string little_endian(std::uint64_t value, int nbytes) {
  std::string bytes;
  for (int i = 0; i < nbytes; ++i) bytes += static_cast<char>(value >> (8 * i));
  return bytes;
}
std::string u16(std::uint64_t value) {
  return little_endian(value, 2);
}
std::string u32(std::uint64_t value) {
  return little_endian(value, 4);
}
std::string u64(std::uint64_t value) {
  return little_endian(value, 8);
}

}  // namespace

std::string zip_bytes(const std::vector<ZipMember>& members, const ZipTrailer& trailer) {
  std::string archive;
  std::string directory;
  for (const ZipMember& member : members) {
    const std::string& local_name = member.local_name.empty() ? member.name : member.local_name;
    const std::uint32_t crc = member.crc.value_or(
        crc32(0, std::as_bytes(std::span(member.data.data(), member.data.size()))));
    const std::uint64_t nbytes = member.nbytes.value_or(member.data.size());
    const std::uint64_t stored = member.stored_nbytes.value_or(member.data.size());
    const std::uint64_t offset = member.header_offset.value_or(archive.size());
    const bool sizes_follow = (member.flags & 8) != 0;

    archive += u32(0x04034b50) + u16(20) + u16(member.flags) + u16(member.method) + u32(0);
    archive += sizes_follow ? u32(0) + u32(0) + u32(0) : u32(crc) + u32(stored) + u32(nbytes);
    archive += u16(local_name.size()) + u16(member.local_extra.size());
    archive += local_name + member.local_extra + member.data;
    if (sizes_follow) archive += u32(0x08074b50) + u32(crc) + u32(stored) + u32(nbytes);

    const bool wide = trailer.zip64;
    const std::string extra =
        wide ? u16(1) + u16(24) + u64(nbytes) + u64(stored) + u64(offset) : std::string();
    directory += u32(0x02014b50) + u16(45) + u16(45) + u16(member.flags) + u16(member.method) +
                 u32(0) + u32(crc) + u32(wide ? 0xffffffff : stored) +
                 u32(wide ? 0xffffffff : nbytes) + u16(member.name.size()) + u16(extra.size()) +
                 u16(0) + u16(0) + u16(0) + u32(0) + u32(wide ? 0xffffffff : offset);
    directory += member.name + extra;
  }
  const std::uint64_t begin = trailer.directory_begin.value_or(archive.size());
  const std::uint64_t nbytes = trailer.directory_nbytes.value_or(directory.size());
  const std::uint64_t num_members = trailer.num_members.value_or(members.size());
  archive += directory;
  if (trailer.zip64) {
    const std::uint64_t zip64_begin = archive.size();
    archive += u32(0x06064b50) + u64(44) + u16(45) + u16(45) + u32(trailer.disk) + u32(0) +
               u64(num_members) + u64(num_members) + u64(nbytes) + u64(begin);
    archive += u32(0x07064b50) + u32(0) + u64(zip64_begin) + u32(1);
  }
  const auto narrow = [&](std::uint64_t value, std::uint64_t all_ones) {
    return trailer.zip64 ? all_ones : value;
  };
  archive += u32(0x06054b50) + u16(trailer.disk) + u16(0) + u16(narrow(num_members, 0xffff)) +
             u16(narrow(num_members, 0xffff)) + u32(narrow(nbytes, 0xffffffff)) +
             u32(narrow(begin, 0xffffffff)) + u16(trailer.comment.size()) + trailer.comment;
  return archive;
}

}  // namespace tessera::test
