#include "object_store/bucket_listing.h"

#include "object_store/xml_scan.h"
#include "support/error_matchers.h"

namespace tessera::object_store {
namespace {

using test::ThrowsError;

constexpr const char* kPage = R"(<?xml version="1.0" encoding="UTF-8"?>
<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">
  <Name>bucket</Name><Prefix>runs/</Prefix><IsTruncated>true</IsTruncated>
  <NextContinuationToken>1ueGcxLPRx1Tr/XYExHnhbYLgveDs2J/wm36Hy4vbOwM=</NextContinuationToken>
  <!-- the folder itself -->
  <Contents><Key>runs/</Key><Size>0</Size><ETag>"d41d"</ETag></Contents>
  <Contents><Key>runs/a&amp;b &#x263A;</Key><Size>12345678901</Size><ETag>&quot;0f-2&quot;</ETag>
    <Owner><ID>x</ID><Key>not a key</Key></Owner></Contents>
  <CommonPrefixes><Prefix>runs/step-10/</Prefix></CommonPrefixes>
  <CommonPrefixes><Prefix>runs//</Prefix></CommonPrefixes>
</ListBucketResult>)";

TEST(BucketListingTest, NamesFilesAndFoldersOfAPrefix) {
  const BucketPage page = parse_bucket_page(kPage, "runs/", "s3://bucket/runs");
  EXPECT_THAT(page.entries, ::testing::ElementsAre(Entry{"a&b ☺", false, 12345678901, "\"0f-2\""},
                                                   Entry{"step-10", true}));
  EXPECT_EQ(page.continuation_token, "1ueGcxLPRx1Tr/XYExHnhbYLgveDs2J/wm36Hy4vbOwM=");
}

TEST(BucketListingTest, DecodesKeysIfTheServerSaysSo) {
  const std::string contents = "<Contents><Key>a%2Bb+c%2520</Key><Size>1</Size></Contents>";
  const auto page_with = [&](const std::string& more) {
    return parse_bucket_page("<ListBucketResult>" + more + contents + "</ListBucketResult>", "",
                             "u");
  };
  EXPECT_EQ(page_with("").entries.at(0).name, "a%2Bb+c%2520");
  EXPECT_EQ(page_with("<EncodingType>url</EncodingType>").entries.at(0).name, "a+b c%20");
}

TEST(BucketListingTest, RefusesWhatIsNoList) {
  const auto parse = [](const std::string& xml) {
    return [xml] { parse_bucket_page(xml, "p/", "s3://b/p"); };
  };
  const auto list = [](const std::string& inner) {
    return "<ListBucketResult>" + inner + "</ListBucketResult>";
  };
  for (const std::string& xml :
       {std::string(), std::string("<html></html>"), std::string("<ListBucketResult>"),
        list("<Contents><Key>q/a</Key><Size>1</Size></Contents>"),
        list("<Contents><Key>p/a</Key><Size>-1</Size></Contents>"),
        list("<Contents><Key>p/a</Key></Contents>"), list("<IsTruncated>true</IsTruncated>"),
        list("<EncodingType>url</EncodingType><Contents><Key>%</Key><Size>1</Size></Contents>")}) {
    EXPECT_THAT(parse(xml), ThrowsError(ErrorKind::corruption, "s3://b/p: ")) << xml;
  }
}

TEST(BucketListingTest, NoNameLeadsOutOfTheFolder) {
  const auto page_with = [](const std::string& inner) {
    return parse_bucket_page("<ListBucketResult>" + inner + "</ListBucketResult>", "p/",
                             "s3://b/p");
  };
  for (const std::string key : {"p/../x.json", "p/a/../../x.json", "p//etc/x.json"}) {
    EXPECT_THAT([&] { page_with("<Contents><Key>" + key + "</Key><Size>1</Size></Contents>"); },
                ThrowsError(ErrorKind::corruption, "expected names without /"))
        << key;
  }
  EXPECT_THAT([&] { page_with("<CommonPrefixes><Prefix>p/a/../b/</Prefix></CommonPrefixes>"); },
              ThrowsError(ErrorKind::corruption, "expected names without /"));
  // Keys that S3 allows, but that no file can have as its name.
  EXPECT_THAT(page_with("<Contents><Key>p/..</Key><Size>1</Size></Contents>"
                        "<CommonPrefixes><Prefix>p/../</Prefix></CommonPrefixes>"
                        "<CommonPrefixes><Prefix>p/./</Prefix></CommonPrefixes>")
                  .entries,
              ::testing::IsEmpty());
}

TEST(BucketListingTest, ReadsErrors) {
  const S3ErrorBody body = parse_s3_error(
      "<Error><Code>AuthorizationHeaderMalformed</Code><Message>wrong</Message>"
      "<Region>eu-central-1</Region></Error>");
  EXPECT_EQ(body.code, "AuthorizationHeaderMalformed");
  EXPECT_EQ(body.message, "wrong");
  EXPECT_EQ(body.region, "eu-central-1");
  EXPECT_EQ(parse_s3_error("<html>").code, "");
  EXPECT_EQ(parse_s3_error("busy").code, "");
}

TEST(XmlScanTest, RefusesEntitiesDeclarationsAndDepth) {
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "<a>";
  for (const std::string& xml :
       {std::string("<!DOCTYPE a [<!ENTITY b \"c\">]><a>&b;</a>"), std::string("<a>&b;</a>"),
        std::string("<a>&#0;</a>"), std::string("<a>&#x110000;</a>"), std::string("<a>&</a>"),
        std::string("<a></b>"), std::string("<a/><b/>"), std::string("<a"), std::string("<>x</>"),
        std::string("x<a/>"), deep}) {
    EXPECT_THAT([&] { scan_xml(xml, "u", [](const auto&, const auto&) {}); },
                ThrowsError(ErrorKind::corruption, "XML of the server"))
        << xml.substr(0, 60);
  }
}

}  // namespace
}  // namespace tessera::object_store
