#pragma once

#include <cstdint>
#include <string>

namespace tessera::object_store {

/// What a name in a directory stands for; a link is not followed.
struct NamedObject {
  enum class Kind { file, folder, link, other };

  Kind kind = Kind::other;
  std::uint64_t nbytes = 0;  // of a file
  /// What is at the name, in words. The text of a file differs after a change of the file.
  std::string state{};
};

}  // namespace tessera::object_store
