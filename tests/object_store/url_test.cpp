#include "object_store/url.h"

#include "support/error_matchers.h"

namespace tessera::object_store {
namespace {

using test::ThrowsError;

TEST(UrlTest, PathsWithASchemeAreUrls) {
  for (const char* url : {"s3://b/p", "hf://o/n", "https://h/p", "http://h"})
    EXPECT_TRUE(is_url(url));
  for (const char* path : {"s3", "./s3://b", "/s3://b", "./s3:/b", "run:1/x", "run 1:/x", "C:/x",
                           "1a:/x", "a/b:/x", "s3:b/c", "s3:", ":/", ""}) {
    EXPECT_FALSE(is_url(path)) << path;
  }
}

TEST(UrlTest, RefusesPathsThatBeginLikeAUrl) {
  for (const char* path : {"s3:/b/p", "https:/h", "hf:/o/n", "S3://b", "gs://b/p", "s3a://b",
                           "file:///tmp", "ftp://h/p"}) {
    EXPECT_THAT([&] { is_url(path); },
                ThrowsError(ErrorKind::invalid_argument, "expected a local path, or a URL"))
        << path;
  }
  EXPECT_THAT([] { is_url("s3:/b/p"); },
              ThrowsError(ErrorKind::invalid_argument, "pass it as a str, because pathlib"));
  EXPECT_THAT([] { is_url("gs://b"); },
              ThrowsError(ErrorKind::invalid_argument, "is written as ./gs:/…"));
  EXPECT_THAT([] { is_url("HTTPS://h/p?sig=secret"); },
              ThrowsError(ErrorKind::invalid_argument, "HTTPS:/…: path"));
}

TEST(UrlTest, HasItsParts) {
  const Url s3 = parse_url("s3://bucket/runs/a?b c/model");
  EXPECT_EQ(s3.scheme, "s3");
  EXPECT_EQ(s3.host, "bucket");
  EXPECT_EQ(s3.path, "runs/a?b c/model");
  EXPECT_EQ(s3.query, "");
  EXPECT_EQ(parse_url("s3://bucket").path, "");
  const Url web = parse_url("https://host:9000/a/b.bin?sig=1/2");
  EXPECT_EQ(web.host, "host:9000");
  EXPECT_EQ(web.path, "a/b.bin");
  EXPECT_EQ(web.query, "sig=1/2");
}

TEST(UrlTest, RefusesAPasswordWithoutShowingIt) {
  try {
    parse_url("https://user:secret@host/a");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    EXPECT_EQ(std::string(error.what()).find("secret"), std::string::npos) << error.what();
  }
  EXPECT_THAT([] { parse_url("s3:///key"); },
              ThrowsError(ErrorKind::invalid_argument, "expected a bucket: s3://BUCKET/PREFIX"));
}

TEST(UrlTest, EncodingIsUndone) {
  EXPECT_EQ(percent_encode("a b/ä~", "/"), "a%20b/%C3%A4~");
  EXPECT_EQ(percent_encode("a/b"), "a%2Fb");
  EXPECT_EQ(form_decode("a+b%2Fc%20d"), "a b/c d");
  EXPECT_EQ(form_decode("%C3%A4"), "ä");
  for (const char* broken : {"%", "%4", "%zz", "a%2"}) EXPECT_FALSE(form_decode(broken)) << broken;
}

}  // namespace
}  // namespace tessera::object_store
