#include "object_store/remote_file.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "object_store/http_server.h"

namespace tessera::object_store {
namespace {

constexpr std::uint64_t kKib = std::uint64_t{1} << 10;

std::vector<std::byte> numbered_bytes(std::size_t nbytes) {
  std::vector<std::byte> bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; ++i)
    bytes[i] = static_cast<std::byte>((i * 2654435761U) >> 16);
  return bytes;
}

/// A web server on this machine that has one file, and answers requests for ranges of it.
class RangeServer {
 public:
  explicit RangeServer(std::vector<std::byte> file)
      : file_(std::move(file)), listener_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t nbytes = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_, any, nbytes) != 0 || ::listen(listener_, 16) != 0 ||
        ::getsockname(listener_, any, &nbytes) != 0) {
      throw std::runtime_error("the test's server cannot listen");
    }
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/file";
    std::thread([this] { accept_connections(); }).detach();
  }

  const std::string& url() const { return url_; }

 private:
  void accept_connections() {
    for (;;) {
      const int connection = ::accept(listener_, nullptr, nullptr);
      if (connection >= 0) std::thread([this, connection] { serve(connection); }).detach();
    }
  }

  void serve(int connection) {
    std::string request;
    char buffer[4096];
    for (ssize_t n; (n = ::recv(connection, buffer, sizeof buffer, 0)) > 0;) {
      request.append(buffer, static_cast<std::size_t>(n));
      if (!request.ends_with("\r\n\r\n")) continue;
      unsigned long first = 0;
      unsigned long last = 0;
      const std::size_t range = request.find("bytes=");
      if (range == std::string::npos ||
          std::sscanf(request.c_str() + range, "bytes=%lu-%lu", &first, &last) != 2) {
        break;
      }
      std::string answer =
          "HTTP/1.1 206 Partial Content\r\nContent-Length: " + std::to_string(last + 1 - first) +
          "\r\nContent-Range: bytes " + std::to_string(first) + "-" + std::to_string(last) + "/" +
          std::to_string(file_.size()) + "\r\n\r\n";
      answer.append(reinterpret_cast<const char*>(file_.data()) + first, last + 1 - first);
      if (::send(connection, answer.data(), answer.size(), MSG_NOSIGNAL) < 0) break;
      request.clear();
    }
    ::close(connection);
  }

  const std::vector<std::byte> file_;
  const int listener_;
  std::string url_;
};

// Several threads read the same blocks, so that one thread's window can be read to its end, and
// forgotten, by the others before that thread has taken its own bytes.
TEST(RemoteFileTest, ThreadsThatReadTheSameBlocksAllGetTheirBytes) {
  constexpr std::uint64_t kBlock = 64 * kKib;
  constexpr int kNumThreads = 8;
  const std::vector<std::byte> bytes = numbered_bytes(16 * kBlock);
  const auto& site = *new RangeServer(bytes);  // never destroyed: its threads run until the end
  HttpServer server;
  for (int round = 0; round < 30; ++round) {
    const RemoteFile file(server, site.url(), {.nbytes = bytes.size()},
                          {bytes.begin(), bytes.begin() + std::ptrdiff_t{kBlock}});
    std::barrier begin(kNumThreads);
    std::vector<int> num_wrong(kNumThreads);
    {
      std::vector<std::jthread> threads;
      for (int thread = 0; thread < kNumThreads; ++thread) {
        threads.emplace_back([&, thread] {
          std::vector<std::byte> block(kBlock);
          begin.arrive_and_wait();
          for (std::uint64_t i = 0; i < 2 * bytes.size() / kBlock; ++i) {
            const std::uint64_t offset = i * kBlock % bytes.size();
            std::ranges::fill(block, std::byte{});
            file.read_at(offset, block);
            const bool is_right = std::memcmp(block.data(), bytes.data() + offset, kBlock) == 0;
            num_wrong[static_cast<std::size_t>(thread)] += is_right ? 0 : 1;
          }
        });
      }
    }
    ASSERT_EQ(num_wrong, std::vector<int>(kNumThreads)) << "round " << round;
  }
}

}  // namespace
}  // namespace tessera::object_store
