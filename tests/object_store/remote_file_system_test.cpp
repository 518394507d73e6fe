#include "object_store/remote_file_system.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>

#include "base/file_descriptor.h"
#include "object_store/curl_library.h"
#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

/// A web server on this machine that sends what `body` returns, whatever is asked for.
class WebServer {
 public:
  explicit WebServer(std::function<std::string()> body)
      : body_(std::move(body)), socket_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
    socklen_t nbytes = sizeof address;
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(socket_.get(), generic, nbytes), 0);
    EXPECT_EQ(::listen(socket_.get(), 8), 0);
    EXPECT_EQ(::getsockname(socket_.get(), generic, &nbytes), 0);
    url_ = "http://127.0.0.1:" + std::to_string(::ntohs(address.sin_port)) + "/file.bin";
    thread_ = std::thread([this] { serve(); });
  }
  ~WebServer() {
    ::shutdown(socket_.get(), SHUT_RDWR);
    thread_.join();
  }
  const std::string& url() const { return url_; }

 private:
  void serve() const {
    for (;;) {
      const tessera::detail::FileDescriptor client(::accept(socket_.get(), nullptr, nullptr));
      if (!client) return;
      char request[4096];
      if (::read(client.get(), request, sizeof request) <= 0) continue;
      const std::string body = body_();
      const std::string answer = "HTTP/1.1 200 OK\r\nConnection: close\r\nETag: \"" + body +
                                 "\"\r\nContent-Length: " + std::to_string(body.size()) +
                                 "\r\n\r\n" + body;
      EXPECT_GT(::write(client.get(), answer.data(), answer.size()), 0);
    }
  }

  std::function<std::string()> body_;
  tessera::detail::FileDescriptor socket_;
  std::string url_;
  std::thread thread_;
};

class RemoteFileSystemTest : public testing::Test {
 protected:
  void SetUp() override {
    try {
      CurlLibrary::of_process();
    } catch (const Error&) {
      GTEST_SKIP() << "libcurl is not installed";
    }
    ::setenv("no_proxy", "127.0.0.1", 1);
  }
};

TEST_F(RemoteFileSystemTest, AnAnswerFromBeforeForgetIsNotKept) {
  RemoteFileSystem files;
  std::string url;
  int num_requests = 0;
  const WebServer server([&] {
    if (++num_requests > 1) return std::string("a new file");
    files.forget(url);  // as another thread that knows that the file has changed
    return std::string("old");
  });
  url = server.url();
  EXPECT_EQ(files.open(url)->nbytes(), 3U);
  EXPECT_EQ(files.open(url)->nbytes(), 10U);
  EXPECT_EQ(files.open(url)->nbytes(), 10U);
  EXPECT_EQ(num_requests, 2);
}

TEST_F(RemoteFileSystemTest, OneThreadForgetsWhileOthersAskTheHub) {
  ::setenv("HF_ENDPOINT", "http://127.0.0.1:1", 1);  // no server is there
  ::setenv("AWS_MAX_ATTEMPTS", "1", 1);
  RemoteFileSystem files;
  std::atomic<bool> has_ended = false;
  std::thread asking([&] {
    for (int i = 0; i < 500; ++i) EXPECT_THROW(files.kind_of("hf://owner/model/a.json"), Error);
    has_ended = true;
  });
  while (!has_ended) files.forget("hf://owner/model");
  asking.join();
  ::unsetenv("HF_ENDPOINT");
  ::unsetenv("AWS_MAX_ATTEMPTS");
}

}  // namespace
}  // namespace tessera::object_store
