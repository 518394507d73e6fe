#include "tessera/base/file_system.h"

#include <algorithm>
#include <limits>

#include "tessera/base/error.h"

namespace tessera {

std::string read_file(const FileSystem& fs, const std::string& path, std::uint64_t max_nbytes) {
  const auto file = fs.open(path);
  if (file->nbytes() > max_nbytes) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "file size",
                          "at most " + std::to_string(max_nbytes) + " bytes",
                          std::to_string(file->nbytes()) + " bytes");
  }
  std::string text(static_cast<std::size_t>(file->nbytes()), '\0');
  file->read_at(0, std::as_writable_bytes(std::span(text)));
  return text;
}

std::optional<std::string> read_begin(const FileSystem& fs, const std::string& path,
                                      std::uint64_t max_nbytes) {
  if (fs.kind_of(path) != FileKind::regular) return std::nullopt;
  std::unique_ptr<ReadableFile> file;
  try {
    file = fs.open(path);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::not_found) throw;
    return std::nullopt;  // removed meanwhile
  }
  std::string begin(static_cast<std::size_t>(std::min(max_nbytes, file->nbytes())), '\0');
  file->read_at(0, std::as_writable_bytes(std::span(begin)));
  return begin;
}

std::string join_path(const std::string& directory, const std::string& name) {
  if (directory.empty()) return name;
  return directory.back() == '/' ? directory + name : directory + "/" + name;
}

std::string without_trailing_slashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string directory_of(const std::string& path) {
  const std::string trimmed = without_trailing_slashes(path);
  const std::size_t slash = trimmed.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : trimmed.substr(0, slash);
}

std::string last_component(const std::string& path) {
  const std::string trimmed = without_trailing_slashes(path);
  return trimmed.substr(trimmed.rfind('/') + 1);  // npos + 1 is 0
}

bool is_contained_path(const std::string& name) {
  if (name.empty() || name.front() == '/' || name.find('\0') != std::string::npos) return false;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    if (name.compare(begin, end - begin, "..") == 0) return false;
    begin = end + 1;
  }
  return true;
}

void require_contained(const FileSystem& fs, const std::string& directory,
                       const std::string& name) {
  const std::string path = join_path(directory, name);
  const std::string object = fs.resolve_links(path);
  if (!object.starts_with(join_path(fs.resolve_links(directory), ""))) {
    throw Error::expected(ErrorKind::corruption, {.path = path}, "link",
                          "a target inside the checkpoint", "a link to " + object);
  }
}

}  // namespace tessera
