#include "tessera/base/shared_vector.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/list_pool.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(SharedVectorTest, CopiesShareMemoryUntilOneIsChanged) {
  SharedVector<std::string> list{"a", "b"};
  SharedVector<std::string> copy = list;
  EXPECT_EQ(copy.data(), list.data());
  copy.push_back("c");
  EXPECT_THAT(copy, ElementsAre("a", "b", "c"));
  EXPECT_THAT(list, ElementsAre("a", "b"));
  copy = list;
  copy.edit()[0] = "x";
  EXPECT_THAT(copy, ElementsAre("x", "b"));
  EXPECT_THAT(list, ElementsAre("a", "b"));
}

TEST(SharedVectorTest, AListThatNobodySharesIsChangedInItsPlace) {
  SharedVector<int> list{1, 2};
  const int* const before = list.data();
  list.edit()[0] = 3;
  EXPECT_EQ(list.data(), before);
  EXPECT_THAT(list, ElementsAre(3, 2));
}

TEST(SharedVectorTest, EmptyListsAreOrdinary) {
  SharedVector<int> list;
  EXPECT_THAT(list, IsEmpty());
  EXPECT_EQ(list, SharedVector<int>(std::vector<int>{}));
  list.emplace_back(7);
  EXPECT_THAT(list, ElementsAre(7));
  list.clear();
  EXPECT_EQ(list.size(), 0U);
}

TEST(SharedVectorTest, TheLastOwnerFreesTheList) {
  const auto item = std::make_shared<int>(7);
  {
    SharedVector<std::shared_ptr<int>> list{item};
    SharedVector<std::shared_ptr<int>> copy = list;
    list = SharedVector<std::shared_ptr<int>>();
    EXPECT_EQ(item.use_count(), 2) << "the copy has it";
    SharedVector<std::shared_ptr<int>> moved = std::move(copy);
    SharedVector<std::shared_ptr<int>>& same = moved;
    moved = same;
    EXPECT_EQ(item.use_count(), 2);
    list = moved;
    moved.clear();
    EXPECT_EQ(item.use_count(), 2);
  }
  EXPECT_EQ(item.use_count(), 1);
}

TEST(SharedVectorTest, ThreadsMayCopyAndDropOneList) {
  const SharedVector<std::string> list{"a", "b"};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&list] {
      for (int i = 0; i < 10'000; ++i) {
        SharedVector<std::string> copy = list;
        if (i % 100 == 0) copy.push_back("c");
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_THAT(list, ElementsAre("a", "b"));
}

struct SameForAll {
  std::uint64_t operator()(int) const { return 0; }
};
struct Identity {
  std::uint64_t operator()(int number) const { return static_cast<std::uint64_t>(number); }
};

TEST(SharedVectorTest, APoolSharesEqualLists) {
  tessera::detail::ListPool<int, Identity> pool;
  const SharedVector<int> first = pool.share({{1, 2, 3}});
  const SharedVector<int> other = pool.share({{1, 2, 4}});
  const SharedVector<int> again = pool.share({{1, 2, 3}});
  EXPECT_EQ(again.data(), first.data());
  EXPECT_THAT(other, ElementsAre(1, 2, 4));
  const std::vector<int> kept{1, 2, 3};
  EXPECT_EQ(pool.share_copy(kept).data(), first.data());
  EXPECT_THAT(pool.share_copy({{5, 6}}), ElementsAre(5, 6));
}

TEST(SharedVectorTest, APoolTellsListsOfOneHashApart) {
  tessera::detail::ListPool<int, SameForAll> pool;
  const SharedVector<int> first = pool.share({{1, 2}});
  const SharedVector<int> other = pool.share({{3, 4}});
  EXPECT_THAT(first, ElementsAre(1, 2));
  EXPECT_THAT(other, ElementsAre(3, 4));
  EXPECT_THAT(pool.share({{1, 2}}), ElementsAre(1, 2));
}

}  // namespace
}  // namespace tessera
