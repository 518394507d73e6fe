#include "formats/per_rank_rules.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace tessera::formats {
namespace {

TEST(EntrySelectionTest, PatternsFitAnEntryOfOneRankByItsOwnName) {
  struct Case {
    std::vector<std::string> patterns;
    std::string name;
    bool is_selected;
  };
  const std::vector<Case> cases = {
      {{}, "per_rank.1.rng", true},
      {{"rng"}, "per_rank.1.rng", true},
      {{"rng"}, "per_rank.1.seed", false},
      {{"!rng"}, "per_rank.1.rng", false},
      {{"!rng"}, "per_rank.1.seed", true},
      {{"!p*"}, "per_rank.1.rng", true},
      {{"p*"}, "per_rank.1.rng", false},
      {{"!per_rank"}, "per_rank.1.rng", false},
      {{"!per_rank.2"}, "per_rank.1.rng", true},
      {{"per_rank.1"}, "per_rank.1.rng", true},
      {{"per_rank.1"}, "rng", false},
      {{"rng", "!per_rank"}, "per_rank.1.rng", false},
      {{"rng", "!per_rank"}, "rng", true},
      {{"per_rank.1", "!rng"}, "per_rank.1.rng", false},
      {{"per_rank.2", "rng"}, "per_rank.1.rng", true},
      {{"p*"}, "per_rank.01.rng", true},  // no entry of one rank: that would be `per_rank.1`
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.name + " by " + (each.patterns.empty() ? "nothing" : each.patterns.front()));
    EXPECT_EQ(EntrySelection(NameSelection(each.patterns)).selects(each.name), each.is_selected);
  }
}

}  // namespace
}  // namespace tessera::formats
