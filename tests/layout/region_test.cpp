#include "tessera/layout/region.h"

#include <gmock/gmock.h>

#include <numeric>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using CopyRun = CopyRuns::Run;

std::vector<CopyRun> runs_of(const Shape& shape, const Region& source, const Region& destination) {
  const CopyRuns runs(shape, source, destination);
  std::vector<CopyRun> out;
  runs.for_each_in({0, numel_of(destination)}, [&](const CopyRun& run) { out.push_back(run); });
  EXPECT_EQ(static_cast<std::int64_t>(out.size()), runs.num_runs());
  return out;
}

TEST(RegionTest, WholeTensorToWholeTensorIsOneRun) {
  EXPECT_THAT(runs_of({3, 4, 5}, whole_box(Shape{3, 4, 5}), whole_box(Shape{3, 4, 5})),
              ElementsAre(CopyRun{0, 0, 60}));
}

TEST(RegionTest, RowBlocksMeetInOneRun) {
  EXPECT_THAT(runs_of({10, 4}, Box{{2, 0}, {5, 4}}, Box{{4, 0}, {6, 4}}),
              ElementsAre(CopyRun{8, 0, 12}));
}

TEST(RegionTest, ColumnBlocksMeetInOneRunPerRow) {
  EXPECT_THAT(runs_of({3, 8}, Box{{0, 2}, {3, 4}}, Box{{0, 4}, {3, 4}}),
              ElementsAre(CopyRun{2, 0, 2}, CopyRun{6, 4, 2}, CopyRun{10, 8, 2}));
}

TEST(RegionTest, FlatRangeAgainstColumnBlockFollowsBothOrders) {
  // Elements [3, 14) of a [4, 4] tensor; the box has columns 1 and 2.
  EXPECT_THAT(runs_of({4, 4}, FlatRange{3, 14}, Box{{0, 1}, {4, 2}}),
              ElementsAre(CopyRun{2, 2, 2}, CopyRun{6, 4, 2}, CopyRun{10, 6, 1}));
}

TEST(RegionTest, WindowCutsRunsAtBothEnds) {
  const CopyRuns columns(Shape{3, 8}, whole_box(Shape{3, 8}), Box{{0, 2}, {3, 4}});
  std::vector<CopyRun> out;
  columns.for_each_in({3, 9}, [&](const CopyRun& run) { out.push_back(run); });
  EXPECT_THAT(out, ElementsAre(CopyRun{5, 3, 1}, CopyRun{10, 4, 4}, CopyRun{18, 8, 1}));
}

TEST(RegionTest, ZeroDimensionalTensorHasOneElement) {
  EXPECT_EQ(numel_of(Region(whole_box(Shape{}))), 1);
  EXPECT_THAT(runs_of({}, whole_box(Shape{}), FlatRange{0, 1}), ElementsAre(CopyRun{0, 0, 1}));
  EXPECT_THAT(boxes_of(FlatRange{0, 1}, Shape{}), ElementsAre(whole_box(Shape{})));
}

TEST(RegionTest, EmptyRegionsHaveNoRunsAndNoBoxes) {
  EXPECT_THAT(runs_of({0, 4}, whole_box(Shape{0, 4}), whole_box(Shape{0, 4})), IsEmpty());
  EXPECT_THAT(runs_of({4, 4}, FlatRange{4, 4}, whole_box(Shape{4, 4})), IsEmpty());
  EXPECT_THAT(boxes_of(Box{{2, 0}, {0, 4}}, Shape{4, 4}), IsEmpty());
}

TEST(RegionTest, FlatRangeSplitsIntoAtMostTwoNMinusOneBoxes) {
  const Shape shape{3, 4, 5};
  const auto boxes = boxes_of(FlatRange{7, 53}, shape);
  EXPECT_THAT(boxes, ElementsAre(Box{{0, 1, 2}, {1, 1, 3}}, Box{{0, 2, 0}, {1, 2, 5}},
                                 Box{{1, 0, 0}, {1, 4, 5}}, Box{{2, 0, 0}, {1, 2, 5}},
                                 Box{{2, 2, 0}, {1, 1, 3}}));
}

