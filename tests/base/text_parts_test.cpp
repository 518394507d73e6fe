#include "base/text_parts.h"

#include <gmock/gmock.h>

namespace tessera::detail {
namespace {

using testing::ElementsAre;

TEST(SplitTest, PartsMayBeEmpty) {
  EXPECT_THAT(split("model.up", '.'), ElementsAre("model", "up"));
  EXPECT_THAT(split("a..b.", '.'), ElementsAre("a", "", "b", ""));
  EXPECT_THAT(split(".", '.'), ElementsAre("", ""));
  EXPECT_THAT(split("q|k.v", '|'), ElementsAre("q", "k.v"));
  EXPECT_THAT(split("", '.'), ElementsAre(""));
}

}  // namespace
}  // namespace tessera::detail
