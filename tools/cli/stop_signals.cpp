#include "cli/stop_signals.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::cli {
namespace {

constexpr std::array kSignals = {SIGINT, SIGTERM};
constexpr char kStop = 's';
constexpr char kQuit = 'q';

// Used by the signal handler, which may only use lock-free atomics and call write, signal and
// raise.
std::atomic<int> pipe_write_end = -1;
std::atomic<int> num_signals = 0;
int pipe_read_end = -1;
std::array<struct sigaction, kSignals.size()> previous_actions;

void on_signal(int signal) {
  const int saved_errno = errno;
  if (num_signals.fetch_add(1) > 0) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
  [[maybe_unused]] const ssize_t written = ::write(pipe_write_end.load(), &kStop, 1);
  errno = saved_errno;
}

}  // namespace

StopSignals::StopSignals() {
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) {
    throw Error(ErrorKind::io, {}, std::string("cannot make a pipe: ") + std::strerror(errno));
  }
  pipe_read_end = ends[0];
  pipe_write_end = ends[1];
  num_signals = 0;
  waiter_ = std::thread([this] {
    for (;;) {
      char byte = 0;
      const ssize_t nbytes = ::read(pipe_read_end, &byte, 1);
      if (nbytes < 0 && errno == EINTR) continue;
      if (nbytes != 1 || byte == kQuit) return;
      source_.request_stop();
    }
  });
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = SA_RESTART;
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], nullptr, &previous_actions[i]);
    if (previous_actions[i].sa_handler != SIG_IGN) ::sigaction(kSignals[i], &action, nullptr);
  }
}

StopSignals::~StopSignals() {
  for (std::size_t i = 0; i < kSignals.size(); ++i) {
    ::sigaction(kSignals[i], &previous_actions[i], nullptr);
  }
  [[maybe_unused]] const ssize_t written = ::write(pipe_write_end.load(), &kQuit, 1);
  waiter_.join();
  ::close(pipe_write_end.exchange(-1));
  ::close(pipe_read_end);
}

}  // namespace tessera::cli
