#include "tessera/base/error.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>

namespace tessera {
namespace {

TEST(ErrorTest, TheLineNamesFileTensorRuleAndBothNumbers) {
  const Error error = Error::expected(
      ErrorKind::corruption, {.path = "model.safetensors", .fqn = "layers.0.weight"},
      "data_offsets", "8192 bytes", "4096 bytes", "incomplete download?");
  EXPECT_STREQ(error.what(),
               "model.safetensors: layers.0.weight: data_offsets: expected 8192 bytes, "
               "found 4096 bytes (incomplete download?)");
  EXPECT_EQ(error.kind(), ErrorKind::corruption);
  EXPECT_EQ(error.where().fqn, "layers.0.weight");
}

TEST(ErrorTest, EmptyMembersAreLeftOutAndByteRangesShown) {
  EXPECT_STREQ(Error(ErrorKind::io, {}, "gone").what(), "gone");
  EXPECT_STREQ(Error(ErrorKind::io, {.path = "a", .byte_range = ByteRange{4, 12}}, "read").what(),
               "a: bytes [4, 12): read");
}

TEST(ErrorTest, AMessageIsOneLineWhateverTheNamesHold) {
  const Error error(ErrorKind::io, {.path = "a\nb", .fqn = "\x1b[31mred"}, "line\rtwo");
  EXPECT_STREQ(error.what(), "a\\x0ab: \\x1b[31mred: line\\x0dtwo");
}

TEST(ErrorTest, TakesTheTensorsNameAfterwards) {
  const Error error = Error::expected(
      ErrorKind::corruption, {.path = "a.pt", .byte_range = ByteRange{4, 8}}, "CRC", "1", "2");
  EXPECT_STREQ(error.at_tensor("w").what(), "a.pt: w: bytes [4, 8): CRC: expected 1, found 2");
  EXPECT_EQ(error.at_tensor("w").where().fqn, "w");
  EXPECT_EQ(error.at_tensor("w").kind(), ErrorKind::corruption);
}

TEST(ErrorTest, AListKeepsItsLinesIfItTakesATensorsName) {
  const std::string lines = std::string(3000, 'a') + "\n" + std::string(3000, 'b');
  const Error error = Error::listing(ErrorKind::mismatch, {.path = "c"}, "2 problems:", lines);
  const std::string list(error.reason());
  EXPECT_EQ(error.at_tensor("w").what(), "c: w: " + list);
  EXPECT_EQ(std::ranges::count(list, '\n'), 2);
}

TEST(ErrorTest, PrintableKeepsUnicodeAndEscapesWhatIsNone) {
  EXPECT_EQ(printable("größe 重み"), "größe 重み");
  EXPECT_EQ(printable("\xff\xc3"), "\\xff\\xc3");
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");  // a surrogate
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");           // a C1 control
  EXPECT_EQ(printable("a\u202e"
                      "b\u2066"),
            "a\\xe2\\x80\\xae"
            "b\\xe2\\x81\\xa6");  // change the writing direction
  EXPECT_EQ(printable("\u200e\u061c\u2028"), "\\xe2\\x80\\x8e\\xd8\\x9c\\xe2\\x80\\xa8");
  EXPECT_EQ(printable("\u200d\u2010\u202f"), "\u200d\u2010\u202f");  // change nothing
}

TEST(ErrorTest, PrintableCutsTheMiddleBetweenCharacters) {
  EXPECT_EQ(printable("abcdefghij", 10), "abcdefghij");
  EXPECT_EQ(printable("abcdefghijk", 10), "abcd…ijk");
  for (const std::string unit : {"x", "é", "重", "𝄞", "\n", "\xff"}) {
    std::string text;
    for (int i = 0; i < 100; ++i) text += unit;
    for (std::size_t limit = 3; limit < 40; ++limit) {
      const std::string shown = printable(text, limit);
      EXPECT_LE(shown.size(), limit);
      EXPECT_EQ(printable(shown, 1000), shown) << "a cut character would be escaped again";
      EXPECT_NE(shown.find("…"), std::string::npos);
    }
  }
}

TEST(ErrorTest, ABrokenInvariantIsNoError) {
  EXPECT_THROW(TESSERA_CHECK(1 + 1 == 3), InternalError);
  EXPECT_NO_THROW(TESSERA_CHECK(1 + 1 == 2));
}

TEST(ErrorTest, ARemedyIsDataAndItsTextIsSafeToPrint) {
  const Error error = Error::expected(ErrorKind::mismatch, {.path = "a"}, "value", "x", "y",
                                      Remedy{Remedy::Action::leave_out, "b\x1b]0;c\x07\nd"});
  EXPECT_EQ(error.remedy().argument, "b\x1b]0;c\x07\nd");
  EXPECT_EQ(error.reason(), "value: expected x, found y");
  EXPECT_STREQ(
      error.what(),
      "a: value: expected x, found y (to leave it out, add '!b\\x1b]0;c\\x07\\x0ad' to the names)");
  EXPECT_EQ(error.line_with("--only '!" + error.remedy().argument + "'"),
            "a: value: expected x, found y (--only '!b\\x1b]0;c\\x07\\x0ad')");
  EXPECT_EQ(error.line_with(""), "a: value: expected x, found y");
  EXPECT_EQ(error.at_tensor("t").remedy(), error.remedy());
}

}  // namespace
}  // namespace tessera
