#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <stop_token>
#include <string>

#include "tessera/formats/checkpoint.h"

namespace nb = nanobind;

namespace tessera::python {

/// The state that long work shares with the thread that waits for the work. Thread-safe.
class Watch {
 public:
  std::stop_token token() const { return stop_.get_token(); }
  void request_stop() { stop_.request_stop(); }

  /// Announces `nbytes` of work after what is done now. Replaces earlier announcements.
  void expect(std::uint64_t nbytes) { total_nbytes_ = done_nbytes_ + nbytes; }
  formats::ProgressSink sink() {
    return [this](std::uint64_t nbytes) { done_nbytes_ += nbytes; };
  }
  std::uint64_t done_nbytes() const { return done_nbytes_; }
  std::uint64_t total_nbytes() const { return total_nbytes_; }

 private:
  std::stop_source stop_;
  std::atomic<std::uint64_t> done_nbytes_ = 0;
  std::atomic<std::uint64_t> total_nbytes_ = 0;
};

/// Sets whether Ctrl-C came on this thread while a signal handler of the package holds it back.
/// Until that is unset, run_watched on this thread stops its work and raises KeyboardInterrupt.
void set_held_interrupt(bool is_held);

/// Runs `work` on a thread of its own, without the GIL. The calling thread waits. Several times a
/// second, it lets Python handle its signals. If `progress` is not None and more bytes are done, it
/// also calls `progress(done, total)`, in bytes. After success, the last call has `done` = `total`.
///
/// An exception from a signal handler (KeyboardInterrupt), a held Ctrl-C, or `progress` stops the
/// work, and is raised when the work has ended. Rethrows what the work throws. If a signal handler
/// or `progress` forks, this call throws immediately in the child, because only the parent has that
/// thread.
void run_watched(nb::handle progress, const std::function<void(Watch&)>& work);

/// Runs work that may wait for a server, as run_watched does, without `progress`. The stop of the
/// work ends these waits.
void run_interruptibly(const std::function<void()>& work);

/// Runs work that reads a little of the checkpoint at `path`. If that is a URL, as
/// run_interruptibly does; otherwise on this thread, without the GIL, because a local read takes
/// less time than the start of a thread.
void run_short_read(const std::string& path, const std::function<void()>& work);

}  // namespace tessera::python
