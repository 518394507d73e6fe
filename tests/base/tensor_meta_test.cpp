#include "tessera/base/tensor_meta.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "base/checked_math.h"
#include "support/error_matchers.h"

namespace tessera {
namespace {

using test::ThrowsError;

TEST(ShapeTest, NumelAndStridesOfDegenerateShapes) {
  EXPECT_EQ(numel_of(Shape{}), 1);
  EXPECT_EQ(numel_of(Shape{3, 0, 5}), 0);
  EXPECT_EQ(row_major_strides(Shape{2, 3, 4}), (Shape{12, 4, 1}));
  EXPECT_EQ(row_major_strides(Shape{2, 0, 4}), (Shape{4, 4, 1}));
  EXPECT_EQ(row_major_strides(Shape{}), Shape{});
  EXPECT_EQ(shape_to_string(Shape{4096, 512}), "[4096, 512]");
  EXPECT_EQ(shape_to_string(Shape{}), "[]");
}

TEST(ShapeTest, AZeroAmongHugeSizesIsNoOverflow) {
  const std::int64_t huge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(checked_numel(Shape{huge, huge, 0}), 0);
  EXPECT_EQ(checked_numel(Shape{huge, 2}), std::nullopt);
  EXPECT_EQ(checked_numel(Shape{-1, 0}), std::nullopt);
  EXPECT_EQ(row_major_strides(Shape{0, huge, huge}).size(), 3U);
}

TEST(TensorMetaTest, HostileShapesAreRefusedByName) {
  const auto validate = [](DType dtype, Shape shape) {
    validate_tensor_meta({.fqn = "w", .dtype = dtype, .shape = std::move(shape)}, "f");
  };
  const std::int64_t max = std::numeric_limits<std::int64_t>::max();
  EXPECT_NO_THROW(validate(DType::float32, {}));
  EXPECT_NO_THROW(validate(DType::float32, {0, 7}));
  EXPECT_NO_THROW(validate(DType::uint8, {max}));
  EXPECT_NO_THROW(validate(DType::uint8, Shape(32, 1)));
  EXPECT_THAT([&] { validate(DType::uint16, {max}); },
              ThrowsError(ErrorKind::corruption, "f: w: shape: expected at most"));
  EXPECT_THAT(
      [&] {
        validate(DType::uint8, {1LL << 40, 1LL << 40});
      },
      ThrowsError(ErrorKind::corruption, "found [1099511627776, 1099511627776]"));
  EXPECT_THAT([&] { validate(DType::uint8, {-1}); },
              ThrowsError(ErrorKind::corruption, "found [-1]"));
  EXPECT_THAT(
      [&] {
        validate(DType::uint8, {-1, 0});
      },
      ThrowsError(ErrorKind::corruption, "found [-1, 0]"));
  EXPECT_THAT([&] { validate(DType::uint8, Shape(33, 1)); },
              ThrowsError(ErrorKind::corruption, "found 33 dimensions"));
}

}  // namespace
}  // namespace tessera
