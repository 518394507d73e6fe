#include "cli/command_line_remedies.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"

namespace tessera::cli {
namespace {

std::string advised_for(const std::string& name) {
  const std::string advice = command_line_remedy({Remedy::Action::leave_out, glob_of(name)});
  const std::string begin = "to leave it out, add --only '!";
  EXPECT_TRUE(advice.starts_with(begin) && advice.ends_with('\'')) << advice;
  return advice.substr(begin.size(), advice.size() - begin.size() - 1);
}

TEST(CommandLineRemediesTest, ANameFromAFileStaysOneWordOfAShellAndIsMatched) {
  const std::pair<std::string, std::string> cases[] = {
      {"model.weight", "model.weight"},
      {"a*b[0]", "a\\*b\\[0]"},
      {"x'; touch f; '", "x?; touch f; ?"},
      {"a\nb\x1b[2J", "a?b?\\[2J"},
      {"caf\xc3\xa9", "caf\xc3\xa9"},
      {"a\xff", "a?"},
      {"a\xe2\x80\xae"
       "b",
       "a?b"},
      {"back\\slash", "back\\\\slash"},
  };
  for (const auto& [name, pattern] : cases) {
    EXPECT_EQ(advised_for(name), pattern);
    EXPECT_TRUE(glob_match(pattern, name));
  }
}

}  // namespace
}  // namespace tessera::cli
