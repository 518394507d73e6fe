#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "object_store/credentials.h"
#include "object_store/server.h"

namespace tessera::object_store {

/// Amazon S3, and other servers with the interface of S3: MinIO, R2, Google Cloud Storage, Ceph.
class S3Server final : public Server {
 public:
  explicit S3Server(S3Settings settings) : settings_(std::move(settings)) {}

  /// A request other than a plain read. Signed if there are credentials (without HTTPS, body too).
  struct Call {
    /// Whether the request is about an object or its bucket. The URL names the object in both
    /// cases.
    enum class About { object, bucket };

    std::string method;
    Query query{};
    std::map<std::string, std::string> headers{};  // names in lower case
    std::span<const std::byte> body{};             // must outlive the call
    std::chrono::seconds max_stall{30};            // longest time without a byte sent or received
    About about = About::object;
  };
  /// The answer to the last attempt at a call.
  struct Answer {
    HttpResponse response;
    std::string body{};    // body of a successful answer
    int num_attempts = 1;  // an earlier attempt may have succeeded although its answer was lost

    bool is_success() const { return response.curl_code == 0 && response.is_success(); }
    /// Returns the code in the body of an error, such as `NoSuchKey`. Empty if it has no code.
    std::string error_code() const;
  };

  /// Whether no endpoint is set: Amazon S3 itself, which supports every request and header of S3.
  bool is_amazon() const { return settings_.endpoint.empty(); }
  /// Whether the server checks bodies by the header `x-amz-checksum-crc32`.
  enum class Crc32Support { unknown, yes, no };
  Crc32Support crc32_support() const { return crc32_support_; }
  /// Records what an answer shows. After `no`, later answers change nothing.
  void note_crc32_support(Crc32Support shown);

  std::optional<std::vector<Entry>> list(const std::string& url) override;
  /// Sends a request, and repeats it after temporary failures. Returns the last answer. Its status
  /// is 500 if a 200 had an error in its body, and 503 after a conflict or a wrong checksum.
  Answer send(const std::string& url, const Call& call);
  /// Returns the error for an answer of `send`. `permission`: the permission that the request
  /// needs, for the message.
  Error error_of(const std::string& url, const Answer& answer, std::string_view permission) const;

 private:
  struct Address {
    std::string origin;  // `https://bucket.s3.eu-central-1.amazonaws.com`
    std::string path;    // encoded, begins with a slash
  };

  HttpRequest request_for(const std::string& url, const Query& query,
                          std::vector<std::string> headers) override;
  HttpRequest signed_request(const std::string& url, const Call& call) const;
  bool learns_from(const std::string& url, const HttpResponse& response) override;
  Error error_for(const std::string& url, const HttpResponse& response) override;

  Address address_of(const std::string& bucket, const std::string& key,
                     const std::string& region) const;
  std::string region_of(const std::string& bucket) const;
  /// Reads the user's keys again. Returns whether they have changed now or shortly before.
  bool renew_credentials();
  S3Settings settings() const;

  S3Settings settings_;  // only the credentials and their source change
  std::optional<std::chrono::steady_clock::time_point> renewed_;  // when they changed
  std::atomic<Crc32Support> crc32_support_ = Crc32Support::unknown;
  std::map<std::string, std::string> regions_;  // key: bucket; regions that servers have named
};

/// Whether an error's code says that the session token has expired or is no longer valid.
bool is_outdated_token(std::string_view code);

/// Returns the error for an answer of S3, with advice for the user. `permission`: the permission
/// that the request needs.
Error s3_error(const std::string& url, const HttpResponse& response, const S3Settings& settings,
               const std::string& region, std::string_view permission);

}  // namespace tessera::object_store
