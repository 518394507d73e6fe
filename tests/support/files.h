#pragma once

#include <cstdint>
#include <fstream>
#include <map>
#include <string>

#include "tessera/base/file_system.h"

namespace tessera::test {

inline std::string read_all(const std::string& path) {
  return read_file(FileSystem::posix(), path, std::uint64_t{1} << 32);
}

inline void write_file(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

/// Returns the files in a directory, by name.
inline std::map<std::string, std::string> files_of(const std::string& directory) {
  std::map<std::string, std::string> files;
  for (const auto& name : FileSystem::posix().list_directory(directory)) {
    files[name] = read_all(join_path(directory, name));
  }
  return files;
}

}  // namespace tessera::test
