#pragma once

#include <sys/file.h>

#include <cerrno>

#include "base/file_descriptor.h"

namespace tessera::detail {

/// The result of `try_lock`.
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

}  // namespace tessera::detail
