#include "base/value_bits.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera::detail {
namespace {

TEST(ValueBitsTest, FloatsAreEqualIfTheirBitsAre) {
  EXPECT_TRUE(have_equal_bits(0.5, 0.5));
  EXPECT_TRUE(have_equal_bits(std::nan("1"), std::nan("1")));
  EXPECT_FALSE(have_equal_bits(0.0, -0.0));
  EXPECT_FALSE(have_equal_bits(std::nan(""), -std::nan("")));
}

TEST(ValueBitsTest, FloatsInsideOtherValuesAreComparedTheSameWay) {
  const auto in_all = [](double number) {
    return Value(Value::Dict{
        {"list", Value::List{1, Value::Tuple{{"a", Value::Set{{Value::Dict{{2, number}}}}}}}}});
  };
  EXPECT_TRUE(have_equal_bits(in_all(1.5), in_all(1.5)));
  EXPECT_FALSE(have_equal_bits(in_all(0.0), in_all(-0.0)));
}

TEST(ValueBitsTest, OtherTypesAreComparedAsEver) {
  EXPECT_FALSE(have_equal_bits(1, 1.0));
  EXPECT_FALSE(have_equal_bits(Value::List{1}, Value::Tuple{{1}}));
  EXPECT_FALSE(have_equal_bits(Value::List{1}, Value::List{1, 2}));
  EXPECT_TRUE(have_equal_bits(Value::Bytes{"a"}, Value::Bytes{"a"}));
  EXPECT_FALSE(have_equal_bits("a", "b"));
}

}  // namespace
}  // namespace tessera::detail
