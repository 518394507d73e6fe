#include "support/memory_files.h"

#include <cstring>

#include "tessera/base/error.h"

namespace tessera::test {
class MemoryFiles::MemoryFile final : public ReadableFile {
 public:
  MemoryFile(const MemoryFiles& files, std::string path, const std::string& bytes)
      : files_(files), path_(std::move(path)), bytes_(bytes) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return bytes_.size(); }
  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
      throw Error(ErrorKind::corruption,
                  {.path = path_, .fqn = {}, .byte_range = ByteRange{offset, offset + out.size()}},
                  "read behind the end");
    }
    files_.nbytes_read_ += out.size();
    ++files_.num_reads_;
    if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
  }

 private:
  const MemoryFiles& files_;
  std::string path_;
  const std::string& bytes_;
};

MemoryFiles::Reads MemoryFiles::take_reads() const {
  return {nbytes_read_.exchange(0), num_reads_.exchange(0)};
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
  return std::make_unique<MemoryFile>(*this, path, *bytes);
}

std::vector<std::string> MemoryFiles::list_directory(const std::string& path) const {
  if (path != directory_) throw Error(ErrorKind::not_found, {.path = path}, "no such directory");
  std::vector<std::string> names;
  for (const auto& [name, bytes] : files_) names.push_back(name);
  return names;
}

}  // namespace tessera::test
