#include "object_store/remote_file_system.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <future>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "base/current_stop.h"
#include "object_store/curl_library.h"
#include "object_store/web_server.h"
#include "support/error_matchers.h"
#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

using test::WebServer;

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
  const WebServer server([&](const std::string&) {
    const bool is_first = ++num_requests == 1;
    if (is_first) files.forget(url);  // as another thread that knows that the file has changed
    const std::string body = is_first ? "old" : "a new file";
    return test::http_answer("200 OK", "Connection: close\r\nETag: \"" + body + "\"\r\n", body);
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

TEST_F(RemoteFileSystemTest, AFileThatMayNotBeReadIsNotMissing) {
  RemoteFileSystem files;
  std::string body;
  const WebServer readable([](const std::string&) { return test::http_answer("200 OK", "", "x"); });
  const WebServer refusing(
      [&](const std::string&) { return test::http_answer("403 Forbidden", "", body); });
  EXPECT_TRUE(files.kind_of(readable.url()));
  body = "denied";
  EXPECT_THAT([&] { files.kind_of(refusing.url()); },
              test::ThrowsError(ErrorKind::io, "status 403"));
  body = "<Error><Code>AccessDenied</Code></Error>";  // but no object of this host was read
  EXPECT_THAT([&] { files.kind_of(refusing.url()); },
              test::ThrowsError(ErrorKind::io, "status 403"));
}

/// S3 answers AccessDenied, not 404, if the user may not list the bucket.
TEST_F(RemoteFileSystemTest, AnObjectBesideOneThatWasReadIsMissingIfS3DeniesAccess) {
  RemoteFileSystem files;
  const WebServer server([](const std::string& header) {
    if (header.starts_with("GET /file.bin ")) return test::http_answer("200 OK", "", "x");
    const bool is_of_s3 = header.starts_with("GET /file.bin.s3 ");
    return test::http_answer("403 Forbidden", "",
                             is_of_s3 ? "<Error><Code>AccessDenied</Code></Error>" : "denied");
  });
  EXPECT_TRUE(files.kind_of(server.url()));
  EXPECT_FALSE(files.kind_of(server.url() + ".s3"));
  EXPECT_THAT([&] { files.kind_of(server.url() + ".other"); },
              test::ThrowsError(ErrorKind::io, "status 403"));
}

TEST_F(RemoteFileSystemTest, AStopEndsARequestThatTheServerDoesNotAnswer) {
  RemoteFileSystem files;
  std::stop_source stop;
  std::promise<void> has_ended;
  std::shared_future<void> end(has_ended.get_future());
  const WebServer server([&](const std::string&) {
    stop.request_stop();
    end.wait();
    return test::http_answer("200 OK", "", "x");
  });
  const auto begin = std::chrono::steady_clock::now();
  {
    const tessera::detail::CurrentStop current(stop.get_token());
    EXPECT_THAT([&] { files.kind_of(server.url()); },
                test::ThrowsError(ErrorKind::interrupted, "interrupted"));
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  has_ended.set_value();
}

}  // namespace
}  // namespace tessera::object_store
