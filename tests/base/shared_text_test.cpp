#include "tessera/base/shared_text.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

TEST(SharedTextTest, ReadsLikeAString) {
  SharedText text = "layers.0.weight";
  EXPECT_EQ(text, "layers.0.weight");
  EXPECT_EQ(text.str() + "!", "layers.0.weight!");
  const std::string& view = text;
  EXPECT_EQ(view, "layers.0.weight");
  EXPECT_FALSE(text.empty());
  text = std::string("other");
  EXPECT_EQ(text, "other");
  text.clear();
  EXPECT_TRUE(text.empty());
  EXPECT_EQ(text, "");
}

TEST(SharedTextTest, CopiesShareMemory) {
  const SharedText text = "layers.0.weight";
  SharedText copy = text;
  EXPECT_EQ(copy.str().data(), text.str().data());
  copy = "other";
  EXPECT_EQ(text, "layers.0.weight");
}

TEST(SharedTextTest, AnEmptyTextTakesOnePointer) {
  EXPECT_EQ(sizeof(SharedText), sizeof(void*));
  EXPECT_EQ(SharedText(""), SharedText());
  EXPECT_TRUE(SharedText(std::string()).empty());
}

}  // namespace
}  // namespace tessera
