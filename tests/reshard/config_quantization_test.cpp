#include "reshard/config_quantization.h"

#include <gmock/gmock.h>

#include <utility>

namespace tessera::reshard {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

std::string without(std::string_view config) {
  const auto result = remove_quantization(config);
  return result ? result->text : "no JSON object";
}

TEST(ConfigQuantizationTest, RemovesTheMemberAndOneComma) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {R"({"quantization_config": {"a": [1, {}]}})", "{}"},
      {R"({"a": 1, "quantization_config": 0})", R"({"a": 1})"},
      {R"({"quantization_config": {}, "a": 1})", R"({ "a": 1})"},
      {R"({"a": 1, "quantization_config": {}, "b": 2})", R"({"a": 1, "b": 2})"},
      {R"({"compression_config": 1, "quantization_config": 2, "b": 3})", R"({ "b": 3})"},
      {R"({"a": 1, "compression_config": 1, "quantization_config": 2})", R"({"a": 1})"},
      {"{\n  \"a\": 1,\n  \"quantization_config\": {\n    \"b\": 2\n  },\n  \"c\": 3\n}\n",
       "{\n  \"a\": 1,\n  \"c\": 3\n}\n"},
  };
  for (const auto& [before, after] : cases) EXPECT_EQ(without(before), after);
}

TEST(ConfigQuantizationTest, RemovesWhatMistralCallsQuantization) {
  constexpr std::string_view kParams =
      R"({"dim": 4, "quantization": {}, "quantization_config": 1})";
  EXPECT_EQ(remove_quantization(kParams, kQuantizationInParams)->text,
            R"({"dim": 4, "quantization_config": 1})");
  EXPECT_EQ(remove_quantization(kParams)->text, R"({"dim": 4, "quantization": {}})");
}

TEST(ConfigQuantizationTest, LooksIntoThePartsOfAModelAlone) {
  const auto result = remove_quantization(
      R"({"text_config": {"quantization_config": 1, "x": 2}, "other": {"quantization_config": 3}})");
  ASSERT_TRUE(result);
  EXPECT_EQ(result->text, R"({"text_config": { "x": 2}, "other": {"quantization_config": 3}})");
  EXPECT_THAT(result->removed, ElementsAre("text_config.quantization_config"));
  const auto nested = remove_quantization(
      R"({"a_config": {"b_config": {"quantization_config": 1}, "c": {"d_config": {"quantization_config": 2}}}})");
  EXPECT_EQ(nested->text,
            R"({"a_config": {"b_config": {}, "c": {"d_config": {"quantization_config": 2}}}})");
  EXPECT_THAT(nested->removed, ElementsAre("a_config.b_config.quantization_config"));
  EXPECT_THAT(remove_quantization(R"({"a": "quantization_config"})")->removed, IsEmpty());
}

TEST(ConfigQuantizationTest, RefusesWhatIsNoJsonObject) {
  for (const char* text : {"", "[]", "{", R"({"a": 1,})", R"({"a" 1})", "{} {}", R"({"a: 1})"}) {
    EXPECT_FALSE(remove_quantization(text).has_value()) << text;
  }
}

}  // namespace
}  // namespace tessera::reshard
