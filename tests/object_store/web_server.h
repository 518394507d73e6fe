#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <functional>
#include <list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include "base/file_descriptor.h"

namespace tessera::test {

/// A web server on this machine. Each connection has a thread of its own.
class WebServer {
 public:
  /// `answer` is called with the header of each request, and returns all that is sent back. It may
  /// be called by several threads at once.
  explicit WebServer(std::function<std::string(const std::string& header)> answer)
      : answer_(std::move(answer)), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t nbytes = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    if (::bind(listener_.get(), generic, nbytes) != 0 || ::listen(listener_.get(), 16) != 0 ||
        ::getsockname(listener_.get(), generic, &nbytes) != 0) {
      throw std::runtime_error("the test's server cannot listen");
    }
    url_ = "http://127.0.0.1:" + std::to_string(ntohs(address.sin_port)) + "/file.bin";
    acceptor_ = std::thread([this] { accept_connections(); });
  }

  ~WebServer() {
    ::shutdown(listener_.get(), SHUT_RDWR);
    acceptor_.join();
    for (Connection& connection : connections_) {
      ::shutdown(connection.socket.get(), SHUT_RDWR);
      connection.thread.join();
    }
  }

  const std::string& url() const { return url_; }

 private:
  struct Connection {
    tessera::detail::FileDescriptor socket;
    std::thread thread{};
  };

  void accept_connections() {
    for (;;) {
      tessera::detail::FileDescriptor socket(::accept(listener_.get(), nullptr, nullptr));
      if (!socket) return;
      Connection& connection = connections_.emplace_back(std::move(socket));
      connection.thread = std::thread([this, &connection] { serve(connection.socket.get()); });
    }
  }

  void serve(int socket) const {
    std::string header;
    char buffer[4096];
    for (ssize_t n; (n = ::recv(socket, buffer, sizeof buffer, 0)) > 0;) {
      header.append(buffer, static_cast<std::size_t>(n));
      if (!header.ends_with("\r\n\r\n")) continue;
      const std::string bytes = answer_(header);
      if (::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL) < 0) break;
      header.clear();
    }
    ::shutdown(socket, SHUT_RDWR);
  }

  const std::function<std::string(const std::string&)> answer_;
  const tessera::detail::FileDescriptor listener_;
  std::string url_;
  std::list<Connection> connections_;  // changed only by `acceptor_` while it runs
  std::thread acceptor_;
};

/// Returns an answer with a body. `fields`: further lines of its header, each with "\r\n".
inline std::string http_answer(std::string_view status, std::string_view fields,
                               std::string_view body) {
  std::string answer = "HTTP/1.1 " + std::string(status) + "\r\n" + std::string(fields);
  answer += "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n";
  return answer.append(body);
}

}  // namespace tessera::test
