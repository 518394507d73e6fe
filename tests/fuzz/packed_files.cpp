#include "fuzz/packed_files.h"

#include <algorithm>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::fuzz {
namespace {

class PackedFile final : public ReadableFile {
 public:
  PackedFile(std::string path, std::span<const std::byte> bytes)
      : path_(std::move(path)), bytes_(bytes) {}

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return bytes_.size(); }

  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
      throw Error(ErrorKind::corruption, {.path = path_}, "file ends early");
    }
    if (!out.empty()) {
      std::memcpy(out.data(), bytes_.data() + offset, out.size());
    }
  }

 private:
  std::string path_;
  std::span<const std::byte> bytes_;
};

}  // namespace

PackedFiles::PackedFiles(std::span<const std::byte> input, std::vector<std::string> names) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::size_t nbytes = input.size();
    if (i + 1 < names.size()) {
      if (input.size() < 4) {
        break;
      }
      std::uint32_t wanted = 0;
      for (std::size_t byte = 0; byte < 4; ++byte) {
        wanted |= std::to_integer<std::uint32_t>(input[byte]) << (8 * byte);
      }
      input = input.subspan(4);
      nbytes = std::min<std::size_t>(wanted, input.size());
    }
    const std::string path =
        names[i].empty() ? kCheckpointPath : join_path(kCheckpointPath, names[i]);
    files_.emplace_back(path, input.first(nbytes));
    input = input.subspan(nbytes);
  }
}

const std::span<const std::byte>* PackedFiles::find(const std::string& path) const {
  const auto found =
      std::ranges::find(files_, path, &std::pair<std::string, std::span<const std::byte>>::first);
  return found == files_.end() ? nullptr : &found->second;
}

std::optional<FileKind> PackedFiles::kind_of(const std::string& path) const {
  if (find(path)) {
    return FileKind::regular;
  }
  const bool is_folder = path == kCheckpointPath || !names_within(path).empty();
  return is_folder ? std::optional(FileKind::directory) : std::nullopt;
}

std::unique_ptr<ReadableFile> PackedFiles::open(const std::string& path) const {
  const auto* bytes = find(path);
  if (!bytes) {
    throw Error(ErrorKind::not_found, {.path = path}, "no such file");
  }
  return std::make_unique<PackedFile>(path, *bytes);
}

std::vector<std::string> PackedFiles::list_directory(const std::string& path) const {
  const std::set<std::string> names = names_within(path);
  if (path != kCheckpointPath && names.empty()) {
    throw Error(ErrorKind::not_found, {.path = path}, "no such directory");
  }
  return {names.begin(), names.end()};
}

/// Returns the names of the files and folders in a folder.
std::set<std::string> PackedFiles::names_within(const std::string& folder) const {
  const std::string begin = folder + "/";
  std::set<std::string> names;
  for (const auto& [file, bytes] : files_) {
    if (file.starts_with(begin)) {
      const std::string rest = file.substr(begin.size());
      names.insert(rest.substr(0, rest.find('/')));
    }
  }
  return names;
}

std::string PackedFiles::resolve_links(const std::string& path) const {
  if (!kind_of(path)) {
    throw Error(ErrorKind::not_found, {.path = path}, "no such file");
  }
  return path;
}

}  // namespace tessera::fuzz
