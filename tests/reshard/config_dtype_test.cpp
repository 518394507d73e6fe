#include "reshard/config_dtype.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera::reshard {
namespace {

std::string edited(std::string_view config, DType dtype = DType::bfloat16) {
  const auto result = with_dtype(config, dtype);
  return result ? result->text : "unchanged";
}

TEST(ConfigDTypeTest, OnlyTheDTypeIsEdited) {
  const auto result =
      with_dtype("{\n  \"a\":1,\r\n\t\"torch_dtype\" : \"float32\" }\n", DType::bfloat16);
  ASSERT_TRUE(result.has_value());
  EXPECT_EQ(result->text, "{\n  \"a\":1,\r\n\t\"torch_dtype\" : \"bfloat16\" }\n");
  EXPECT_EQ(result->what, "torch_dtype: float32 to bfloat16");
}

TEST(ConfigDTypeTest, InnerConfigsAreEdited) {
  EXPECT_EQ(edited(R"({"text_config": {"dtype": "float32"}, "dtype": "torch.float16"})"),
            R"({"text_config": {"dtype": "bfloat16"}, "dtype": "bfloat16"})");
  const auto twice =
      with_dtype(R"({"a_config": {"dtype": "float32"}, "dtype": "float32"})", DType::float16);
  ASSERT_TRUE(twice.has_value());
  EXPECT_EQ(twice->what, "dtype: float32 to float16");
}

TEST(ConfigDTypeTest, WhatIsNotTheModelsDTypeStays) {
  for (const char* config : {
           R"({"quantization_config": {"dtype": "float32"}})",
           R"({"text_config": {"inner_config": {"dtype": "float32"}}})",
           R"({"other": {"dtype": "float32"}, "list": [{"dtype": "float32"}]})",
           R"({"dtype": "int8"})",
           R"({"dtype": "auto"})",
           R"({"dtype": null})",
           R"({"dtype": "bfloat16"})",
           R"({"\"dtype\": \"float32": 1})",
           R"({"text": "\"dtype\": \"float32\""})",
           "{}",
       }) {
    EXPECT_EQ(edited(config), "unchanged") << config;
  }
}

TEST(ConfigDTypeTest, WhatPythonWritesAndJsonLacksIsUnderstood) {
  EXPECT_EQ(edited(R"({"limit": [0.0, Infinity], "n": -NaN, "dtype": "float32"})"),
            R"({"limit": [0.0, Infinity], "n": -NaN, "dtype": "bfloat16"})");
}

TEST(ConfigDTypeTest, WhatIsNotJsonStays) {
  const std::string whole = R"({"a": [1, {"b": "\"c"}], "dtype": "float32"})";
  ASSERT_NE(edited(whole), "unchanged");
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    EXPECT_EQ(edited(whole.substr(0, nbytes)), "unchanged") << nbytes;
  }
  EXPECT_EQ(edited(whole + "}"), "unchanged");
  EXPECT_EQ(edited("[" + whole + "]"), "unchanged");
  std::string deep = R"({"dtype": "float32", "a": )";
  for (int i = 0; i < 100'000; ++i) deep += "[";
  EXPECT_EQ(edited(deep), "unchanged");
}

}  // namespace
}  // namespace tessera::reshard
