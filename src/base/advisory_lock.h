#pragma once

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>

#include "base/file_descriptor.h"

namespace tessera::detail {

/// The result of `try_lock`. `unavailable`: the file system has no locks.
enum class LockResult { held, held_by_another, unavailable };

/// Tries to take the advisory lock on a file or directory, without waiting. The lock is held until
/// the descriptor is closed in every process that has inherited it.
inline LockResult try_lock(const FileDescriptor& object) {
  if (retry_on_interrupt([&] { return ::flock(object.get(), LOCK_EX | LOCK_NB); }) == 0) {
    return LockResult::held;
  }
  // Some network file systems have no flock.
  return errno == EWOULDBLOCK ? LockResult::held_by_another : LockResult::unavailable;
}

/// Tries to take the advisory lock on a file that is open for writing, without waiting. Unlike
/// `try_lock`, it also excludes processes on other hosts, if they see the file through NFS or
/// another network file system with byte-range locks. The lock is held until the descriptor, and
/// every copy of it, is closed.
inline LockResult try_lock_between_hosts(const FileDescriptor& file) {
  struct flock whole_file {};
  whole_file.l_type = F_WRLCK;
  whole_file.l_whence = SEEK_SET;
  if (retry_on_interrupt([&] { return ::fcntl(file.get(), F_OFD_SETLK, &whole_file); }) == 0) {
    return LockResult::held;
  }
  return errno == EAGAIN || errno == EACCES ? LockResult::held_by_another : LockResult::unavailable;
}

}  // namespace tessera::detail
