#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"

namespace tessera {

/// Forwards every call to another file system, which must outlive this. A derived class overrides
/// the calls that it changes or observes. As thread-safe as the other file system.
class ForwardingFileSystem : public FileSystem {
 public:
  explicit ForwardingFileSystem(FileSystem& base) : base_(base) {}

  std::optional<FileKind> kind_of(const std::string& path) const override {
    return base_.kind_of(path);
  }
  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    return base_.open(path);
  }
  std::unique_ptr<WritableFile> create(const std::string& path) override {
    return base_.create(path);
  }
  std::unique_ptr<WritableFile> open_for_update(const std::string& path) override {
    return base_.open_for_update(path);
  }
  void make_directory(const std::string& path) override { base_.make_directory(path); }
  std::vector<std::string> list_directory(const std::string& path) const override {
    return base_.list_directory(path);
  }
  std::string resolve_links(const std::string& path) const override {
    return base_.resolve_links(path);
  }
  void rename(const std::string& from, const std::string& to) override { base_.rename(from, to); }
  void exchange(const std::string& a, const std::string& b) override { base_.exchange(a, b); }
  void remove_all(const std::string& path) override { base_.remove_all(path); }
  void sync_directory(const std::string& path) override { base_.sync_directory(path); }

 private:
  FileSystem& base_;
};

}  // namespace tessera
