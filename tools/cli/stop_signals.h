#pragma once

#include <stop_token>
#include <thread>

#include "base/current_stop.h"

namespace tessera::cli {

/// A signal handler that turns the first SIGINT or SIGTERM into a stop request, so that work ends
/// cleanly. The second signal ends the process immediately. Signals that were ignored at the start
/// stay ignored. At most one object may exist at a time, in the thread that made it; its destructor
/// restores the signals.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  std::stop_token token() const { return source_.get_token(); }

 private:
  std::stop_source source_;
  const tessera::detail::CurrentStop current_stop_{source_.get_token()};  // for waits for servers
  std::thread waiter_;  // requests the stop, because a signal handler must not take locks
};

}  // namespace tessera::cli
