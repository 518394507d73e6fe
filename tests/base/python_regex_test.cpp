#include "base/python_regex.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "support/error_matchers.h"

namespace tessera::detail {
namespace {

using test::ThrowsError;

// Shows F2.
TEST(PythonRegexTest, MatchesAsPythonDoes) {
  const auto matches = [](const char* pattern, const char* name) {
    return PythonRegex(pattern, "file", "pattern").matches(name);
  };
  EXPECT_TRUE(matches(R"(\d+\.norm\.(weight|bias)$)", "12.norm.bias"));
  EXPECT_FALSE(matches(R"(\d+\.norm\.(weight|bias)$)", "12.norm.bias_2"));
  EXPECT_FALSE(matches(R"(norm)", "12.norm"));  // only the beginning is compared
  EXPECT_TRUE(matches(R"(.*norm)", "12.norm.weight"));
  EXPECT_TRUE(matches(R"(^model\.layers\.0$)", "model.layers.0"));
  EXPECT_TRUE(matches(R"([a-c_]{2,3}x)", "ab_x"));
  EXPECT_FALSE(matches(R"([a-c_]{2,3}x)", "ax"));
  EXPECT_TRUE(matches(R"([^0-9]+?\w\S)", "ab-cd"));
  EXPECT_TRUE(matches(R"((?:a|bc)*d)", "abcbcad"));
  EXPECT_TRUE(matches(R"(a?b{0,}c{2}\-[]x-]$)", "cc-]"));
  EXPECT_TRUE(matches("", "anything"));
  EXPECT_TRUE(matches("é*é?b", "b"));
  EXPECT_TRUE(matches("aé{2}$", "aéé"));
  EXPECT_FALSE(matches(".{2}", "é"));
  EXPECT_TRUE(matches(R"([^a]\w.\D$)", "é€éé"));
  for (const char* const pattern :
       {"(", ")", "a)", "*a", "[a", "(?!a)", "(?P<n>a)", R"(\bx)", "[aé]", "[^é]", R"(\1)", "a{2",
        "a{3,1}", "[b-a]", "\\", "a{9999}{9999}"}) {
    EXPECT_THAT([&] { PythonRegex(pattern, "file", "pattern"); },
                ThrowsError(ErrorKind::unsupported, "file: pattern: expected a regular"))
        << pattern;
  }
}

// Shows E3.
TEST(PythonRegexTest, AnErrorSaysWhichLimitIsExceeded) {
  const auto refused = [](const std::string& pattern, const std::string& words) {
    EXPECT_THAT([&] { PythonRegex(pattern, "file", "pattern"); },
                ThrowsError(ErrorKind::unsupported, words));
  };
  refused("(?:a{100}){100}", "at most 4096 steps");
  refused("a{99999999999999999999}", "at most 4096 steps");
  refused(std::string(60, '(') + std::string(60, ')'), "at most 50 levels of nested groups");
  refused("(a", "without back references");
}

// Shows F2, E3. A search that backtracks would take exponential time.
TEST(PythonRegexTest, AnExpressionWithManyWaysToMatchIsQuick) {
  const std::string name(4000, 'a');
  EXPECT_FALSE(PythonRegex("(a*)*(a|a)*(a?){50}b", "file", "pattern").matches(name));
}

}  // namespace
}  // namespace tessera::detail
