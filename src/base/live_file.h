#pragma once

namespace tessera::detail {

/// An open file that notices changes of its bytes: another program may write it in place. A
/// ReadableFile may be one.
class LiveFile {
 public:
  /// Says whether the size and the time of the last change are as they were when it was opened.
  virtual bool is_as_opened() const = 0;

 protected:
  ~LiveFile() = default;
};

}  // namespace tessera::detail
