#include "object_store/retries.h"

#include <gtest/gtest.h>

#include <stop_token>
#include <thread>

#include "base/current_stop.h"
#include "support/error_matchers.h"

namespace tessera::object_store {
namespace {

HttpResponse overloaded(const std::string& seconds) {
  HttpResponse response{.status = 429, .headers = {}};
  response.headers["retry-after"] = seconds;
  return response;
}

TEST(RetriesTest, WaitsThatTheServerAsksForDoNotCount) {
  using std::chrono::milliseconds;
  RetryPolicy policy{.first_wait = milliseconds(1), .deadline = std::chrono::seconds(1)};
  policy.max_asked = milliseconds(1000);
  Retries retries(policy);
  EXPECT_TRUE(retries.wait_after(overloaded("1")));
  EXPECT_FALSE(retries.wait_after(overloaded("1")));  // together more than max_asked
}

TEST(RetriesTest, AStopEndsWaitsAndAfterAFewAttemptsTheRequest) {
  std::stop_source stop;
  const tessera::detail::CurrentStop current(stop.get_token());
  Retries retries(RetryPolicy{});
  const auto begin = std::chrono::steady_clock::now();
  std::thread stopping([&] { stop.request_stop(); });
  EXPECT_TRUE(retries.wait_after(overloaded("60")));
  EXPECT_TRUE(retries.wait_after(overloaded("")));
  EXPECT_THAT([&] { retries.wait_after(overloaded("")); },
              test::ThrowsError(ErrorKind::interrupted, "interrupted"));
  EXPECT_FALSE(retries.wait_after({.status = 403, .headers = {}}));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
  stopping.join();
}

}  // namespace
}  // namespace tessera::object_store
