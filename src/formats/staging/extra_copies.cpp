#include "formats/staging/extra_copies.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "formats/staging/own_files.h"
#include "object_store/files.h"
#include "tessera/base/error.h"

namespace tessera::formats {
namespace {

constexpr std::uint64_t kCopyNbytes = std::uint64_t{1} << 20;  // copied at a time
constexpr std::string_view kIdentityPrefix = "extra file ";

/// Calls `take` with a file's bytes, part by part, to the end or until `take` returns false.
template <class Take>
void read_in_parts(const ReadableFile& file, const Take& take) {
  std::vector<std::byte> room(
      static_cast<std::size_t>(std::min(kCopyNbytes, std::max<std::uint64_t>(file.nbytes(), 1))));
  for (std::uint64_t begin = 0; begin < file.nbytes(); begin += room.size()) {
    const auto part = std::span(room).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(room.size(), file.nbytes() - begin)));
    file.read_at(begin, part);
    if (!take(begin, std::span<const std::byte>(part))) return;
  }
}

}  // namespace

std::string file_state(const std::string& path) {
  const auto object = object_store::find_name(path);
  return object ? object->state : "not there";
}

void require_unchanged(const ExtraFile& file) {
  if (file.state.empty()) return;
  const std::string state = file_state(file.path);
  if (state == file.state) return;
  throw Error::expected(ErrorKind::corruption, {.path = file.path}, "extra file", file.state, state,
                        "changed by another program?");
}

bool have_equal_bytes(const FileSystem& fs, const std::string& path, const std::string& other) {
  if (!is_plain_file(path) || !is_plain_file(other)) return false;
  const auto file = fs.open(path);
  const auto other_file = fs.open(other);
  if (file->nbytes() != other_file->nbytes()) return false;
  bool are_equal = true;
  std::vector<std::byte> room;
  read_in_parts(*file, [&](std::uint64_t begin, std::span<const std::byte> part) {
    room.resize(part.size());
    other_file->read_at(begin, room);
    are_equal = std::ranges::equal(part, room);
    return are_equal;
  });
  return are_equal;
}

bool holds_copy(const FileSystem& fs, const std::string& path, const ExtraFile& file) {
  if (!file.text) return have_equal_bytes(fs, path, file.path);
  return is_plain_file(path) && fs.open(path)->nbytes() == file.text->size() &&
         read_file(fs, path, file.text->size()) == *file.text;
}

void copy_extra_file(FileSystem& fs, const ExtraFile& file, const std::string& path) {
  require_unchanged(file);
  const auto copy = fs.create(path);
  if (file.text) {
    copy->write_at(0, std::as_bytes(std::span(*file.text)));
  } else {
    read_in_parts(*fs.open(file.path), [&](std::uint64_t begin, std::span<const std::byte> part) {
      copy->write_at(begin, part);
      return true;
    });
  }
  copy->sync();
  copy->close();
  require_unchanged(file);
}

std::set<std::string> names_of(const std::vector<ExtraFile>& files) {
  std::set<std::string> names;
  for (const ExtraFile& file : files) names.insert(file.name);
  return names;
}

ResumeIdentity identify_extra_files(const std::vector<ExtraFile>& files) {
  ResumeIdentity identity;
  for (const ExtraFile& file : files) {
    identity[std::string(kIdentityPrefix) + file.name] = file.state;
  }
  return identity;
}

std::set<std::string> extra_names_in(const ResumeIdentity& identity) {
  std::set<std::string> names;
  for (const auto& [name, state] : identity) {
    if (name.starts_with(kIdentityPrefix)) names.insert(name.substr(kIdentityPrefix.size()));
  }
  return names;
}

}  // namespace tessera::formats
