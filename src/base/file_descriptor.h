#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::detail {

/// Owns one open descriptor, or none. Ignores errors when it closes the descriptor. A writer that
/// must see these errors calls release() and closes the descriptor itself.
class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  FileDescriptor(const FileDescriptor&) = delete;
  FileDescriptor& operator=(const FileDescriptor&) = delete;

  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

/// Repeats `call` while a signal interrupts it.
template <class Call>
auto retry_on_interrupt(Call&& call) {
  for (;;) {
    const auto result = call();
    if (result != -1 || errno != EINTR) return result;
  }
}

/// Throws the Error for `error` (an errno): not_found, already_exists, or io.
[[noreturn]] inline void throw_system_error(int error, const std::string& path,
                                            std::string_view action,
                                            std::optional<ByteRange> byte_range = std::nullopt) {
  ErrorKind kind = ErrorKind::io;
  if (error == ENOENT || error == ENOTDIR) kind = ErrorKind::not_found;
  if (error == EEXIST || error == ENOTEMPTY) kind = ErrorKind::already_exists;
  throw Error(kind, {.path = path, .byte_range = byte_range},
              std::string(action) + ": " + std::generic_category().message(error));
}

/// Opens `path`. The descriptor is closed on exec. A new file gets mode 0666 without the bits of
/// the umask.
inline FileDescriptor open_file(const std::string& path, int flags) {
  const int fd = retry_on_interrupt([&] { return ::open(path.c_str(), flags | O_CLOEXEC, 0666); });
  if (fd < 0) throw_system_error(errno, path, (flags & O_CREAT) != 0 ? "create" : "open");
  return FileDescriptor(fd);
}

}  // namespace tessera::detail
