#include "object_store/sigv4.h"

#include <gtest/gtest.h>

namespace tessera::object_store {
namespace {

std::string signature_of(const std::string& authorization) {
  return authorization.substr(authorization.rfind('=') + 1);
}

// `get-vanilla` of AWS's test suite for Signature Version 4.
TEST(SigV4Test, SignsTheVectorOfTheTestSuite) {
  const RequestToSign request{
      "GET", "/", {}, {{"host", "example.amazonaws.com"}, {"x-amz-date", "20150830T123600Z"}}};
  const Credentials keys{"AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"};
  const std::time_t time = 1440938160;  // 2015-08-30 12:36:00
  EXPECT_EQ(amz_date(time), "20150830T123600Z");
  EXPECT_EQ(authorization(request, keys, {"us-east-1", "service", time}, kEmptySha256),
            "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
            "SignedHeaders=host;x-amz-date, "
            "Signature=5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31");
}

// The examples of "Authenticating Requests: Using the Authorization Header" in the S3 API
// reference.
TEST(SigV4Test, SignsTheExamplesOfS3) {
  const Credentials keys{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"};
  const SigningScope scope{"us-east-1", "s3", 1369353600};  // 2013-05-24
  RequestToSign request{"GET",
                        "/test.txt",
                        {},
                        {{"host", "examplebucket.s3.amazonaws.com"},
                         {"range", "bytes=0-9"},
                         {"x-amz-content-sha256", std::string(kEmptySha256)},
                         {"x-amz-date", amz_date(scope.time)}}};
  EXPECT_EQ(signature_of(authorization(request, keys, scope, kEmptySha256)),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");

  request.path = "/";
  request.headers.erase("range");
  request.query = {{"lifecycle", ""}};
  EXPECT_EQ(signature_of(authorization(request, keys, scope, kEmptySha256)),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
  request.query = {{"prefix", "J"}, {"max-keys", "2"}};
  EXPECT_EQ(signature_of(authorization(request, keys, scope, kEmptySha256)),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

TEST(SigV4Test, QueriesAreSortedAndEncoded) {
  EXPECT_EQ(canonical_query({{"prefix", "a b/ä+c"}, {"list-type", "2"}, {"delimiter", "/"}}),
            "delimiter=%2F&list-type=2&prefix=a%20b%2F%C3%A4%2Bc");
  EXPECT_EQ(canonical_query({}), "");
}

}  // namespace
}  // namespace tessera::object_store
