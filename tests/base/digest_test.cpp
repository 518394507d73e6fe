#include "base/digest.h"

#include <gtest/gtest.h>

#include <string_view>

#include "support/random.h"

namespace tessera {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

TEST(DigestTest, KnownAnswers) {
  EXPECT_EQ(xxh3_64(bytes_of("")), 0x2D06800538D394C2U);
  EXPECT_EQ(Xxh3Wide().hex_digest(), "99aa06d3014798d86001c324468d497f");
  EXPECT_EQ(crc32(0, bytes_of("123456789")), 0xCBF43926U);
  Sha256 sha;
  EXPECT_EQ(sha.hex_digest(), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  sha.update(bytes_of("abc"));
  EXPECT_EQ(sha.hex_digest(), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(DigestTest, PartsGiveWhatTheWholeGives) {
  test::Random random;
  for (int round = 0; round < 50; ++round) {
    const std::string whole = random.bytes(static_cast<std::size_t>(random.between(0, 5000)));
    const auto cut =
        static_cast<std::size_t>(random.between(0, static_cast<std::int64_t>(whole.size()) + 1));
    const auto a = bytes_of(whole).first(cut);
    const auto b = bytes_of(whole).subspan(cut);

    Xxh3 xxh;
    xxh.update(a);
    xxh.update(b);
    EXPECT_EQ(xxh.digest(), xxh3_64(bytes_of(whole)));
    Xxh3Wide wide_in_blocks;
    wide_in_blocks.update(a);
    wide_in_blocks.update(b);
    Xxh3Wide wide_at_once;
    wide_at_once.update(bytes_of(whole));
    EXPECT_EQ(wide_in_blocks.hex_digest(), wide_at_once.hex_digest());
    EXPECT_EQ(crc32(crc32(0, a), b), crc32(0, bytes_of(whole)));
    EXPECT_EQ(crc32_combine(crc32(0, a), crc32(0, b), b.size()), crc32(0, bytes_of(whole)));
    Sha256 in_blocks;
    in_blocks.update(a);
    in_blocks.update(b);
    Sha256 at_once;
    at_once.update(bytes_of(whole));
    EXPECT_EQ(in_blocks.hex_digest(), at_once.hex_digest());
  }
}

}  // namespace
}  // namespace tessera
