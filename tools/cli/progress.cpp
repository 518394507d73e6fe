#include "cli/progress.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "cli/sizes.h"

namespace tessera::cli {
namespace {

constexpr std::int64_t kFirstDrawNs = 500'000'000;
constexpr std::int64_t kDrawIntervalNs = 100'000'000;

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

}  // namespace

Progress::Progress(Terminal& terminal, std::string label, std::uint64_t total_nbytes,
                   ProgressDisplay display)
    : terminal_(terminal),
      label_(std::move(label)),
      total_nbytes_(total_nbytes),
      shown_(display == ProgressDisplay::on_terminal && terminal.errors_are_on_terminal()),
      start_(Clock::now()),
      next_draw_ns_(kFirstDrawNs) {}

Progress::~Progress() {
  if (shown_) terminal_.show_status({});
}

void Progress::add(std::uint64_t nbytes) {
  done_nbytes_.fetch_add(nbytes, std::memory_order_relaxed);
  if (!shown_) return;
  const Clock::time_point now = Clock::now();
  const std::int64_t elapsed_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(now - start_).count();
  if (elapsed_ns < next_draw_ns_.load(std::memory_order_relaxed)) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return;  // somebody else is drawing
  next_draw_ns_.store(elapsed_ns + kDrawIntervalNs, std::memory_order_relaxed);
  draw(now);
}

void Progress::draw(Clock::time_point now) {
  const double seconds = std::chrono::duration<double>(now - start_).count();
  terminal_.show_status(
      progress_line(label_, done_nbytes_.load(std::memory_order_relaxed), total_nbytes_, seconds));
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
