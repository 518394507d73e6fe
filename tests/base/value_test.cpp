#include "tessera/base/value.h"

#include <gmock/gmock.h>

#include <cmath>

#include "support/error_matchers.h"

namespace tessera {
namespace {

TEST(ValueTest, EqualityIsStructuralAndKeepsPythonTypesApart) {
  EXPECT_EQ(Value(std::nan("")), Value(std::nan("1")));
  EXPECT_NE(Value(1), Value(1.0));
  EXPECT_NE(Value(1), Value(true));
  EXPECT_NE(Value("a"), Value(Value::Bytes{"a"}));
  EXPECT_NE(Value(Value::List{1}), Value(Value::Tuple{{1}}));
  EXPECT_NE(Value(Value::Tuple{}), Value(Value::Set{}));
  EXPECT_EQ(Value(Value::Dict{{"a", Value::List{1, 2.0}}}),
            Value(Value::Dict{{"a", Value::List{1, 2.0}}}));
}

TEST(ValueTest, FindLooksUpStringKeysOfDicts) {
  const Value dict(Value::Dict{{1, "one"}, {"a", 2}});
  ASSERT_NE(dict.find("a"), nullptr);
  EXPECT_EQ(*dict.find("a"), Value(2));
  EXPECT_EQ(dict.find("1"), nullptr);
  EXPECT_EQ(Value(3).find("a"), nullptr);
}

TEST(ValueTest, AtAndGetSayWhatIsThereInstead) {
  const Value dict(Value::Dict{{"step", 7}, {"lr", 0.5}});
  EXPECT_EQ(dict.at("step").get<std::int64_t>(), 7);
  EXPECT_THAT([&] { dict.at("lrs"); },
              test::ThrowsError(ErrorKind::not_found,
                                "expected 'lrs', found only the keys ['step', 'lr']"));
  EXPECT_THAT([&] { dict.at("lr").at("x"); },
              test::ThrowsError(ErrorKind::not_found, "expected 'x', found float"));
  EXPECT_THAT([&] { dict.at("lr").get<std::int64_t>(); },
              test::ThrowsError(ErrorKind::mismatch, "expected int, found float 0.5"));
}

TEST(ValueTest, PrintsAsPythonDoes) {
  const Value value(Value::Dict{{"lr", 1e-5},
                                {1, Value::Tuple{{true}}},
                                {"s", Value::Set{}},
                                {"b", Value::Bytes{std::string("\x00\xff'", 3)}},
                                {"n", Value{}},
                                {"big", Value::BigInt{"-99999999999999999999"}},
                                {"d", Value::Symbol{"torch.float32"}},
                                {"q", "it's \"重\"\n"}});
  EXPECT_EQ(value_to_string(value, 1000),
            "{'lr': 1e-05, 1: (True,), 's': set(), 'b': b\"\\x00\\xff'\", 'n': None, "
            "'big': -99999999999999999999, 'd': torch.float32, 'q': 'it\\'s \"重\"\\n'}");
}

TEST(ValueTest, SurrogatesPrintAsInPython) {
  EXPECT_EQ(value_to_string("日\xed\xb3\xa9t"), "'日\\udce9t'");
  // Characters that change how a terminal shows the text around them, as Python's repr() does.
  EXPECT_EQ(value_to_string("\u0085\u061c\u202e\u2028é"), R"('\x85\u061c\u202e\u2028é')");
  EXPECT_EQ(value_to_string(Value::Symbol{"device:\u202e\x1b"}), R"(device:\u202e\x1b)");
  EXPECT_EQ(value_to_string("\xed\xa0\xbd\xed\xb8\x80"), "'\\ud83d\\ude00'");
  EXPECT_EQ(value_to_string("日\xed\xa0"),
            "'\\xe6\\x97\\xa5\\xed\\xa0'");  // cut short: not a Python str
}

TEST(ValueTest, FloatsPrintAsInPython) {
  const std::pair<double, const char*> cases[] = {
      {0.0, "0.0"},
      {-0.0, "-0.0"},
      {1.0, "1.0"},
      {0.1, "0.1"},
      {0.0001, "0.0001"},
      {0.00001, "1e-05"},
      {1e15, "1000000000000000.0"},
      {1e16, "1e+16"},
      {5e-324, "5e-324"},
      {1.7976931348623157e308, "1.7976931348623157e+308"},
      {-HUGE_VAL, "-inf"},
      {std::nan(""), "nan"}};
  for (const auto& [number, text] : cases) EXPECT_EQ(value_to_string(number), text);
}

TEST(ValueTest, LongValuesAreCutEarly) {
  const Value list(Value::List(1'000'000, Value("element")));
  const std::string text = value_to_string(list, 50);
  EXPECT_LT(text.size(), 80U);
  EXPECT_TRUE(text.ends_with("…"));
  EXPECT_TRUE(value_to_string(std::string(1000, 'x'), 50).ends_with("…"));
}

}  // namespace
}  // namespace tessera
