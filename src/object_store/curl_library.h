#pragma once

#include <cstddef>

namespace tessera::object_store {

/// The part of libcurl's binary interface that Tessera uses. libcurl has kept it compatible since
/// 2006. Because it is declared here, no header of curl is needed, and libcurl is loaded when the
/// first URL is opened (docs/decisions/0016-curl-loaded-on-the-first-url.md).
/// `curl_library_test.cpp` compares the numbers with curl's header.
namespace curl {

using Handle = void;      // CURL
using Share = void;       // CURLSH
struct List;              // curl_slist
using Code = int;         // CURLcode
using Option = int;       // CURLoption
using ShareCode = int;    // CURLSHcode
using ShareOption = int;  // CURLSHoption

inline constexpr Option kWriteData = 10001;
inline constexpr Option kUrl = 10002;
inline constexpr Option kReadData = 10009;
inline constexpr Option kErrorBuffer = 10010;
inline constexpr Option kWriteFunction = 20011;
inline constexpr Option kReadFunction = 20012;
inline constexpr Option kUserAgent = 10018;
inline constexpr Option kLowSpeedLimit = 19;
inline constexpr Option kLowSpeedTime = 20;
inline constexpr Option kXferInfoData = 10057;
inline constexpr Option kHttpHeader = 10023;
inline constexpr Option kHeaderData = 10029;
inline constexpr Option kCustomRequest = 10036;
inline constexpr Option kNoProgress = 43;
inline constexpr Option kUpload = 46;
inline constexpr Option kFollowLocation = 52;
inline constexpr Option kCaInfo = 10065;
inline constexpr Option kMaxRedirs = 68;
inline constexpr Option kConnectTimeout = 78;
inline constexpr Option kShare = 10100;
inline constexpr Option kHeaderFunction = 20079;
inline constexpr Option kHttpVersion = 84;
inline constexpr Option kBufferSize = 98;
inline constexpr Option kNoSignal = 99;
inline constexpr Option kInFileSizeLarge = 30115;
inline constexpr Option kSeekFunction = 20167;
inline constexpr Option kSeekData = 10168;
inline constexpr Option kProtocols = 181;
inline constexpr Option kRedirProtocols = 182;
inline constexpr Option kTcpKeepAlive = 213;
inline constexpr Option kXferInfoFunction = 20219;
inline constexpr Option kPathAsIs = 234;
inline constexpr Option kUploadBufferSize = 280;

inline constexpr ShareOption kShareWhat = 1;
inline constexpr int kDnsCache = 3;
inline constexpr int kTlsSessions = 4;
inline constexpr int kConnections = 5;

inline constexpr long kGlobalDefault = 3;
inline constexpr long kHttp11 = 2;
inline constexpr long kHttpAndHttps = 3;
inline constexpr std::size_t kErrorNbytes = 256;

inline constexpr Code kOk = 0;
inline constexpr Code kUnsupportedProtocol = 1;
inline constexpr Code kUrlMalformat = 3;
inline constexpr Code kCouldntResolveProxy = 5;
inline constexpr Code kCouldntResolveHost = 6;
inline constexpr Code kCouldntConnect = 7;
inline constexpr Code kPartialFile = 18;
inline constexpr Code kWriteError = 23;
inline constexpr Code kAbortedByCallback = 42;
inline constexpr Code kTooManyRedirects = 47;
inline constexpr Code kPeerFailedVerification = 60;
inline constexpr Code kSslCaCertBadFile = 77;

}  // namespace curl

/// The functions of libcurl, loaded once. Lives as long as the process. Thread-safe.
struct CurlLibrary {
  curl::Code (*global_init)(long);
  curl::Handle* (*easy_init)();
  curl::Code (*easy_setopt)(curl::Handle*, curl::Option, ...);
  curl::Code (*easy_perform)(curl::Handle*);
  void (*easy_cleanup)(curl::Handle*);
  const char* (*easy_strerror)(curl::Code);
  curl::Share* (*share_init)();
  curl::ShareCode (*share_setopt)(curl::Share*, curl::ShareOption, ...);
  curl::ShareCode (*share_cleanup)(curl::Share*);
  curl::List* (*slist_append)(curl::List*, const char*);
  void (*slist_free_all)(curl::List*);

  /// Returns the library; loads `libcurl.so.4` at the first call. Throws: Error(unsupported) if it
  /// is not installed, lacks a function, or cannot start.
  static const CurlLibrary& of_process();
};

}  // namespace tessera::object_store
