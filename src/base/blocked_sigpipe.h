#pragma once

#include <pthread.h>

#include <cerrno>
#include <csignal>
#include <ctime>

namespace tessera {

/// While it lives, writes of this thread to a closed connection only fail with EPIPE. Without it,
/// they also send SIGPIPE, which ends a program that does not handle it (Python ignores it).
/// Threads that are created meanwhile get no SIGPIPE as long as they live. For libraries that write
/// to sockets without MSG_NOSIGNAL.
class BlockedSigpipe {
 public:
  BlockedSigpipe() noexcept {
    ::sigset_t pending;
    ::sigpending(&pending);
    was_pending_ = ::sigismember(&pending, SIGPIPE) == 1;
    const ::sigset_t sigpipe = signals();
    ::pthread_sigmask(SIG_BLOCK, &sigpipe, &blocked_before_);
  }
  /// Removes the signal that a write has sent to this thread.
  ~BlockedSigpipe() {
    const ::sigset_t sigpipe = signals();
    const ::timespec at_once = {};
    if (!was_pending_) {
      while (::sigtimedwait(&sigpipe, nullptr, &at_once) == -1 && errno == EINTR) {
      }
    }
    ::pthread_sigmask(SIG_SETMASK, &blocked_before_, nullptr);
  }
  BlockedSigpipe(const BlockedSigpipe&) = delete;
  BlockedSigpipe& operator=(const BlockedSigpipe&) = delete;

 private:
  static ::sigset_t signals() noexcept {
    ::sigset_t set;
    ::sigemptyset(&set);
    ::sigaddset(&set, SIGPIPE);
    return set;
  }

  ::sigset_t blocked_before_;
  bool was_pending_;
};

}  // namespace tessera
