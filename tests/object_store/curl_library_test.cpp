#include "object_store/curl_library.h"

#include <gtest/gtest.h>

#if __has_include(<curl/curl.h>)
#include <curl/curl.h>

namespace tessera::object_store {
namespace {

TEST(CurlLibraryTest, NumbersAreThoseOfTheHeader) {
  EXPECT_EQ(curl::kWriteData, CURLOPT_WRITEDATA);
  EXPECT_EQ(curl::kUrl, CURLOPT_URL);
  EXPECT_EQ(curl::kReadData, CURLOPT_READDATA);
  EXPECT_EQ(curl::kReadFunction, CURLOPT_READFUNCTION);
  EXPECT_EQ(curl::kCustomRequest, CURLOPT_CUSTOMREQUEST);
  EXPECT_EQ(curl::kUpload, CURLOPT_UPLOAD);
  EXPECT_EQ(curl::kInFileSizeLarge, CURLOPT_INFILESIZE_LARGE);
  EXPECT_EQ(curl::kSeekFunction, CURLOPT_SEEKFUNCTION);
  EXPECT_EQ(curl::kSeekData, CURLOPT_SEEKDATA);
  EXPECT_EQ(curl::kErrorBuffer, CURLOPT_ERRORBUFFER);
  EXPECT_EQ(curl::kWriteFunction, CURLOPT_WRITEFUNCTION);
  EXPECT_EQ(curl::kUserAgent, CURLOPT_USERAGENT);
  EXPECT_EQ(curl::kLowSpeedLimit, CURLOPT_LOW_SPEED_LIMIT);
  EXPECT_EQ(curl::kLowSpeedTime, CURLOPT_LOW_SPEED_TIME);
  EXPECT_EQ(curl::kHttpHeader, CURLOPT_HTTPHEADER);
  EXPECT_EQ(curl::kHeaderData, CURLOPT_HEADERDATA);
  EXPECT_EQ(curl::kNoProgress, CURLOPT_NOPROGRESS);
  EXPECT_EQ(curl::kFollowLocation, CURLOPT_FOLLOWLOCATION);
  EXPECT_EQ(curl::kCaInfo, CURLOPT_CAINFO);
  EXPECT_EQ(curl::kMaxRedirs, CURLOPT_MAXREDIRS);
  EXPECT_EQ(curl::kConnectTimeout, CURLOPT_CONNECTTIMEOUT);
  EXPECT_EQ(curl::kHeaderFunction, CURLOPT_HEADERFUNCTION);
  EXPECT_EQ(curl::kHttpVersion, CURLOPT_HTTP_VERSION);
  EXPECT_EQ(curl::kBufferSize, CURLOPT_BUFFERSIZE);
  EXPECT_EQ(curl::kNoSignal, CURLOPT_NOSIGNAL);
  EXPECT_EQ(curl::kProtocols, 181);  // CURLOPT_PROTOCOLS is deprecated
  EXPECT_EQ(curl::kRedirProtocols, 182);
  EXPECT_EQ(curl::kTcpKeepAlive, CURLOPT_TCP_KEEPALIVE);
  EXPECT_EQ(curl::kXferInfoFunction, CURLOPT_XFERINFOFUNCTION);
  EXPECT_EQ(curl::kXferInfoData, CURLOPT_XFERINFODATA);
  EXPECT_EQ(curl::kPathAsIs, CURLOPT_PATH_AS_IS);
  EXPECT_EQ(curl::kUploadBufferSize, CURLOPT_UPLOAD_BUFFERSIZE);
  EXPECT_EQ(curl::kShare, CURLOPT_SHARE);
  EXPECT_EQ(curl::kShareWhat, CURLSHOPT_SHARE);
  EXPECT_EQ(curl::kDnsCache, CURL_LOCK_DATA_DNS);
  EXPECT_EQ(curl::kTlsSessions, CURL_LOCK_DATA_SSL_SESSION);
  EXPECT_EQ(curl::kConnections, CURL_LOCK_DATA_CONNECT);
  EXPECT_EQ(curl::kGlobalDefault, CURL_GLOBAL_DEFAULT);
  EXPECT_EQ(curl::kHttp11, CURL_HTTP_VERSION_1_1);
  EXPECT_EQ(curl::kHttpAndHttps, CURLPROTO_HTTP | CURLPROTO_HTTPS);
  EXPECT_EQ(curl::kErrorNbytes, CURL_ERROR_SIZE);
  EXPECT_EQ(curl::kUnsupportedProtocol, CURLE_UNSUPPORTED_PROTOCOL);
  EXPECT_EQ(curl::kUrlMalformat, CURLE_URL_MALFORMAT);
  EXPECT_EQ(curl::kCouldntResolveProxy, CURLE_COULDNT_RESOLVE_PROXY);
  EXPECT_EQ(curl::kCouldntResolveHost, CURLE_COULDNT_RESOLVE_HOST);
  EXPECT_EQ(curl::kCouldntConnect, CURLE_COULDNT_CONNECT);
  EXPECT_EQ(curl::kPartialFile, CURLE_PARTIAL_FILE);
  EXPECT_EQ(curl::kWriteError, CURLE_WRITE_ERROR);
  EXPECT_EQ(curl::kAbortedByCallback, CURLE_ABORTED_BY_CALLBACK);
  EXPECT_EQ(curl::kTooManyRedirects, CURLE_TOO_MANY_REDIRECTS);
  EXPECT_EQ(curl::kPeerFailedVerification, CURLE_PEER_FAILED_VERIFICATION);
  EXPECT_EQ(curl::kSslCaCertBadFile, CURLE_SSL_CACERT_BADFILE);
}

}  // namespace
}  // namespace tessera::object_store
#endif
