#include "reshard/config_dtype.h"

#include <gmock/gmock.h>

#include <string>

namespace tessera::reshard {
namespace {

/// Edits the config of a model that is cast from float32.
ConfigEdit edit_of(std::string_view config, DType to = DType::bfloat16) {
  return edit_config_dtype(config, {{DType::float32}, to});
}

std::string edited(std::string_view config) {
  const ConfigEdit edit = edit_of(config);
  EXPECT_EQ(edit.what.empty(), edit.text.empty());
  return edit.text.empty() ? "unchanged" : edit.text;
}

TEST(ConfigDTypeTest, OnlyTheDTypeIsEdited) {
  const ConfigEdit edit = edit_of("{\n  \"a\":1,\r\n\t\"torch_dtype\" : \"float32\" }\n");
  EXPECT_EQ(edit.text, "{\n  \"a\":1,\r\n\t\"torch_dtype\" : \"bfloat16\" }\n");
  EXPECT_EQ(edit.what, "torch_dtype: float32 to bfloat16");
  EXPECT_EQ(edit.why_not, "");
}

TEST(ConfigDTypeTest, InnerConfigsAreEditedAndNamedByPath) {
  EXPECT_EQ(edited(R"({"text_config": {"dtype": "float32"}, "dtype": "torch.float16"})"),
            R"({"text_config": {"dtype": "bfloat16"}, "dtype": "bfloat16"})");
  EXPECT_EQ(edited(R"({"text_config": {"inner_config": {"dtype": "float16"}}})"),
            R"({"text_config": {"inner_config": {"dtype": "bfloat16"}}})");
  EXPECT_EQ(edit_of(R"({"a_config": {"b_config": {"dtype": "float32"}}, "dtype": "float32"})").what,
            "a_config.b_config.dtype: float32 to bfloat16, dtype: float32 to bfloat16");
}

TEST(ConfigDTypeTest, AnywhereElseTheDTypeOfTheTensorsIsEdited) {
  const std::string_view config =
      R"({"list": [1, {"dtype": "float32"}, {"dtype": "float16"}], "a": {"torch_dtype": "float32"}})";
  EXPECT_EQ(
      edited(config),
      R"({"list": [1, {"dtype": "bfloat16"}, {"dtype": "float16"}], "a": {"torch_dtype": "bfloat16"}})");
  EXPECT_EQ(edit_of(config).what,
            "list.1.dtype: float32 to bfloat16, a.torch_dtype: float32 to bfloat16");
}

TEST(ConfigDTypeTest, ManyEditsAreCountedAndPathsArePrintable) {
  std::string config = "{";
  for (const char* key : {"a\x1b", "b", "c", "d", "e", "f", "g", "h", "i", "j"}) {
    config += '"' + std::string(key) + R"(": {"dtype": "float32"}, )";
  }
  const ConfigEdit edit = edit_of(config + R"("k": 1})");
  EXPECT_TRUE(edit.what.starts_with("a\\x1b.dtype: float32 to bfloat16, b.dtype: ")) << edit.what;
  EXPECT_TRUE(edit.what.ends_with("h.dtype: float32 to bfloat16 and 2 more")) << edit.what;
  EXPECT_EQ(edit.text.find("float32"), std::string::npos);
}

TEST(ConfigDTypeTest, WhatIsNotTheModelsDTypeStays) {
  for (const char* config : {
           R"({"quantization_config": {"dtype": "float32", "a_config": {"dtype": "float32"}}})",
           R"({"text_config": {"quantization_config": {"list": [{"dtype": "float32"}]}}})",
           R"({"other": {"dtype": "float16"}, "list": [{"dtype": "float16"}]})",
           R"({"other": {"a_config": {"dtype": "float16"}}})",
           R"({"dtype": "int8"})",
           R"({"dtype": "auto"})",
           R"({"dtype": null})",
           R"({"dtype": "bfloat16"})",
           R"({"compute_dtype": "float32"})",
           R"({"\"dtype\": \"float32": 1})",
           R"({"text": "\"dtype\": \"float32\""})",
           "{}",
       }) {
    EXPECT_EQ(edited(config), "unchanged") << config;
    EXPECT_EQ(edit_of(config).why_not, "") << config;
  }
}

TEST(ConfigDTypeTest, EscapesAreReadAsJsonReadsThem) {
  const ConfigEdit edit =
      edit_of(R"({"torch_d\u0074ype": "float32", "a_con\u0066ig": {"dtype": "fl\u006fat16"}})");
  EXPECT_EQ(edit.text,
            R"({"torch_d\u0074ype": "bfloat16", "a_con\u0066ig": {"dtype": "bfloat16"}})");
  EXPECT_EQ(edit.what, "torch_dtype: float32 to bfloat16, a_config.dtype: float16 to bfloat16");
  EXPECT_EQ(edited(R"({"\q": 1, "dtyp\q": "float32"})"), "unchanged");
}

TEST(ConfigDTypeTest, WhatStaysIsNamed) {
  const auto left = [](std::string_view config) { return edit_of(config).left; };
  EXPECT_EQ(left(R"({"dtype": "auto", "torch_dtype": 1, "a": {"dtype": "float16"}})"),
            R"(dtype: "auto", torch_dtype: 1, a.dtype: "float16")");
  EXPECT_EQ(left(R"({"dtype": "int8", "a": {"dtype": ["float32"]}})"),
            R"(dtype: "int8", a.dtype: ["float32"])");
  EXPECT_EQ(left(R"({"dtype": null, "torch_dtype": "bfloat16", "a": {"dtype": "float32"}})"), "");
  EXPECT_EQ(left(R"({"quantization_config": {"dtype": "int8"}})"), "");
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
  EXPECT_THAT(edit_of(whole + "}").why_not,
              ::testing::HasSubstr("text that is no JSON object: JSON at byte"));
  EXPECT_EQ(edit_of(whole.substr(0, 20)).why_not,
            "text that is no JSON object: JSON: expected a complete JSON text, found a text that "
            "is cut short "
            "after 20 bytes (incomplete download or copy?)");
  EXPECT_EQ(edit_of("[" + whole + "]").why_not, "text that is no JSON object");
  EXPECT_EQ(edit_of("\xEF\xBB\xBF" + whole).why_not, "a byte order mark");
  EXPECT_EQ(edited("\xEF\xBB\xBF" + whole), "unchanged");
  std::string deep = R"({"dtype": "float32", "a": )";
  for (int i = 0; i < 100'000; ++i) deep += "[";
  EXPECT_EQ(edited(deep), "unchanged");
}

}  // namespace
}  // namespace tessera::reshard
