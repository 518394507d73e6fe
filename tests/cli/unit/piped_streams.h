#pragma once

#include <fcntl.h>
#include <gmock/gmock.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <string>

namespace tessera::cli {

/// Pipes for a Terminal to print into, and what it has printed.
class PipedStreams {
 public:
  PipedStreams() {
    EXPECT_EQ(::pipe(out_.data()), 0);
    EXPECT_EQ(::pipe(err_.data()), 0);
    ::unsetenv("COLUMNS");
  }
  ~PipedStreams() {
    for (int fd : {out_[0], out_[1], err_[0], err_[1]}) ::close(fd);
  }
  PipedStreams(const PipedStreams&) = delete;
  PipedStreams& operator=(const PipedStreams&) = delete;

  /// Returns what was printed since the last call.
  std::string out() const { return drain(out_[0]); }
  std::string err() const { return drain(err_[0]); }

 protected:
  std::array<int, 2> out_{};
  std::array<int, 2> err_{};

 private:
  static std::string drain(int fd) {
    ::fcntl(fd, F_SETFL, O_NONBLOCK);
    std::string text;
    std::array<char, 4096> buffer{};
    for (ssize_t n = 0; (n = ::read(fd, buffer.data(), buffer.size())) > 0;) {
      text.append(buffer.data(), static_cast<std::size_t>(n));
    }
    return text;
  }
};

}  // namespace tessera::cli
