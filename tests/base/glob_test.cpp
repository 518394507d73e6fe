#include "tessera/base/name_rules.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(GlobTest, StarCrossesDots) {
  EXPECT_TRUE(glob_match("model.*.weight", "model.layers.0.up.weight"));
  EXPECT_FALSE(glob_match("model.*.weight", "model.layers.0.up.bias"));
  EXPECT_TRUE(glob_match("*", ""));
  EXPECT_FALSE(glob_match("", "a"));
}

TEST(GlobTest, SetsAndSingleCharacters) {
  EXPECT_TRUE(glob_match("layers.[0-3].w?", "layers.2.w1"));
  EXPECT_FALSE(glob_match("layers.[!0-3].w?", "layers.2.w1"));
  EXPECT_TRUE(glob_match("a[]]b", "a]b"));
  EXPECT_TRUE(glob_match("a[b", "a[b"));
  EXPECT_TRUE(glob_match("a\\*b", "a*b"));
  EXPECT_FALSE(glob_match("a\\*b", "axb"));
}

TEST(GlobTest, ACharacterIsACodePoint) {
  EXPECT_TRUE(glob_match("layer.?.w", "layer.é.w"));
  EXPECT_TRUE(glob_match("layer.?.w", "layer.日.w"));
  EXPECT_TRUE(glob_match("?", "😀"));
  EXPECT_FALSE(glob_match("??", "é"));
  EXPECT_TRUE(glob_match("[é日]x", "éx"));
  EXPECT_TRUE(glob_match("[é日]x", "日x"));
  EXPECT_FALSE(glob_match("[é日]", "è"));  // shares its first byte with é
  EXPECT_TRUE(glob_match("[!x]", "é"));
  EXPECT_FALSE(glob_match("[!é]", "é"));
  EXPECT_FALSE(glob_match("*[!é]", "aé"));  // `*` does not match half of a character
  EXPECT_TRUE(glob_match("*[!é]", "éa"));
  EXPECT_TRUE(glob_match("\\é", "é"));
}

TEST(GlobTest, RangesGoByCodePoint) {
  EXPECT_TRUE(glob_match("[à-ÿ]", "é"));
  EXPECT_FALSE(glob_match("[à-ÿ]", "Ā"));
  EXPECT_FALSE(glob_match("[à-ÿ]", "À"));
  EXPECT_TRUE(glob_match("[a-日]", "Ж"));
  EXPECT_TRUE(glob_match("[一-龥]", "日"));
  EXPECT_TRUE(glob_match("[é-]", "-"));
}

TEST(GlobTest, AByteThatIsNoUtf8IsACharacter) {
  EXPECT_TRUE(glob_match("a?z", "a\xFFz"));
  EXPECT_FALSE(glob_match("?", "\xE6\x97"));  // the first two bytes of 日
  EXPECT_TRUE(glob_match("??", "\xE6\x97"));
  EXPECT_TRUE(glob_match("[\xF0-\xFF]", "\xFE"));
  EXPECT_FALSE(glob_match("[a-\U0010FFFF]", "\xE9"));
  EXPECT_FALSE(glob_match("é", "\xE9"));
}

TEST(GlobTest, AnyTextHasAPatternOfItsOwn) {
  for (const char* text : {"a.b", "a*b", "a?b", "a[b]c", "a\\b", "!a", "=a", ""}) {
    EXPECT_TRUE(glob_match(glob_of(text), text)) << text;
  }
  EXPECT_FALSE(glob_match(glob_of("a*b"), "axb"));
  EXPECT_FALSE(NameSelection({glob_of("!a")}).selects("b"));
  EXPECT_FALSE(NameSelection({glob_of("=a")}).selects("a"));
}

TEST(GlobTest, ManyStarsStayQuick) {
  const std::string name(2000, 'a');
  EXPECT_FALSE(glob_match("*a*a*a*a*a*a*a*a*a*a*b", name));
}

TEST(NameSelectionTest, PatternsAddAndExclamationTakesAway) {
  EXPECT_TRUE(NameSelection().selects("anything"));
  const NameSelection only_model({"model.*", "!*.bias"});
  EXPECT_TRUE(only_model.selects("model.a.weight"));
  EXPECT_FALSE(only_model.selects("model.a.bias"));
  EXPECT_FALSE(only_model.selects("optim.state"));
  EXPECT_TRUE(NameSelection({"!optim.*"}).selects("model.a"));
}

TEST(NameSelectionTest, APatternSelectsAllBelowWhatItNames) {
  const NameSelection layer({"model.layers.[0-1]"});
  EXPECT_TRUE(layer.selects("model.layers.0"));
  EXPECT_TRUE(layer.selects("model.layers.1.up.weight"));
  EXPECT_FALSE(layer.selects("model.layers.2.up.weight"));
  EXPECT_FALSE(layer.selects("model.layers.10.up.weight"));
  EXPECT_FALSE(NameSelection({"!optim"}).selects("optim.state.x"));
}

TEST(NameSelectionTest, AnEqualsSignSelectsNothingBelow) {
  const NameSelection without_args({"!=args"});
  EXPECT_FALSE(without_args.selects("args"));
  EXPECT_TRUE(without_args.selects("args.weight"));
  const NameSelection numbers({"=layers.[0-1]"});
  EXPECT_TRUE(numbers.selects("layers.0"));
  EXPECT_FALSE(numbers.selects("layers.0.weight"));
  EXPECT_TRUE(NameSelection({"=*.bias"}).selects("a.b.bias"));
  EXPECT_TRUE(NameSelection({"=a[0]"}).selects("a[0]"));
  EXPECT_TRUE(NameSelection({"=a"}).selects("=a"));  // a name with these characters
  EXPECT_EQ(NameSelection({"!=layers"}).unused({"layers.0"}), std::vector<std::string>{"!=layers"});
}

TEST(NameSelectionTest, ANameSelectsItselfWhateverItsCharacters) {
  EXPECT_TRUE(NameSelection({"a[0]"}).selects("a[0]"));
  EXPECT_TRUE(NameSelection({"a\\b"}).selects("a\\b"));
}

TEST(NameSelectionTest, TellsWhichPatternsSelectNothing) {
  const NameSelection selection({"a*", "b*", "!c*", "!d"});
  EXPECT_EQ(selection.unused({"apple", "d.x"}), (std::vector<std::string>{"b*", "!c*"}));
}

}  // namespace
}  // namespace tessera
