#include "object_store/retries.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera::object_store
