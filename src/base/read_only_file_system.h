#pragma once

#include <memory>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera {

/// A read-only file system. A derived class finds and reads files; every call that would write
/// throws Error(io).
class ReadOnlyFileSystem : public FileSystem {
 public:
  std::unique_ptr<WritableFile> create(const std::string& path) final;
  std::unique_ptr<WritableFile> open_for_update(const std::string& path) final;
  void make_directory(const std::string& path) final;
  void rename(const std::string& from, const std::string& to) final;
  void exchange(const std::string& a, const std::string& b) final;
  void remove_all(const std::string& path) final;
  void sync_directory(const std::string& path) final;
};

}  // namespace tessera
