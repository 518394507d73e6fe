#include "base/json.h"

#include <gtest/gtest.h>
#include <locale.h>
#include <stdlib.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/lsan_interface.h>
#endif

#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "base/python_json.h"
#include "support/error_matchers.h"
#include "support/files.h"
#include "support/random.h"
#include "support/temporary_directory.h"

namespace tessera {
namespace {

using test::ThrowsError;

TEST(JsonTest, ParsesEveryKindOfValue) {
  EXPECT_EQ(parse_json(R"( {"a":[1,-2.5,1e3,true,false,null,"x\u00e9\ud834\udd1e"],"b":{}} )", "f"),
            Value(Value::Dict{{"a", Value::List{1, -2.5, 1000.0, true, false, Value{}, "xé𝄞"}},
                              {"b", Value::Dict{}}}));
}

/// A locale whose decimal point is a comma, as the German one. The bytes are those that localedef
/// writes for `decimal_point ","`.
class CommaLocale {
 public:
  CommaLocale() {
    static constexpr char kNumeric[] =
        "\x14\x11\x03\x20\x06\0\0\0\x20\0\0\0\x22\0\0\0\x24\0\0\0\x28\0\0\0\x2c\0\0\0\x30\0\0\0"
        ",\0.\0\3\3\0\0,\0\0\0.\0\0\0ANSI_X3.4-1968";
    FileSystem::posix().make_directory(directory_ / "comma");
    test::write_file(directory_ / "comma/LC_NUMERIC", std::string(kNumeric, sizeof kNumeric));
#ifdef __SANITIZE_ADDRESS__
    const __lsan::ScopedDisabler leak_of_glibc;  // newlocale() never frees its list of LOCPATH
#endif
    ::setenv("LOCPATH", directory_.path().c_str(), 1);
    locale_ = ::newlocale(LC_NUMERIC_MASK, "comma", nullptr);
    ::unsetenv("LOCPATH");
    before_ = ::uselocale(locale_);
  }
  ~CommaLocale() {
    ::uselocale(before_);
    ::freelocale(locale_);
  }

