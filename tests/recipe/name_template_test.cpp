#include "recipe/name_template.h"

#include <gmock/gmock.h>

namespace tessera::recipe {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

NameTemplate parsed_template(std::string_view text) {
  auto result = NameTemplate::parse(text);
  EXPECT_TRUE(std::holds_alternative<NameTemplate>(result)) << text;
  return std::get<NameTemplate>(std::move(result));
}

std::string problem_of(std::string_view text) {
  auto result = NameTemplate::parse(text);
  if (const auto* problem = std::get_if<NameTemplate::Problem>(&result)) return problem->found;
  const auto ambiguity = std::get<NameTemplate>(result).ambiguity();
  return ambiguity ? ambiguity->expected : "";
}

std::string formatted(const NameTemplate& form, const std::vector<std::string>& values) {
  const auto name = form.format([&](const std::string& capture) -> const std::string& {
    const auto& captures = form.captures();
    return values.at(
        static_cast<std::size_t>(std::ranges::lower_bound(captures, capture) - captures.begin()));
  });
  return name.value_or("none");
}

TEST(NameTemplateTest, NumbersAreDecimalWithoutLeadingZeros) {
  const NameTemplate form = parsed_template("layers.{L}.w");
  EXPECT_THAT(*form.match("layers.17.w"), ElementsAre("17"));
  EXPECT_THAT(*form.match("layers.0.w"), ElementsAre("0"));
  for (const char* other : {"layers.017.w", "layers..w", "layers.x.w", "layers.1.ww", "alayers.1.w",
                            "layers.1234567890123456789.w"}) {
    EXPECT_FALSE(form.match(other)) << other;
  }
}

TEST(NameTemplateTest, ANumberIsShifted) {
  const NameTemplate form = parsed_template("h.{L+4}.w");
  EXPECT_THAT(*form.match("h.4.w"), ElementsAre("0"));
  EXPECT_FALSE(form.match("h.3.w"));
  EXPECT_EQ(formatted(form, {"7"}), "h.11.w");
}

TEST(NameTemplateTest, ARangeBoundsANumber) {
  const NameTemplate form = parsed_template("layers.{L:2..61}.w");
  EXPECT_FALSE(form.match("layers.1.w"));
  EXPECT_THAT(*form.match("layers.2.w"), ElementsAre("2"));
  EXPECT_THAT(*form.match("layers.60.w"), ElementsAre("60"));
  EXPECT_FALSE(form.match("layers.61.w"));
  // The range is that of L itself, not of the number L + 4 in the name.
  EXPECT_THAT(*parsed_template("h.{L+4:0..2}.w").match("h.5.w"), ElementsAre("1"));
  EXPECT_FALSE(parsed_template("h.{L+4:0..2}.w").match("h.6.w"));
}

TEST(NameTemplateTest, NumbersMayBeVariables) {
  const auto value_of = [](std::string_view) { return std::int64_t{61}; };
  const auto last = NameTemplate::parse("layers.{M+layers}.w", value_of);
  EXPECT_THAT(*std::get<NameTemplate>(last).match("layers.62.w"), ElementsAre("1"));
  EXPECT_FALSE(std::get<NameTemplate>(last).match("layers.60.w"));
  const auto first = NameTemplate::parse("layers.{L:0..layers}.w", value_of);
  EXPECT_TRUE(std::get<NameTemplate>(first).match("layers.60.w"));
  EXPECT_FALSE(std::get<NameTemplate>(first).match("layers.61.w"));
  EXPECT_NE(problem_of("layers.{M+layers}.w"), "");
}

TEST(NameTemplateTest, TextsHaveNoDotAndAnyHas) {
  EXPECT_THAT(*parsed_template("a.{name}.b").match("a.xy.b"), ElementsAre("xy"));
  EXPECT_FALSE(parsed_template("a.{name}.b").match("a.x.y.b"));
  EXPECT_THAT(*parsed_template("{x:*}_m.{y:*}").match("p._m.q.r"), ElementsAre("p.", "q.r"));
  EXPECT_THAT(*parsed_template("{x:*}_m.{y:*}").match("_m.q"), ElementsAre("", "q"));
}

TEST(NameTemplateTest, AlternativesAreWords) {
  const NameTemplate form = parsed_template("{p:q|k|v}_proj");
  EXPECT_THAT(*form.match("v_proj"), ElementsAre("2"));
  EXPECT_FALSE(form.match("o_proj"));
  EXPECT_EQ(formatted(form, {"1"}), "k_proj");
  EXPECT_EQ(form.with_word("p", 0).match("q_proj")->size(), 0U);
}

TEST(NameTemplateTest, ARepeatedNumberIsTheSame) {
  const NameTemplate form = parsed_template("a.{L}.b.{L}.c");
  EXPECT_TRUE(form.match("a.3.b.3.c"));
  EXPECT_FALSE(form.match("a.3.b.4.c"));
}

TEST(NameTemplateTest, RefusesWhatIsNoTemplate) {
  for (const char* text : {"",
                           "{",
                           "a}",
                           "{}",
                           "{1}",
                           "{L*2}",
                           "{p:}",
                           "{p:q}",
                           "{p:q||v}",
                           "{p:q|q}",
                           "{L:*}",
                           "{name+1}",
                           "{L+9999999999}",
                           "{L:}",
                           "{L:3}",
                           "{L:3..}",
                           "{L:..3}",
                           "{L:3..3}",
                           "{L:0..9999999999}",
                           "{L:0..3..4}",
                           "{x:0..3}",
                           "{L+:0..3}"}) {
    EXPECT_NE(problem_of(text), "") << text;
  }
}

TEST(NameTemplateTest, RefusesWhatReadsTwoWays) {
  for (const char* text : {"{L}{E}", "{a}{b}", "{L}0", "{a}.{a}", "{a}-{b}-{c}-{d}-{e}"}) {
    EXPECT_NE(problem_of(text), "") << text;
  }
}

TEST(NameTemplateTest, AHostilePatternTakesPolynomialTime) {
  const NameTemplate form = parsed_template("{a:*}x{b:*}x{c:*}x{d:*}y");
  EXPECT_FALSE(form.match(std::string(NameTemplate::kMaxNameNbytes - 1, 'x') + "z"));
  EXPECT_FALSE(form.match(std::string(NameTemplate::kMaxNameNbytes + 1, 'x')));
  EXPECT_FALSE(parsed_template("{a:*}x{b:*}x{c:*}xz{d:*}").match(std::string(2000, 'x')));
  std::string words;
  for (char name = 'a'; name <= 'z'; ++name) words += std::string("{") + name + ":x|x-x}-";
  EXPECT_FALSE(parsed_template(words + "y").match([] {
    std::string name;
    for (int i = 0; i < 40; ++i) name += "x-";
    return name + "y";
  }() + "y"));
  EXPECT_NE(problem_of("{L}." + words + "{L}"), "");
  EXPECT_EQ(problem_of("{L}.{a:x|y}-{b:x|y}-{L}"), "");
}

}  // namespace
}  // namespace tessera::recipe
