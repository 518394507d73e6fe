#include "base/size_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/text_parts.h"

namespace tessera {
namespace {

TEST(SizeTextTest, ParsesWhatPeopleWrite) {
  EXPECT_EQ(parse_size("0"), 0U);
  EXPECT_EQ(parse_size("1.5"), std::nullopt);
  EXPECT_EQ(parse_size("0.5B"), std::nullopt);
  EXPECT_EQ(parse_size("4096"), 4096U);
  EXPECT_EQ(parse_size("512B"), 512U);
  EXPECT_EQ(parse_size("256MiB"), 256U << 20);
  EXPECT_EQ(parse_size("256 MiB"), 256U << 20);
  EXPECT_EQ(parse_size("256m"), 256U << 20);
  EXPECT_EQ(parse_size("1.5G"), 3ULL << 29);
  EXPECT_EQ(parse_size("5GB"), 5'000'000'000U);
  EXPECT_EQ(parse_size("1kB"), 1000U);
  EXPECT_EQ(parse_size("9007199254740993"), 9007199254740993U);
}

TEST(SizeTextTest, RefusesWhatIsNoSize) {
  for (const char* text : {"", "x", "-1", "+1", "1X", "1MiBs", "1.2.3", "0x10", "1e3", " 1", "1 ",
                           "inf", "nan", "99999999999999999999", "16EiB", "8.5EiB"}) {
    SCOPED_TRACE(text);
    EXPECT_EQ(parse_size(text), std::nullopt);
  }
}

TEST(SizeTextTest, SpellsASizeAsShortAsItCanBeRead) {
  EXPECT_EQ(spell_size(0), "0");
  EXPECT_EQ(spell_size(1023), "1023");
  EXPECT_EQ(spell_size(256 << 20), "256MiB");
  EXPECT_EQ(spell_size(10'000'000'000), "10GB");
  EXPECT_EQ(spell_size(1'250'000'000), "1.25GB");
  EXPECT_EQ(spell_size(1'250'000'001), "1250000001");
}

TEST(SizeTextTest, PrintsExactBytesWithTheirRoundedForm) {
  EXPECT_EQ(exact_size(0), "0 bytes");
  EXPECT_EQ(exact_size(1), "1 byte");
  EXPECT_EQ(exact_size(1023), "1023 bytes");
  EXPECT_EQ(exact_size(1024), "1024 bytes (1.0 KiB)");
  EXPECT_EQ(exact_size(4194304), "4194304 bytes (4.0 MiB)");
  EXPECT_EQ(iec_size((1ULL << 20) - 1), "1.0 MiB");
  EXPECT_EQ(iec_size(~0ULL), "16.0 EiB");
}

TEST(SizeTextTest, CountsInWords) {
  EXPECT_EQ(counted(1, "tensor"), "1 tensor");
  EXPECT_EQ(counted(0, "tensor"), "0 tensors");
  EXPECT_EQ(counted(2, "alias", "aliases"), "2 aliases");
}

TEST(TextPartsTest, PartsMayBeEmpty) {
  using tessera::detail::split;
  using testing::ElementsAre;
  EXPECT_THAT(split("model.up", '.'), ElementsAre("model", "up"));
  EXPECT_THAT(split("a..b.", '.'), ElementsAre("a", "", "b", ""));
  EXPECT_THAT(split(".", '.'), ElementsAre("", ""));
  EXPECT_THAT(split("q|k.v", '|'), ElementsAre("q", "k.v"));
  EXPECT_THAT(split("", '.'), ElementsAre(""));
}

}  // namespace
}  // namespace tessera
