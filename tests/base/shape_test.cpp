#include "tessera/base/shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <compare>
#include <stdexcept>
#include <utility>
#include <vector>

#include "support/random.h"

namespace tessera {
namespace {

using testing::ElementsAre;

constexpr std::int64_t kMaxTestedDims = 3 * Shape::kInlineDims;

std::vector<std::int64_t> some_sizes(test::Random& random) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(random.between(0, kMaxTestedDims)));
  for (std::int64_t& size : sizes) size = random.between(0, 3);
  return sizes;
}

std::vector<std::int64_t> as_vector(const Shape& shape) {
  return {shape.begin(), shape.end()};
}

TEST(ShapeTest, IsBuiltAsAVectorIs) {
  EXPECT_TRUE(Shape().empty());
  EXPECT_THAT(Shape({4, 2}), ElementsAre(4, 2));
  EXPECT_THAT(Shape(2, 5), ElementsAre(5, 5));
  EXPECT_THAT(Shape(4), ElementsAre(0, 0, 0, 0));
  EXPECT_THAT(Shape({1, 2, 3, 4, 5}), ElementsAre(1, 2, 3, 4, 5));
  EXPECT_EQ(Shape({1, 2}).front(), 1);
  EXPECT_EQ(Shape({1, 2, 3, 4}).back(), 4);
}

TEST(ShapeTest, WhateverHappensToItItIsWhatAVectorWouldBe) {
  test::Random random;
  std::vector<std::vector<std::int64_t>> vectors(3);
  std::vector<Shape> shapes(3);
  for (int step = 0; step < 20'000; ++step) {
    const auto a = static_cast<std::size_t>(random.between(0, 3));
    const auto b = static_cast<std::size_t>(random.between(0, 3));
    switch (random.between(0, 7)) {
      case 0:
        vectors[a].push_back(step);
        shapes[a].push_back(step);
        break;
      case 1: {
        const auto num_dims = static_cast<std::size_t>(random.between(0, kMaxTestedDims));
        vectors[a].resize(num_dims, step);
        shapes[a].resize(num_dims, step);
        break;
      }
      case 2:
        vectors[a] = some_sizes(random);
        shapes[a].assign(vectors[a].begin(), vectors[a].end());
        break;
      case 3:
        vectors[a] = vectors[b];
        shapes[a] = shapes[b];
        break;
      case 4: {
        std::vector<std::int64_t> taken = std::move(vectors[b]);
        vectors[b].clear();
        vectors[a] = std::move(taken);
        Shape taken_shape = std::move(shapes[b]);
        shapes[b].clear();
        shapes[a] = std::move(taken_shape);
        break;
      }
      case 5:
        std::swap(vectors[a], vectors[b]);
        std::swap(shapes[a], shapes[b]);
        break;
      default: {
        vectors[a] = some_sizes(random);
        const Shape built(vectors[a]);
        shapes[a] = Shape(built);
      }
    }
    if (vectors[a].size() > kMaxTestedDims) {
      vectors[a].clear();
      shapes[a].clear();
    }
    for (std::size_t i = 0; i < shapes.size(); ++i) ASSERT_EQ(as_vector(shapes[i]), vectors[i]);
    ASSERT_EQ(shapes[a] == shapes[b], vectors[a] == vectors[b]);
    ASSERT_EQ(shapes[a] <=> shapes[b], vectors[a] <=> vectors[b]);
  }
}

TEST(ShapeTest, MoreDimensionsThanCanBeCountedAreRefused) {
  EXPECT_THROW(Shape(std::size_t{1} << 40), std::length_error);
}

}  // namespace
}  // namespace tessera