 private:
  test::TemporaryDirectory directory_;
  locale_t locale_ = nullptr;
  locale_t before_ = nullptr;
};

TEST(JsonTest, NumbersAreTheSameInEveryLocale) {
  const CommaLocale locale;
  ASSERT_EQ(std::string_view(::localeconv()->decimal_point), ",");
  EXPECT_EQ(parse_json("[0.999, -1.5, 2e-3, 1e-400, 5e-324]", "f"),
            Value(Value::List{0.999, -1.5, 0.002, 0.0, 5e-324}));
  EXPECT_EQ(parse_json("9223372036854775808", "f"), Value(Value::BigInt{"9223372036854775808"}));
}

TEST(JsonTest, NumbersThatOnlyPythonWritesBecomeNone) {
  EXPECT_EQ(parse_python_json(R"({"NaN":[0.5,-Infinity,Infinity],"b":NaN,"c\"":"NaN"})", "f"),
            Value(Value::Dict{
                {"NaN", Value::List{0.5, Value{}, Value{}}}, {"b", Value{}}, {"c\"", "NaN"}}));
  EXPECT_THAT([&] { parse_python_json("[infinity]", "f"); },
              ThrowsError(ErrorKind::corruption, "JSON at byte 1"));
}

TEST(JsonTest, NumbersThatOnlyPythonWritesMoveNoPositionOfAnError) {
  EXPECT_THAT([&] { parse_python_json("[Infinity, -Infinity, NaN, NaN, ?]", "f"); },
              ThrowsError(ErrorKind::corruption, "JSON at byte 32"));
  EXPECT_THAT([&] { parse_python_json("[NaN, ?, NaN]", "f"); },
              ThrowsError(ErrorKind::corruption, "JSON at byte 6"));
  EXPECT_THAT([&] { parse_python_json("[NaN, NaN", "f"); },
              ThrowsError(ErrorKind::corruption, "cut short after 9 bytes"));
}

TEST(JsonTest, IntegersOfAnySizeStayExact) {
  EXPECT_EQ(parse_json("-9223372036854775808", "f"),
            Value(std::numeric_limits<std::int64_t>::min()));
  EXPECT_EQ(parse_json("9223372036854775808", "f"), Value(Value::BigInt{"9223372036854775808"}));
  EXPECT_EQ(parse_json("-9223372036854775809", "f"), Value(Value::BigInt{"-9223372036854775809"}));
  const std::string huge(200, '7');
  EXPECT_EQ(parse_json(huge, "f"), Value(Value::BigInt{huge}));
}

TEST(JsonTest, ATextThatEndsTooEarlyIsCalledCutShort) {
  const std::string whole = R"({"key":[1.5e+7,true,"text\u00e9\n"],"b":null})";
  for (std::size_t nbytes = 1; nbytes < whole.size(); ++nbytes) {
    SCOPED_TRACE(nbytes);
    EXPECT_THAT(
        [&] { parse_json(whole.substr(0, nbytes), "f"); },
        ThrowsError(
            ErrorKind::corruption,
            "f: JSON: expected a complete JSON text, found a text that is cut short after " +
                std::to_string(nbytes) + " bytes"));
  }
}

TEST(JsonTest, BrokenTextIsRefusedWithPathAndPosition) {
  const std::pair<std::string, const char*> cases[] = {
      {"",
       "f: JSON: expected a complete JSON text, found an empty text (incomplete download or "
       "copy?)"},
      {" \n", "found an empty text"},
      {"{\"a\":1,}", "JSON at byte 7: syntax"},
      {"[1] 2", "JSON at byte 4: syntax"},
      {"[1,//c\n2]", "syntax"},
      {"{'a':1}", "JSON at byte 1: syntax"},
      {"[01]", "JSON at byte 2: syntax"},
      {"[NaN]", "JSON at byte 1: syntax"},
      {"1e999", "number overflow"},
      {"\"\xff\"", "JSON at byte 1: syntax: invalid string: ill-formed UTF-8"},
      {"\"\xed\xa0\x80\"", "ill-formed UTF-8"},
      {"\"\xc0\x80\"", "ill-formed UTF-8"},
      {"\"\\ud800\"", "surrogate"},
      {"\"a\nb\"", "control character"},
      {std::string("{}\0{}", 5), "JSON at byte 2: syntax: expected text, found a NUL byte"},
      {"\xEF\xBB\xBF{}", "byte order mark"},
      {R"({"a":1,"b":{"a":2,"c":3,"a":4}})", "JSON at byte 27: duplicate key: expected one 'a'"},
      {R"({"\u0061":1,"a":2})", "duplicate key"},
  };
  for (const auto& broken : cases) {
    SCOPED_TRACE(broken.first);
    EXPECT_THAT([&] { parse_json(broken.first, "f"); },
                ThrowsError(ErrorKind::corruption, broken.second));
  }
}

TEST(JsonTest, EqualKeysInDifferentObjectsAreNoDuplicates) {
  EXPECT_NO_THROW(parse_json(R"({"a":{"a":{"a":1}},"b":[{"a":1},{"a":2}]})", "f"));
}

TEST(JsonTest, DepthIsLimitedWithoutRecursion) {
  const std::string deepest = std::string(64, '[') + std::string(64, ']');
  EXPECT_NO_THROW(parse_json(deepest, "f"));
  EXPECT_THAT([&] { parse_json("[" + deepest + "]", "f"); },
              ThrowsError(ErrorKind::corruption, "depth: expected at most 64"));
  EXPECT_THAT([&] { parse_json(std::string(10'000'000, '['), "f"); },
              ThrowsError(ErrorKind::corruption, "JSON at byte 65: depth"));
}

TEST(JsonTest, SizeIsLimited) {
  EXPECT_THAT([&] { parse_json("[1,2]", "f", {.max_nbytes = 4}); },
              ThrowsError(ErrorKind::corruption, "expected at most 4 bytes, found 5 bytes"));
}

Value random_value(test::Random& random, int depth) {
  const auto items = [&] {
    Value::List list;
    for (auto left = random.between(0, 4); left > 0; --left) {
      list.push_back(random_value(random, depth - 1));
    }
    return list;
  };
  const auto text = [&] { return random.bytes(static_cast<std::size_t>(random.between(0, 6))); };
  switch (random.between(0, depth > 0 ? 13 : 9)) {
    case 0:
      return {};
    case 1:
      return random.flip();
    case 2:
      return random.between(std::numeric_limits<std::int64_t>::min(),
                            std::numeric_limits<std::int64_t>::max());
    case 3:
      return Value::BigInt{"-1" +
                           std::string(static_cast<std::size_t>(random.between(20, 500)), '4')};
    case 4: {
      double number = 0;
      const std::string bits = random.bytes(sizeof number);
      std::copy(bits.begin(), bits.end(), reinterpret_cast<char*>(&number));
      return number;
    }
    case 5:
      return text();
    case 6:
      return Value::Bytes{text()};
    case 7:
      return Value::Symbol{"torch.float32"};
    case 8:
      return static_cast<double>(random.between(-100, 100));
    case 9:
      return items();
    case 10:
      return Value::Tuple{items()};
    case 11:
      return Value::Set{items()};
    default: {
      Value::Dict dict;
      const std::string prefix = random.flip() ? "k" : text();
      for (auto left = random.between(0, 4); left > 0; --left) {
        Value key = random.between(0, 5) == 0 ? Value(left) : Value(prefix + std::to_string(left));
        dict.emplace_back(std::move(key), random_value(random, depth - 1));
      }
      return dict;
    }
  }
}

TEST(JsonTest, EveryValueSurvivesTheWayThroughJson) {
  test::Random random;
  for (int round = 0; round < 2000; ++round) {
    const Value value = random_value(random, 4);
    for (const JsonStyle style : {JsonStyle::compact, JsonStyle::indented}) {
      const std::string text = value_to_json(value, style);
      EXPECT_EQ(value_from_json(parse_json(text, "f"), "f"), value) << text;
    }
  }
}

TEST(JsonTest, WritesWhatItPromises) {
  const Value value(Value::Dict{{"f", 1.0},
                                {"nan", std::nan("")},
                                {"t", Value::Tuple{{1}}},
                                {"b", Value::Bytes{"ab"}},
                                {"s", Value::Symbol{"torch.float32"}},
                                {"d", Value::Dict{{1, "x"}, {"y", Value{}}}},
                                {"e", Value::List{}}});
  EXPECT_EQ(value_to_json(value),
            R"({"f":1.0,"nan":{"$float":"nan"},"t":{"$tuple":[1]},"b":{"$bytes":"YWI="},)"
            R"("s":{"$symbol":"torch.float32"},"d":{"$dict":[[1,"x"],["y",null]]},"e":[]})");
  const Value with_dollar(Value::Dict{{"$x", 1}});
  EXPECT_EQ(value_to_json(with_dollar), R"({"$dict":[["$x",1]]})");
  EXPECT_EQ(document_to_json(with_dollar), R"({"$x":1})");
  EXPECT_EQ(
      value_to_json(Value(Value::Dict{{"a", Value::List{1, Value::List{}}}}), JsonStyle::indented),
      "{\n  \"a\": [\n    1,\n    []\n  ]\n}");
}

TEST(JsonTest, EveryFloatKeepsItsBits) {
  for (const std::uint64_t bits : std::initializer_list<std::uint64_t>{
           0x7FF8000000000000U, 0xFFF8000000000000U, 0x7FF0000000000001U, 0x7FF8000000000123U,
           0xFFFFFFFFFFFFFFFFU, 0x8000000000000000U, 0x0000000000000001U, 0x7FF0000000000000U}) {
    const std::string text = value_to_json(std::bit_cast<double>(bits));
    const Value read = value_from_json(parse_json(text, "f"), "f");
    EXPECT_EQ(std::bit_cast<std::uint64_t>(*read.get_if<double>()), bits) << text;
  }
  EXPECT_EQ(value_to_json(std::bit_cast<double>(0xFFF8000000000123U)),
            R"({"$float":"nan:fff8000000000123"})");
}

TEST(JsonTest, MalformedFormsAreRefusedByName) {
  for (const char* text :
       {R"({"$tuple":1})", R"({"$bytes":"a"})", R"({"$bytes":"YR=="})", R"({"$bytes":5})",
        R"({"$float":"1"})", R"({"$float":"nan:7ff8000000000000"})",
        R"({"$float":"nan:7FF8000000000001"})", R"({"$float":"nan:3ff8000000000001"})",
        R"({"$float":"nan:7ff80000000000011"})", R"({"$dict":[[1]]})", R"({"$dict":{}})",
        R"({"$int":"1x"})", R"({"$int":"-0"})", R"({"$int":"5"})", R"({"$what":1})",
        R"({"$tuple":[],"a":1})", R"({"a":1,"$tuple":[]})"}) {
    SCOPED_TRACE(text);
    EXPECT_THAT([&] { value_from_json(parse_json(text, "f"), "f"); },
                ThrowsError(ErrorKind::corruption, "f: value form $"));
  }
}

TEST(JsonTest, ALongIntegerHasOneSpelling) {
  const auto read = [](const std::string& decimal) {
    return value_from_json(parse_json(R"({"$int":")" + decimal + R"("})", "f"), "f");
  };
  const std::string digits(400, '7');
  EXPECT_EQ(read(digits), Value(Value::BigInt{digits}));
  EXPECT_EQ(read("-" + digits), Value(Value::BigInt{"-" + digits}));
  for (const std::string& other : {"0" + digits, "-0" + digits, digits + "x", "--" + digits}) {
    EXPECT_THAT([&] { read(other); }, ThrowsError(ErrorKind::corruption, "more than 300 digits"));
  }
}

TEST(JsonTest, QuotedStringsParseBack) {
  std::string text;
  for (int c = 0; c < 128; ++c) text += static_cast<char>(c);
  text += "é重𝄞";
  EXPECT_EQ(parse_json(json_quote(text), "f"), Value(text));
  // What a terminal acts on, or shows in another order, is escaped: C1 and bidirectional controls.
  const std::string controls = "\x7f\u0080\u009b\u061c\u200e\u202e\u2066\u2069";
  EXPECT_EQ(json_quote(controls), R"("\u007f\u0080\u009b\u061c\u200e\u202e\u2066\u2069")");
  EXPECT_EQ(parse_json(json_quote(controls), "f"), Value(controls));
  EXPECT_EQ(json_quote("\u00a0é重𝄞"), "\"\u00a0é重𝄞\"");
  EXPECT_EQ(json_quote("a\xff"), "\"a\xEF\xBF\xBD\"");
}

}  // namespace
}  // namespace tessera
