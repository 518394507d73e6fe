#pragma once

#include <sys/types.h>

namespace tessera::detail {

/// An open file that can say whether its bytes have changed, because another program may write it
/// in place. Find it with dynamic_cast: some kinds of ReadableFile are a LiveFile too.
class LiveFile {
 public:
  /// Whether the size and the time of the last change are those at opening. Throws: Error(io).
  virtual bool is_as_opened() const = 0;
  /// The inode number of the open file.
  virtual ino_t inode() const = 0;

 protected:
  ~LiveFile() = default;
};

}  // namespace tessera::detail
