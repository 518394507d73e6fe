#include "object_store/upload_parts.h"

#include <gtest/gtest.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/digest.h"
#include "object_store/md5.h"

namespace tessera::object_store {
namespace {

UploadedPart part_of(int number, const std::string& text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {.number = number,
          .nbytes = text.size(),
          .etag = '"' + Md5::of(bytes).hex() + '"',
          .has_md5_etag = true,
          .crc32 = crc32(0, bytes)};
}

std::vector<UploadedPart> two_parts() {
  return {part_of(1, "123456789"), part_of(2, "abc")};
}

// The expected values were computed with Python's zlib and hashlib.
TEST(UploadPartsTest, ChecksumsAreThoseOfS3) {
  EXPECT_EQ(crc32_text(0xcbf43926), "y/Q5Jg==");
  EXPECT_EQ(crc32_of_parts(two_parts()), "25ItdA==-2");
  EXPECT_EQ(etag_of_parts(two_parts()), "04196f658df48cc0330f9af75b99ee31-2");
}

TEST(UploadPartsTest, AServerMayStateTheChecksumInThreeForms) {
  EXPECT_TRUE(is_crc32_of_parts("25ItdA==-2", two_parts()));
  EXPECT_TRUE(is_crc32_of_parts("25ItdA==", two_parts()));
  EXPECT_TRUE(is_crc32_of_parts("vbDA5A==", two_parts()));
  EXPECT_FALSE(is_crc32_of_parts("25ItdA==-2", {part_of(1, "abc"), part_of(2, "123456789")}));
  EXPECT_FALSE(is_crc32_of_parts("", two_parts()));
}

TEST(UploadPartsTest, NoETagIsExpectedIfOneIsNoMd5) {
  std::vector<UploadedPart> parts = two_parts();
  parts[1].has_md5_etag = false;
  EXPECT_EQ(etag_of_parts(parts), std::nullopt);
}

TEST(UploadPartsTest, CompletionsListCrcsOnlyIfTheUploadHasThem) {
  std::vector<UploadedPart> parts{part_of(1, "123456789")};
  parts[0].etag = "\"a&b<\"";
  const std::string begin =
      "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
      "<Part><PartNumber>1</PartNumber><ETag>&quot;a&amp;b&lt;&quot;</ETag>";
  const std::string end = "</Part></CompleteMultipartUpload>";
  EXPECT_EQ(completion_in_xml(parts, BodyCheck::md5), begin + end);
  EXPECT_EQ(completion_in_xml(parts, BodyCheck::crc32),
            begin + "<ChecksumCRC32>y/Q5Jg==</ChecksumCRC32>" + end);
}

TEST(UploadPartsTest, OnlyLowerCaseHexIsAnMd5) {
  EXPECT_TRUE(looks_like_md5(std::string(32, 'f')));
  for (const std::string& text :
       {std::string(31, 'f'), std::string(32, 'F'), std::string(32, 'g')}) {
    EXPECT_FALSE(looks_like_md5(text)) << text;
  }
  EXPECT_TRUE(looks_like_md5_of_parts(std::string(32, '0') + "-12", 12));
  EXPECT_FALSE(looks_like_md5_of_parts(std::string(32, '0') + "-12", 2));
}

}  // namespace
}  // namespace tessera::object_store
