#pragma once

#include <chrono>

#include "object_store/http_request.h"

namespace tessera::object_store {

/// How long and how often failed requests are repeated. The first limit that is reached ends the
/// attempts. If each attempt fails at once, that is max_attempts, after about half a minute.
struct RetryPolicy {
  int max_attempts = 10;                      // AWS_MAX_ATTEMPTS
  int max_attempts_without_server = 3;        // if no server answers at all
  std::chrono::milliseconds first_wait{100};  // doubles with each attempt
  std::chrono::milliseconds max_wait{10'000};
  std::chrono::seconds deadline{120};  // since the first attempt, or the last byte that arrived
  int max_attempts_after_stop = 3;     // if the work is stopped (CurrentStop)
  // The time that servers may ask for (Retry-After) in addition to `deadline`.
  std::chrono::milliseconds max_asked{300'000};

  /// Returns the default policy. `max_attempts` is AWS_MAX_ATTEMPTS if that is set (1 to 100).
  static RetryPolicy of_process();
};

/// Decides whether one request is repeated after a failure, and waits before it. Not thread-safe.
class Retries {
 public:
  explicit Retries(RetryPolicy policy) : policy_(policy) {}

  /// If the request may be tried again, waits and returns true. Returns false if it has failed for
  /// good. A server can ask for a longer wait (Retry-After). If this thread's work is stopped
  /// (CurrentStop), does not wait. Throws: Error(interrupted) if it would then return false after a
  /// failure that may pass.
  bool wait_after(const HttpResponse& response);
  /// Call it when bytes arrived. Both limits (attempts, time) start anew; num_attempts() does not.
  void note_progress();
  int num_attempts() const { return num_attempts_; }

 private:
  RetryPolicy policy_;
  int num_attempts_ = 0;
  int num_without_progress_ = 0;
  std::chrono::milliseconds asked_{0};  // sum of the waits that the server asked for
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace tessera::object_store
