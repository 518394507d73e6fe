#include <map>
#include <mutex>
#include <utility>

#include "base/live_file.h"
#include "base/read_only_file_system.h"
#include "object_store/files.h"
#include "reshard/file_states.h"
#include "tessera/base/error.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {

class SourceFiles::Files final : public ReadOnlyFileSystem {
 public:
  std::optional<FileKind> kind_of(const std::string& path) const override {
    const auto known = find_known(path);
    return known && known->kind ? known->kind : files_.kind_of(path);
  }
  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    const FoundFile before = note(path);
    auto file = files_.open(path);
    // A file at a URL needs no check: each read of it names its version to the server.
    const auto* const live = dynamic_cast<const tessera::detail::LiveFile*>(file.get());
    if (live != nullptr && before.kind) {
      require_same(path, before.state, {file->version(), live->inode()});
    }
    return file;
  }
  std::vector<std::string> list_directory(const std::string& path) const override {
    return files_.list_directory(path);
  }
  std::string resolve_links(const std::string& path) const override {
    return files_.resolve_links(path);
  }

  FileStates states_of(const formats::CheckpointReader& reader) const {
    FileStates states;
    for (const std::string& path : reader.data_files()) states[path] = note(path).state;
    return states;
  }

  void require_unchanged() const {
    std::map<std::string, FoundFile> known;
    {
      const std::scoped_lock lock(mutex_);
      known = known_;
    }
    for (const auto& [path, before] : known) {
      const FoundFile now = find_file(path);
      // Files that were open when they were removed have been read as they were.
      if (before.kind && now.kind) require_same(path, before.state, now.state);
    }
  }

 private:
  static void require_same(const std::string& path, const FileState& before, const FileState& now) {
    if (is_same_state(path, before, now)) return;
    throw Error::expected(ErrorKind::mismatch, {.path = path}, "file",
                          "the file as it was before it was opened: " + before.words,
                          change_in_words(before, now),
                          "did another program write it? read a checkpoint that is complete");
  }

  std::optional<FoundFile> find_known(const std::string& path) const {
    const std::scoped_lock lock(mutex_);
    const auto known = known_.find(path);
    return known == known_.end() ? std::nullopt : std::optional(known->second);
  }

  /// Looks at a file at the first call for it, and returns the same result at every later call.
  FoundFile note(const std::string& path) const {
    if (auto known = find_known(path)) return *std::move(known);
    FoundFile found = find_file(path);
    const std::scoped_lock lock(mutex_);
    return known_.emplace(path, std::move(found)).first->second;
  }

  const FileSystem& files_ = object_store::files();
  mutable std::mutex mutex_;
  mutable std::map<std::string, FoundFile> known_;
};

SourceFiles::SourceFiles() : files_(std::make_unique<const Files>()) {}
SourceFiles::~SourceFiles() = default;

const FileSystem& SourceFiles::file_system() const {
  return *files_;
}

FileStates SourceFiles::states_of(const formats::CheckpointReader& reader) const {
  return files_->states_of(reader);
}

void SourceFiles::require_unchanged() const {
  files_->require_unchanged();
}

}  // namespace tessera::reshard
