#pragma once

#include <pthread.h>

#include <mutex>

namespace tessera::detail {

/// From now on, locks a mutex of the process before it forks, and unlocks it afterwards in both
/// processes. If another thread held the mutex during a fork, it would stay locked in the child.
/// `mutex`: returns the mutex. A mutex that is registered later is locked earlier. Call it once for
/// each mutex.
template <std::mutex& (*mutex)()>
void lock_while_forking() {
  ::pthread_atfork([] { mutex().lock(); }, [] { mutex().unlock(); }, [] { mutex().unlock(); });
}

}  // namespace tessera::detail
