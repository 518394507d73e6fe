#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>

#include "cli/terminal.h"

namespace tessera::cli {

enum class ProgressDisplay { on_terminal, off };

/// Shows how far work over a known number of bytes has come, in the terminal's last line:
/// `verify   45 %  1.2 GiB of 2.7 GiB  812 MiB/s  2 s left`. Appears once the work has taken half
/// a second, is redrawn ten times a second at most, and is gone when this object is. Thread-safe.
class Progress {
 public:
  Progress(Terminal& terminal, std::string label, std::uint64_t total_nbytes,
           ProgressDisplay display = ProgressDisplay::on_terminal);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(std::uint64_t nbytes);

 private:
  using Clock = std::chrono::steady_clock;

  void draw(Clock::time_point now);

  Terminal& terminal_;
  const std::string label_;
  const std::uint64_t total_nbytes_;
  const bool shown_;
  const Clock::time_point start_;
  std::atomic<std::uint64_t> done_nbytes_ = 0;
  std::atomic<std::int64_t> next_draw_ns_;  // since start_
  std::mutex mutex_;
};

/// Returns the progress line, without a terminal's part in it.
std::string progress_line(const std::string& label, std::uint64_t done_nbytes,
                          std::uint64_t total_nbytes, double seconds);

}  // namespace tessera::cli
