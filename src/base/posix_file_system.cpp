#include <dirent.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/file_descriptor.h"
#include "base/live_file.h"
#include "base/named_object.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera {
namespace {

using detail::FileDescriptor;
using detail::retry_on_interrupt;
using detail::throw_system_error;

struct stat status_of(const FileDescriptor& file, const std::string& path) {
  struct stat status {};
  if (::fstat(file.get(), &status) != 0) throw_system_error(errno, path, "stat");
  return status;
}

class PosixReadableFile final : public ReadableFile, public detail::LiveFile {
 public:
  explicit PosixReadableFile(const std::string& path)
      // O_NONBLOCK: opening a fifo must not wait for its writer.
      : path_(path), file_(detail::open_file(path, O_RDONLY | O_NONBLOCK | O_NOCTTY)) {
    const struct stat status = status_of(file_, path);
    if (!S_ISREG(status.st_mode)) {
      throw Error::expected(ErrorKind::not_found, {.path = path}, "open", "a regular file",
                            detail::kind_in_words(status.st_mode));
    }
    nbytes_ = static_cast<std::uint64_t>(status.st_size);
    inode_ = status.st_ino;
    changed_at_ = status.st_mtim;
    version_ = detail::state_in_words(status);
  }

  const std::string& path() const override { return path_; }
  std::uint64_t nbytes() const override { return nbytes_; }
  std::string version() const override { return version_; }
  bool is_as_opened() const override {
    const struct stat status = status_of(file_, path_);
    return static_cast<std::uint64_t>(status.st_size) == nbytes_ &&
           status.st_mtim.tv_sec == changed_at_.tv_sec &&
           status.st_mtim.tv_nsec == changed_at_.tv_nsec;
  }
  ino_t inode() const override { return inode_; }

  void read_at(std::uint64_t offset, std::span<std::byte> out) const override {
    const ByteRange range{offset, offset + out.size()};
    if (offset > nbytes_ || out.size() > nbytes_ - offset) throw_ends_before(range, nbytes_);
    while (!out.empty()) {
      const ssize_t count = retry_on_interrupt(
          [&] { return ::pread(file_.get(), out.data(), out.size(), static_cast<off_t>(offset)); });
      if (count < 0) throw_system_error(errno, path_, "read", range);
      if (count == 0) throw_ends_before(range, offset);
      offset += static_cast<std::uint64_t>(count);
      out = out.subspan(static_cast<std::size_t>(count));
    }
  }

 private:
  [[noreturn]] void throw_ends_before(ByteRange range, std::uint64_t nbytes) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_, .byte_range = range}, "file size",
                          "at least " + std::to_string(range.end) + " bytes",
                          std::to_string(nbytes) + " bytes", "truncated or still being written?");
  }

  std::string path_;
  FileDescriptor file_;
  std::uint64_t nbytes_ = 0;
  ino_t inode_ = 0;
  timespec changed_at_{};
  std::string version_;
};

class PosixWritableFile final : public WritableFile {
 public:
  PosixWritableFile(const std::string& path, int flags)
      : path_(path), file_(detail::open_file(path, flags)) {}

