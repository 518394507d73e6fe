#include "support/memory_files.h"

#include "tessera/base/error.h"

namespace tessera::test {

MemoryFiles::Reads MemoryFiles::take_reads() const {
  return {reads_.nbytes.exchange(0), reads_.num_reads.exchange(0)};
}

const std::string* MemoryFiles::find(const std::string& path) const {
  if (!path.starts_with(directory_ + "/")) return nullptr;
  const auto at = files_.find(path.substr(directory_.size() + 1));
  return at == files_.end() ? nullptr : &at->second;
}

std::optional<FileKind> MemoryFiles::kind_of(const std::string& path) const {
  if (path == directory_) return FileKind::directory;
  if (find(path) == nullptr) return std::nullopt;
  return FileKind::regular;
}

std::unique_ptr<ReadableFile> MemoryFiles::open(const std::string& path) const {
  const std::string* bytes = find(path);
  if (bytes == nullptr) throw Error(ErrorKind::not_found, {.path = path}, "no such file");
  return std::make_unique<MemoryFile>(path, *bytes, reads_);
}

std::vector<std::string> MemoryFiles::list_directory(const std::string& path) const {
  if (path != directory_) throw Error(ErrorKind::not_found, {.path = path}, "no such directory");
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files_) names.push_back(name);
  return names;
}

}  // namespace tessera::test
