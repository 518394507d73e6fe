#pragma once

#include <cstdint>
#include <string>

namespace tessera::object_store {

/// What exists at a path. `find_name` does not follow a link at the path; `find_target` does.
struct NamedObject {
  enum class Kind { file, folder, link, other };

  Kind kind = Kind::other;
  std::uint64_t nbytes = 0;  // of a file
  /// The object in words. For a file, the text changes when the file changes.
  std::string state{};
  std::uint64_t inode = 0;  // of a local file
};

}  // namespace tessera::object_store
