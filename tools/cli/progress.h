#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "cli/command_line.h"
#include "cli/terminal.h"

namespace tessera::cli {

/// Where progress is shown. `automatic`: in the last line of the terminal, if standard error is a
/// terminal; `json`: as lines of JSON on standard error; `none`: nowhere.
enum class ProgressDisplay { automatic, json, none };

/// Which verb shows progress, and where.
struct ProgressOptions {
  std::string verb;
  ProgressDisplay display = ProgressDisplay::automatic;
};

/// Adds `--progress`. The verb in progress messages is the command's name.
void add_progress_option(Command& command, ProgressOptions& options);

/// A display of the progress of work over a known number of bytes, updated at most ten times a
/// second until the object is destroyed. Thread-safe.
///
/// On a terminal: `verify   45 %  1.2 GiB of 2.7 GiB  812 MiB/s  2 s left`, once the work has taken
/// half a second. As JSON: also one line at the beginning, and one at the end, which says whether
/// an exception ended the work (docs/cli/json-schema.md).
class Progress {
 public:
  Progress(Terminal& terminal, ProgressOptions options, std::string phase,
           std::uint64_t total_nbytes);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(std::uint64_t nbytes);
  /// Adds `nbytes`, which an interrupted run had written, to `kept_nbytes` of the JSON. Pass them
  /// to `add` too: the total includes them. So the speed on a terminal includes them, too.
  void add_kept(std::uint64_t nbytes);

 private:
  using Clock = std::chrono::steady_clock;
  enum class State { running, done, failed };

  double seconds_until(Clock::time_point now) const;
  void show(Clock::time_point now);
  void write_json(State state, Clock::time_point now);

  Terminal& terminal_;
  const ProgressDisplay display_;
  const std::string verb_;
  const std::string phase_;
  const std::uint64_t total_nbytes_;
  const int num_exceptions_;  // number of exceptions in flight when this object was made
  const Clock::time_point start_;
  std::atomic<std::uint64_t> done_nbytes_ = 0;
  std::atomic<std::uint64_t> kept_nbytes_ = 0;
  std::atomic<std::int64_t> next_ns_;  // when to print next, after start_
  std::mutex mutex_;
};

/// Returns the progress line, without a terminal's escape sequences.
std::string progress_line(const std::string& label, std::uint64_t done_nbytes,
                          std::uint64_t total_nbytes, double seconds);

}  // namespace tessera::cli