  const std::string& path() const override { return path_; }

  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) override {
    const ByteRange range{offset, offset + bytes.size()};
    if (direct_ && offset % kDirectAlignment == 0 && bytes.size() >= kMinDirectNbytes) {
      const std::size_t nbytes = write_direct(offset, bytes);
      offset += nbytes;
      bytes = bytes.subspan(nbytes);
    }
    while (!bytes.empty()) {
      const ssize_t count = retry_on_interrupt([&] {
        return ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
      });
      if (count < 0) throw_system_error(errno, path_, "write", range);
      if (count == 0) throw_system_error(EIO, path_, "write", range);
      offset += static_cast<std::uint64_t>(count);
      bytes = bytes.subspan(static_cast<std::size_t>(count));
    }
  }

  void bypass_cache() override {
    direct_ = FileDescriptor(
        retry_on_interrupt([&] { return ::open(path_.c_str(), O_WRONLY | O_DIRECT | O_CLOEXEC); }));
  }

  void resize(std::uint64_t nbytes) override {
    const auto size = static_cast<off_t>(nbytes);
    if (retry_on_interrupt([&] { return ::ftruncate(file_.get(), size); }) != 0) {
      throw_system_error(errno, path_, "resize");
    }
    if (size > 0) reserve(nbytes);
  }

  void sync() override {
    if (retry_on_interrupt([&] { return ::fsync(file_.get()); }) != 0) {
      throw_system_error(errno, path_, "sync");
    }
  }

  void close() override {
    direct_ = FileDescriptor();
    // Linux closes the descriptor even if close() reports EINTR, so EINTR is no failure.
    if (::close(file_.release()) != 0 && errno != EINTR) throw_system_error(errno, path_, "close");
  }

 private:
  static constexpr std::size_t kDirectAlignment = 4096;  // of offset, length and memory
  static constexpr std::size_t kMinDirectNbytes = std::size_t{256} << 10;
  static constexpr std::size_t kDirectBufferNbytes = std::size_t{4} << 20;

  /// Reserves disk blocks for `nbytes` bytes, if the file system can. On tmpfs, only checks that so
  /// much memory is free, because writes into reserved memory are slower.
  void reserve(std::uint64_t nbytes) const {
    int error = 0;
    struct statfs system {};
    if (::fstatfs(file_.get(), &system) == 0 && system.f_type == TMPFS_MAGIC) {
      const auto used = static_cast<std::uint64_t>(status_of(file_, path_).st_blocks) * 512;
      const auto free =
          static_cast<std::uint64_t>(system.f_bavail) * static_cast<std::uint64_t>(system.f_bsize);
      const bool has_limit = system.f_blocks > 0;
      if (has_limit && nbytes > used && nbytes - used > free) error = ENOSPC;
    } else if (retry_on_interrupt([&] {
                 return ::fallocate(file_.get(), 0, 0, static_cast<off_t>(nbytes));
               }) != 0) {
      error = errno;
    }
    if (error != 0 && error != EOPNOTSUPP && error != ENOSYS) {
      throw_system_error(error, path_, "reserve " + std::to_string(nbytes) + " bytes");
    }
  }

  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };

  /// Writes whole pages and bypasses the page cache. Copies to aligned memory first if the caller's
  /// memory is not aligned. Returns how many bytes it has written (0 if the file system cannot do
  /// direct writes). The caller writes the rest in the ordinary way.
  std::size_t write_direct(std::uint64_t offset, std::span<const std::byte> bytes) const {
    thread_local std::unique_ptr<std::byte, Free> buffer;
    const std::size_t whole_nbytes = bytes.size() / kDirectAlignment * kDirectAlignment;
    const bool is_aligned = reinterpret_cast<std::uintptr_t>(bytes.data()) % kDirectAlignment == 0;
    std::size_t written = 0;
    while (written < whole_nbytes) {
      const std::byte* from = bytes.data() + written;
      std::size_t nbytes = whole_nbytes - written;
      if (!is_aligned) {
        if (!buffer) {
          buffer.reset(
              static_cast<std::byte*>(std::aligned_alloc(kDirectAlignment, kDirectBufferNbytes)));
        }
        if (!buffer) return written;
        nbytes = std::min(nbytes, kDirectBufferNbytes);
        std::memcpy(buffer.get(), from, nbytes);
        from = buffer.get();
      }
      const ssize_t count = retry_on_interrupt([&] {
        return ::pwrite(direct_.get(), from, nbytes, static_cast<off_t>(offset + written));
      });
      if (count <= 0) return written;
      written += static_cast<std::size_t>(count) / kDirectAlignment * kDirectAlignment;
      if (static_cast<std::size_t>(count) < nbytes) return written;
    }
    return written;
  }

  std::string path_;
  FileDescriptor file_;
  FileDescriptor direct_;  // the same file, bypasses the page cache; none if not possible
};

/// Renames with `flags` of renameat2. Returns 0 or errno.
int rename_with_flags(const std::string& from, const std::string& to, unsigned flags) {
  return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0 ? 0 : errno;
}

bool is_flag_unsupported(int error) {
  return error == EINVAL || error == ENOSYS || error == EOPNOTSUPP;
}

