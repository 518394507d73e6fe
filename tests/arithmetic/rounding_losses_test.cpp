#include "arithmetic/rounding_losses.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "support/random.h"

namespace tessera::arithmetic {
namespace {

using testing::ElementsAre;
using Part = RoundingLosses::Part;

const Region kRegion = Box{{0, 0}, {10, 10}};

TEST(RoundingLossesTest, EachElementIsNewOnce) {
  RoundingLosses losses;
  EXPECT_THAT(losses.take("w", kRegion, {10, 20}), ElementsAre(Part{{10, 20}, true}));
  EXPECT_THAT(losses.take("w", kRegion, {10, 20}), ElementsAre(Part{{10, 20}, false}));
  EXPECT_THAT(losses.take("w", kRegion, {0, 15}),
              ElementsAre(Part{{0, 10}, true}, Part{{10, 15}, false}));
  EXPECT_THAT(losses.take("w", kRegion, {30, 40}), ElementsAre(Part{{30, 40}, true}));
  EXPECT_THAT(losses.take("w", kRegion, {5, 50}),
              ElementsAre(Part{{5, 20}, false}, Part{{20, 30}, true}, Part{{30, 40}, false},
                          Part{{40, 50}, true}));
  EXPECT_THAT(losses.take("w", kRegion, {0, 50}), ElementsAre(Part{{0, 50}, false}));
}

TEST(RoundingLossesTest, TensorsRegionsAndSharesAreApart) {
  RoundingLosses losses;
  losses.take("w", kRegion, {0, 10});
  EXPECT_THAT(losses.take("v", kRegion, {0, 10}), ElementsAre(Part{{0, 10}, true}));
  EXPECT_THAT(losses.take("w", FlatRange{100, 200}, {0, 10}), ElementsAre(Part{{0, 10}, true}));
  EXPECT_THAT(losses.take("w", kRegion, {0, 10}, 1), ElementsAre(Part{{0, 10}, true}));
}

TEST(RoundingLossesTest, PartsOfAnyRangesAreWhatASimpleListSays) {
  std::mt19937 random(test::test_seed());
  RoundingLosses losses;
  std::vector<bool> had(200);
  for (int i = 0; i < 100; ++i) {
    const auto begin = static_cast<std::int64_t>(random() % 190);
    const FlatRange range{begin, begin + 1 + static_cast<std::int64_t>(random() % 10)};
    std::int64_t at = range.begin;
    for (const auto& [part, is_new] : losses.take("w", kRegion, range)) {
      ASSERT_EQ(part.begin, at);
      for (; at < part.end; ++at) {
        ASSERT_EQ(is_new, !had[static_cast<std::size_t>(at)]) << at;
        had[static_cast<std::size_t>(at)] = true;
      }
    }
    ASSERT_EQ(at, range.end);
  }
}

}  // namespace
}  // namespace tessera::arithmetic
