#include <mutex>
#include <utility>

#include "base/read_only_file_system.h"
#include "object_store/files.h"
#include "reshard/file_states.h"
#include "tessera/reshard/executor.h"

namespace tessera::reshard {

class SourceFiles::Files final : public ReadOnlyFileSystem {
 public:
  std::optional<FileKind> kind_of(const std::string& path) const override {
    return files_.kind_of(path);
  }
  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    note(path);
    return files_.open(path);
  }
  std::vector<std::string> list_directory(const std::string& path) const override {
    return files_.list_directory(path);
  }
  std::string resolve_links(const std::string& path) const override {
    return files_.resolve_links(path);
  }

  FileStates states_of(const formats::CheckpointReader& reader) const {
    FileStates states = source_file_states(reader);
    const std::scoped_lock lock(mutex_);
    for (auto& [path, state] : states) {
      const auto opened = states_.find(path);
      if (opened != states_.end()) state = opened->second;
    }
    return states;
  }

 private:
  void note(const std::string& path) const {
    {
      const std::scoped_lock lock(mutex_);
      if (states_.contains(path)) return;
    }
    std::string state = describe_file(path);
    const std::scoped_lock lock(mutex_);
    states_.emplace(path, std::move(state));
  }

  const FileSystem& files_ = object_store::files();
  mutable std::mutex mutex_;
  mutable FileStates states_;  // state of each file before it was first opened
};

SourceFiles::SourceFiles() : files_(std::make_unique<const Files>()) {}
SourceFiles::~SourceFiles() = default;

const FileSystem& SourceFiles::file_system() const {
  return *files_;
}

FileStates SourceFiles::states_of(const formats::CheckpointReader& reader) const {
  return files_->states_of(reader);
}

}  // namespace tessera::reshard