class PosixFileSystem final : public FileSystem {
 public:
  std::optional<FileKind> kind_of(const std::string& path) const override {
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0) {
      if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
      throw_system_error(errno, path, "stat");
    }
    if (S_ISREG(status.st_mode)) return FileKind::regular;
    if (S_ISDIR(status.st_mode)) return FileKind::directory;
    return FileKind::other;
  }

  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    return std::make_unique<PosixReadableFile>(path);
  }

  std::unique_ptr<WritableFile> create(const std::string& path) override {
    return std::make_unique<PosixWritableFile>(path, O_WRONLY | O_CREAT | O_EXCL);
  }

  /// Opens a file that a writer has begun. Refuses a link, and a file that has a second name (a
  /// hard link).
  std::unique_ptr<WritableFile> open_for_update(const std::string& path) override {
    struct stat status {};
    const bool is_there = ::lstat(path.c_str(), &status) == 0;
    if (is_there && !(S_ISREG(status.st_mode) && status.st_nlink == 1)) {
      throw Error::expected(ErrorKind::already_exists, {.path = path}, "file to write",
                            "a regular file with only this name",
                            S_ISREG(status.st_mode)   ? "a file with a second name (a hard link)"
                            : S_ISLNK(status.st_mode) ? "a link"
                                                      : "another kind of object",
                            "remove or rename it");
    }
    return std::make_unique<PosixWritableFile>(path, O_WRONLY | O_NOFOLLOW);
  }

  void make_directory(const std::string& path) override {
    if (::mkdir(path.c_str(), 0777) != 0) throw_system_error(errno, path, "make directory");
  }

  std::vector<std::string> list_directory(const std::string& path) const override {
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path.c_str()), ::closedir);
    if (!directory) throw_system_error(errno, path, "list directory");
    std::vector<std::string> names;
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(directory.get());
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") names.push_back(name);
    }
    if (errno != 0) throw_system_error(errno, path, "list directory");
    std::ranges::sort(names);
    return names;
  }

  std::string resolve_links(const std::string& path) const override {
    const std::unique_ptr<char, void (*)(void*)> resolved(::realpath(path.c_str(), nullptr),
                                                          std::free);
    if (!resolved) throw_system_error(errno, path, "resolve links");
    return resolved.get();
  }

  void rename(const std::string& from, const std::string& to) override {
    const int error = rename_with_flags(from, to, RENAME_NOREPLACE);
    if (error == 0) return;
    if (!is_flag_unsupported(error)) throw_rename_error(error, from, to);
    // Without RENAME_NOREPLACE, another process may create `to` between the two calls.
    if (detail::mode_of_name(to)) throw_rename_error(EEXIST, from, to);
    plain_rename(from, to);
  }

  /// Without RENAME_EXCHANGE (NFS, for example), renames `b` to `path_in_exchange`, `a` to `b`, and
  /// the first object to `a`. Never replaces an object of another name.
  void exchange(const std::string& a, const std::string& b) override {
    const int error = rename_with_flags(a, b, RENAME_EXCHANGE);
    if (error == 0) return;
    if (!is_flag_unsupported(error)) throw_rename_error(error, a, b);
    const std::string aside = detail::path_in_exchange(a, b);
    rename(b, aside);
    try {
      rename(a, b);
    } catch (const Error& failure) {
      try {
        rename(aside, b);
      } catch (const Error& again) {
        throw Error(again.kind(), {.path = aside},
                    "this was " + printable(b) + " and cannot be renamed back: " +
                        std::string(again.what()) + " (before that: " + failure.what() + ")");
      }
      throw;
    }
    rename(aside, a);
  }

  void remove_all(const std::string& path) override {
    std::error_code error;
    std::filesystem::remove_all(path, error);
    if (error) throw_system_error(error.value(), path, "remove");
  }

  void sync_directory(const std::string& path) override {
    const FileDescriptor directory = detail::open_file(path, O_RDONLY | O_DIRECTORY);
    // Some network file systems cannot sync directories: their renames are durable already.
    if (retry_on_interrupt([&] { return ::fsync(directory.get()); }) != 0 && errno != EINVAL) {
      throw_system_error(errno, path, "sync directory");
    }
  }

 private:
  [[noreturn]] static void throw_rename_error(int error, const std::string& from,
                                              const std::string& to) {
    const bool names_destination = error == EEXIST || error == ENOTEMPTY;
    throw_system_error(error, names_destination ? to : from, "rename to " + printable(to));
  }

  static void plain_rename(const std::string& from, const std::string& to) {
    if (::rename(from.c_str(), to.c_str()) != 0) throw_rename_error(errno, from, to);
  }
};

}  // namespace

FileSystem& FileSystem::posix() {
  static PosixFileSystem file_system;
  return file_system;
}

}  // namespace tessera
