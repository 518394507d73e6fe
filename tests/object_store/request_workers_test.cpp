#include "object_store/request_workers.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "object_store/http_server.h"
#include "object_store/remote_file_system.h"
#include "object_store/s3_server.h"
#include "object_store/window.h"

namespace {
bool is_forked_child = false;
}  // namespace

#ifdef __SANITIZE_ADDRESS__
// LeakSanitizer calls this when a process ends. It takes memory of threads that are not in a child
// of fork() for lost.
extern "C" int __lsan_is_turned_off() {
  return is_forked_child ? 1 : 0;
}
#endif

namespace tessera::object_store {
namespace {

/// Runs `body` in a child of fork(). Returns its exit status; -1 if it does not end in time.
int status_of_child(const std::function<void()>& body) {
  const pid_t child = ::fork();
  if (child == 0) {
    is_forked_child = true;
    body();
    ::_exit(1);
  }
  int status = 0;
  for (int wait = 0; wait < 2000; ++wait) {
    if (::waitpid(child, &status, WNOHANG) == child) {
      return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, &status, 0);
  return -1;
}

TEST(RequestWorkersTest, AForkedChildRunsTasksItselfAndEnds) {
  RequestWorkers& workers = RequestWorkers::of_process();
  std::atomic<bool> has_run = false;
  workers.run(RequestWorkers::Turn::last, [&] { has_run = true; });
  while (!has_run) std::this_thread::yield();
  // exit() destroys static objects. The worker threads that wait are not in the child.
  EXPECT_EQ(status_of_child([&] {
              bool runs = false;
              workers.run(RequestWorkers::Turn::last, [&] { runs = true; });
              std::exit(runs ? 7 : 8);
            }),
            7);
}

TEST(RequestWorkersTest, AForkWhileAnotherThreadAddsTasksDoesNotBlockTheChild) {
  RequestWorkers& workers = RequestWorkers::of_process();
  std::atomic<bool> is_over = false;
  std::atomic<int> num_pending = 0;
  std::thread busy([&] {
    while (!is_over) {
      ++num_pending;
      workers.run(RequestWorkers::Turn::last, [&] { --num_pending; });
    }
  });
  int num_ended = 0;
  while (num_ended < 100 && status_of_child([&] {
                              workers.run(RequestWorkers::Turn::last, [] { ::_exit(7); });
                            }) == 7) {
    ++num_ended;
  }
  is_over = true;
  busy.join();
  while (num_pending != 0) std::this_thread::yield();
  EXPECT_EQ(num_ended, 100);
}

TEST(ServerTest, AForkWhileAnotherThreadUsesServersDoesNotBlockTheChild) {
  const std::string url = "https://127.0.0.1/a/b";
  HttpServer http;
  HubServer hub;
  const S3Server s3(S3Settings{});
  RemoteFileSystem& files = RemoteFileSystem::of_process();
  const std::vector<std::pair<const char*, std::function<void()>>> uses = {
      {"HttpServer", [&] { http.keep_query(url, "q"); }},
      {"HubServer", [&] { hub.asking_again_for("hf://owner/name/file"); }},
      {"S3Server", [&] { static_cast<void>(s3.error_of("s3://bucket/key", {}, "s3:GetObject")); }},
      {"RemoteFileSystem", [&] { files.forget(url); }},
      {"WindowMemory",
       [] {
         WindowMemory::of_process().make({0, 1});
       }},
  };
  for (const auto& [name, use] : uses) {
    SCOPED_TRACE(name);
    use();  // a fork while the first use makes the object would block the child
    std::atomic<bool> is_over = false;
    std::thread busy([&] {
      while (!is_over) use();
    });
    int num_ended = 0;
    while (num_ended < 50 && status_of_child([&] {
                               use();
                               ::_exit(7);
                             }) == 7) {
      ++num_ended;
    }
    is_over = true;
    busy.join();
    EXPECT_EQ(num_ended, 50);
  }
}

}  // namespace
}  // namespace tessera::object_store
