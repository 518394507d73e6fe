#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <stop_token>

#include "tessera/formats/checkpoint.h"

namespace nb = nanobind;

namespace tessera::python {

/// What long work shares with the thread that waits for it. Thread-safe.
class Watch {
 public:
  std::stop_token token() const { return stop_.get_token(); }
  void request_stop() { stop_.request_stop(); }

  void set_total(std::uint64_t nbytes) { total_nbytes_ = nbytes; }
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

/// Runs `work` on a thread of its own, without the GIL. The calling thread waits; several times a
/// second it lets Python handle its signals and calls `progress(done, total)`, unless that is None,
/// and once more when all is done. An exception out of either (KeyboardInterrupt) stops the work
/// and is raised when that has ended; what the work throws is rethrown here. In a child that either
/// forks this returns at once, by an exception: the work is the parent's.
void run_watched(nb::handle progress, const std::function<void(Watch&)>& work);

}  // namespace tessera::python
