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
  const std::string begin = "to leave it out, add --only ";
  EXPECT_TRUE(advice.starts_with(begin)) << advice;
  return advice.substr(begin.size());
}

/// Returns what bash, zsh and fish make of a word that has only single quotes, and `\'` outside
/// them. (Fish also knows `\'` and `\\` within quotes, so a word must have neither.)
std::string read_by_shells(const std::string& word) {
  std::string text;
  bool is_quoted = false;
  for (std::size_t i = 0; i < word.size(); ++i) {
    if (word[i] == '\'') {
      is_quoted = !is_quoted;
    } else if (!is_quoted) {
      EXPECT_EQ(word.substr(i, 2), "\\'") << word;
      text += word[++i];
    } else {
      const std::string pair = word.substr(i, 2);
      EXPECT_TRUE(pair != "\\\\" && pair != "\\'") << word;
      text += word[i];
    }
  }
  EXPECT_FALSE(is_quoted) << word;
  return text;
}

TEST(CommandLineRemediesTest, ANameFromAFileStaysOneWordOfAShellAndIsMatchedAlone) {
  const std::pair<std::string, std::string> cases[] = {
      {"model.weight", "'!model.weight'"}, {"a*b[0]", R"('!a\*b\[0]')"},
      {"it's", R"('!it'\''s')"},           {"x'; touch f; '", R"('!x'\''; touch f; '\''')"},
      {"caf\xc3\xa9", "'!caf\xc3\xa9'"},   {R"(back\slash)", R"('!back[\]slash')"},
      {R"(a\'b\)", R"('!a[\]'\''b[\]')"},  {R"(a\\*!)", R"('!a[\][\]\*\!')"},
  };
  for (const auto& [name, word] : cases) {
    EXPECT_EQ(advised_for(name), word);
    const std::string pattern = read_by_shells(word);
    ASSERT_TRUE(pattern.starts_with('!'));
    EXPECT_TRUE(glob_match(pattern.substr(1), name));
    std::string other = name;
    other[name.find_first_of("\\'*.e")] = 'X';
    EXPECT_FALSE(glob_match(pattern.substr(1), other));
  }
}

TEST(CommandLineRemediesTest, CharactersThatCannotBePrintedMatchAnyCharacterAndTheAdviceSaysSo) {
  const std::pair<std::string, std::string> cases[] = {
      {"a\nb\x1b[2J", R"('!a?b?\[2J')"},
      {"a\xff", "'!a?'"},
      {"a\xe2\x80\xae"
       "b",
       "'!a?b'"},
  };
  for (const auto& [name, word] : cases) {
    EXPECT_EQ(advised_for(name), word + " (here ? is any character)");
    EXPECT_TRUE(glob_match(read_by_shells(word).substr(1), name));
  }
}

}  // namespace
}  // namespace tessera::cli
