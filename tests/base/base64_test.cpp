#include "base/base64.h"

#include <gtest/gtest.h>

namespace tessera::detail {
namespace {

TEST(Base64Test, BytesAreReadBack) {
  EXPECT_EQ(base64_encode(""), "");
  EXPECT_EQ(base64_encode("f"), "Zg==");
  EXPECT_EQ(base64_encode("fo"), "Zm8=");
  EXPECT_EQ(base64_encode("foo"), "Zm9v");
  std::string bytes;
  for (int i = 0; i < 256; ++i) {
    bytes += static_cast<char>(i);
    EXPECT_EQ(base64_decode(base64_encode(bytes)), bytes);
  }
}

TEST(Base64Test, OnlyTheOneSpellingOfBytesIsRead) {
  for (const char* text : {"Z", "Zg", "Zg=", "Z===", "Zg==Zg==", "Zh==", "Zm9=", "Z m8",
                           "Zm 8=", "Zg==\n", "Zm-_", "===="}) {
    EXPECT_EQ(base64_decode(text), std::nullopt) << text;
  }
}

}  // namespace
}  // namespace tessera::detail
