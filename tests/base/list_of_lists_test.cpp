#include "base/list_of_lists.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>

namespace tessera::detail {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

TEST(ListOfListsTest, ReadsLikeAVectorOfLists) {
  ListOfLists<int> lists;
  EXPECT_EQ(lists.size(), 0U);
  const std::vector<int> first{1, 2, 3};
  lists.add(first);
  lists.add(std::size_t{0});
  std::ranges::fill(lists.add(2), 7);
  EXPECT_EQ(lists.size(), 3U);
  EXPECT_THAT(lists[0], ElementsAre(1, 2, 3));
  EXPECT_THAT(lists[1], IsEmpty());
  EXPECT_THAT(lists[2], ElementsAre(7, 7));
  EXPECT_EQ(lists.first(2), 3U);
  EXPECT_THAT(lists.items(), ElementsAre(1, 2, 3, 7, 7));
}

TEST(ListOfListsTest, ItemsChangeAndListsCompare) {
  ListOfLists<int> lists;
  lists.reserve(2, 4);
  lists.add(2);
  lists.add(2);
  const ListOfLists<int> before = lists;
  lists[1][0] = 5;
  EXPECT_THAT(lists.items(), ElementsAre(0, 0, 5, 0));
  EXPECT_FALSE(lists == before);
  lists[1][0] = 0;
  lists.shrink_to_fit();
  EXPECT_TRUE(lists == before);
}

}  // namespace
}  // namespace tessera::detail
