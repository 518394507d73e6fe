#pragma once

#include <ctime>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::object_store {

/// The keys that sign requests. Never printed.
struct Credentials {
  std::string access_key_id;
  std::string secret_access_key;
  std::string session_token{};  // empty for keys that do not expire

  friend bool operator==(const Credentials&, const Credentials&) = default;
};

/// The parts of a request that AWS's Signature Version 4 signs, without its body.
struct RequestToSign {
  std::string method;                                      // `GET`
  std::string path;                                        // percent-encoded, begins with a slash
  std::vector<std::pair<std::string, std::string>> query;  // not encoded
  std::map<std::string, std::string> headers;              // names in lower case; with `host`
};

/// Where and when a signature is valid.
struct SigningScope {
  std::string region;   // `us-east-1`
  std::string service;  // `s3`
  std::time_t time;
};

/// Returns a time as `20130524T000000Z`.
std::string amz_date(std::time_t time);

/// Returns the query in the form for a URL, sorted by names: `list-type=2&prefix=a%2Fb`.
std::string canonical_query(std::vector<std::pair<std::string, std::string>> query);

/// Returns the value of the header `Authorization`, which signs all headers of the request.
std::string authorization(const RequestToSign& request, const Credentials& credentials,
                          const SigningScope& scope, std::string_view payload_sha256);

/// The SHA-256 of an empty body.
inline constexpr std::string_view kEmptySha256 =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

}  // namespace tessera::object_store
