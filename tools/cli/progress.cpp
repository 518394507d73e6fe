#include "cli/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <utility>

#include "base/json.h"
#include "base/size_text.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kFirstDrawNs = 500'000'000;
constexpr std::int64_t kIntervalNs = 100'000'000;
constexpr int kJsonSchema = 1;

std::string duration(double seconds) {
  const auto whole = static_cast<std::int64_t>(std::min(std::ceil(seconds), 1e9));
  char text[32];
  if (whole < 60) {
    std::snprintf(text, sizeof text, "%d s", static_cast<int>(whole));
  } else if (whole < 3600) {
    std::snprintf(text, sizeof text, "%d min %02d s", static_cast<int>(whole / 60),
                  static_cast<int>(whole % 60));
  } else {
    std::snprintf(text, sizeof text, "%d h %02d min", static_cast<int>(whole / 3600),
                  static_cast<int>(whole / 60 % 60));
  }
  return text;
}

ProgressDisplay display_on(const Terminal& terminal, ProgressDisplay display) {
  const bool has_line = display != ProgressDisplay::automatic || terminal.errors_are_on_terminal();
  return has_line ? display : ProgressDisplay::none;
}

}  // namespace

void add_progress_option(Command& command, ProgressOptions& options) {
  options.verb = command.name();
  command.choice(
      "--progress", {"auto", "json", "none"},
      [&](const std::string& display) {
        options.display = display == "json"   ? ProgressDisplay::json
                          : display == "none" ? ProgressDisplay::none
                                              : ProgressDisplay::automatic;
      },
      "Show progress. auto: on a terminal; json: as lines of JSON on standard error; none: not at "
      "all");
}

Progress::Progress(Terminal& terminal, ProgressOptions options, std::string phase,
                   std::uint64_t total_nbytes)
    : terminal_(terminal),
      display_(display_on(terminal, options.display)),
      verb_(std::move(options.verb)),
      phase_(std::move(phase)),
      total_nbytes_(total_nbytes),
      num_exceptions_(std::uncaught_exceptions()),
      start_(Clock::now()),
      next_ns_(display_ == ProgressDisplay::json ? kIntervalNs : kFirstDrawNs) {
  if (display_ == ProgressDisplay::json) write_json(State::running, start_);
}

Progress::~Progress() {
  if (display_ == ProgressDisplay::none) return;
  try {
    if (display_ == ProgressDisplay::json) {
      const bool has_failed = std::uncaught_exceptions() > num_exceptions_;
      write_json(has_failed ? State::failed : State::done, Clock::now());
    } else {
      terminal_.show_status({});
    }
  } catch (...) {  // no memory for the line: it is left out
  }
}

void Progress::add(std::uint64_t nbytes) {
  done_nbytes_.fetch_add(nbytes, std::memory_order_relaxed);
  if (display_ == ProgressDisplay::none) return;
  const Clock::time_point now = Clock::now();
  const std::int64_t elapsed_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(now - start_).count();
  if (elapsed_ns < next_ns_.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;                                      // another thread is printing
  if (elapsed_ns < next_ns_.load(std::memory_order_relaxed)) return;  // another thread just printed
  next_ns_.store(elapsed_ns + kIntervalNs, std::memory_order_relaxed);
  show(now);
}

void Progress::add_kept(std::uint64_t nbytes) {
  kept_nbytes_.fetch_add(nbytes, std::memory_order_relaxed);
}

double Progress::seconds_until(Clock::time_point now) const {
  return std::chrono::duration<double>(now - start_).count();
}

void Progress::show(Clock::time_point now) {
  if (display_ == ProgressDisplay::json) return write_json(State::running, now);
  terminal_.show_status(progress_line(phase_, done_nbytes_.load(std::memory_order_relaxed),
                                      total_nbytes_, seconds_until(now)));
}

// A line never shows more than the total, and the line `done` always shows the total, although some
// checks read more or fewer bytes than announced.
void Progress::write_json(State state, Clock::time_point now) {
  const std::uint64_t done_nbytes =
      state == State::done ? total_nbytes_
                           : std::min(done_nbytes_.load(std::memory_order_relaxed), total_nbytes_);
  const auto nbytes = [](std::uint64_t number) { return static_cast<std::int64_t>(number); };
  const double milliseconds = std::round(seconds_until(now) * 1e3);
  terminal_.print_event(value_to_json(Value::Dict{
      {"schema", kJsonSchema},
      {"verb", verb_},
      {"phase", phase_},
      {"state", state == State::running ? "running"
                : state == State::done  ? "done"
                                        : "failed"},
      {"done_nbytes", nbytes(done_nbytes)},
      {"total_nbytes", nbytes(total_nbytes_)},
      {"kept_nbytes", nbytes(kept_nbytes_.load(std::memory_order_relaxed))},
      {"seconds", milliseconds / 1e3},
  }));
}

std::string progress_line(const std::string& label, std::uint64_t done_nbytes,
                          std::uint64_t total_nbytes, double seconds) {
  const double rate = seconds > 0 ? static_cast<double>(done_nbytes) / seconds : 0;
  std::string line = label;
  if (total_nbytes > 0) {
    const double done =
        std::min(static_cast<double>(done_nbytes), static_cast<double>(total_nbytes));
    char percent[16];
    std::snprintf(percent, sizeof percent, "  %3d %%",
                  static_cast<int>(done / static_cast<double>(total_nbytes) * 100));
    line += percent;
  }
  line += "  " + iec_size(done_nbytes);
  if (total_nbytes > 0) line += " of " + iec_size(total_nbytes);
  line += "  " + iec_size(static_cast<std::uint64_t>(rate)) + "/s";
  if (rate > 0 && total_nbytes > done_nbytes) {
    line += "  " + duration(static_cast<double>(total_nbytes - done_nbytes) / rate) + " left";
  }
  return line;
}

}  // namespace tessera::cli
