#include "tessera/base/name_rules.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(RenameTest, ReplacesTheFirstPrefixThatFits) {
  const std::vector<Rename> renames = {{"model.", "net."}, {"model", "m"}};
  EXPECT_EQ(renamed("model.weight", renames), "net.weight");
  EXPECT_EQ(renamed("models", renames), "ms");
  EXPECT_EQ(renamed("optim", renames), "optim");
}

TEST(RenameTest, AnEmptyPrefixIsThatOfEveryName) {
  const auto rename = parse_rename("=model.");
  ASSERT_TRUE(rename);
  EXPECT_EQ(renamed("weight", {*rename}), "model.weight");
}

TEST(RenameTest, SaysWhatTheTextDoes) {
  EXPECT_EQ(parse_rename("a.=")->to, "");
  EXPECT_EQ(parse_rename("a=b=c")->to, "b=c");
  EXPECT_FALSE(parse_rename("a"));
  EXPECT_FALSE(parse_rename("="));
  EXPECT_FALSE(parse_rename(""));
}

}  // namespace
}  // namespace tessera