TEST(RegionTest, RowBlockIsOneRangeAndColumnBlockIsNot) {
  EXPECT_EQ(as_flat_range(Box{{2, 0}, {3, 4}}, Shape{8, 4}), (FlatRange{8, 20}));
  EXPECT_EQ(as_flat_range(Box{{2, 1}, {1, 2}}, Shape{8, 4}), (FlatRange{9, 11}));
  EXPECT_EQ(as_flat_range(Box{{0, 1}, {2, 2}}, Shape{8, 4}), std::nullopt);
}

TEST(RegionTest, RegionOutsideItsTensorIsNamed) {
  EXPECT_EQ(region_error(Box{{0, 0}, {8, 4}}, Shape{8, 4}), std::nullopt);
  EXPECT_THAT(*region_error(Box{{4, 0}, {5, 4}}, Shape{8, 4}), HasSubstr("dimension 0"));
  EXPECT_THAT(*region_error(Box{{-1, 0}, {1, 4}}, Shape{8, 4}), HasSubstr("offset -1"));
  EXPECT_THAT(*region_error(Box{{INT64_MAX, 0}, {INT64_MAX, 4}}, Shape{8, 4}),
              HasSubstr("dimension 0"));
  EXPECT_THAT(*region_error(Box{{0}, {8}}, Shape{8, 4}), HasSubstr("2 dimensions"));
  EXPECT_THAT(*region_error(FlatRange{3, 33}, Shape{8, 4}), HasSubstr("[3, 33)"));
}

TEST(CoverageTest, ReplicasCountOnce) {
  const std::vector<Region> regions{Box{{0, 0}, {4, 4}}, Box{{0, 0}, {4, 4}}, Box{{4, 0}, {4, 4}}};
  EXPECT_THAT(check_coverage(regions, Shape{8, 4}), IsEmpty());
}

TEST(CoverageTest, HoleAndOverlapOfRangesAreNamed) {
  const std::vector<Region> regions{FlatRange{0, 10}, FlatRange{8, 16}, FlatRange{20, 32}};
  const auto problems = check_coverage(regions, Shape{8, 4});
  ASSERT_EQ(problems.size(), 2U);
  EXPECT_EQ(problems[0].kind, CoverageProblem::Kind::overlap);
  EXPECT_THAT(problems[0].detail, HasSubstr("[8, 10)"));
  EXPECT_EQ(problems[1].kind, CoverageProblem::Kind::hole);
  EXPECT_THAT(problems[1].detail, HasSubstr("[16, 20)"));
}

TEST(CoverageTest, GridOfBoxesCoversAndAMissingOneIsAHole) {
  std::vector<Region> regions;
  for (std::int64_t row = 0; row < 6; row += 2) {
    for (std::int64_t column = 0; column < 9; column += 3) {
      regions.push_back(Box{{row, column}, {2, 3}});
    }
  }
  EXPECT_THAT(check_coverage(regions, Shape{6, 9}), IsEmpty());
  regions.pop_back();
  const auto problems = check_coverage(regions, Shape{6, 9});
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_THAT(problems[0].detail, HasSubstr("6 of 54 elements"));
}

TEST(CoverageTest, OverlapOfBoxesThatNoSingleDimensionShowsIsFound) {
  const std::vector<Region> regions{Box{{0, 0, 0}, {2, 2, 1}}, Box{{0, 0, 1}, {2, 2, 1}},
                                    Box{{0, 1, 0}, {2, 1, 2}}};
  const auto problems = check_coverage(regions, Shape{2, 2, 2});
  ASSERT_EQ(problems.size(), 1U);
  EXPECT_EQ(problems[0].kind, CoverageProblem::Kind::overlap);
}

TEST(CoverageTest, TenThousandColumnBlocksAreCheckedBySweep) {
  std::vector<Region> regions;
  for (std::int64_t column = 0; column < 10'000; ++column) {
    regions.push_back(Box{{0, column}, {3, 1}});
  }
  EXPECT_THAT(check_coverage(regions, Shape{3, 10'000}), IsEmpty());
}

}  // namespace
}  // namespace tessera
