#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::object_store {

/// One request. Only `PUT` and `POST` have a body.
struct HttpRequest {
  std::string url;
  std::vector<std::string> headers{};  // `Name: value`; may hold credentials
  bool follows_redirects = false;      // to other servers too, without the Authorization header
  std::string method = "GET";
  std::span<const std::byte> body{};   // seen, not copied: must outlive the request
  std::chrono::seconds max_stall{30};  // without a byte in either direction
};

/// Takes the bytes of a body as they arrive; returns false to end the transfer.
using TakeBytes = std::function<bool(std::span<const std::byte>)>;

/// What one attempt at a request brought.
struct HttpResponse {
  int status = 0;                              // 0: the transfer ended before a status arrived
  std::map<std::string, std::string> headers;  // of the last response; names in lower case
  std::string error_body{};                    // of a status that is no success, cut at 64 KiB
  int curl_code = 0;                           // 0: the whole response arrived
  std::string curl_message{};                  // in words, if curl_code is not 0

  bool is_success() const { return status >= 200 && status < 300; }
  /// Returns the value of a header; an empty text if the response has no such header.
  std::string header(const std::string& name) const;
  /// Whether another attempt may succeed: the server is overloaded, or the connection was cut.
  bool may_succeed_later() const;
  /// Returns what failed, for a message: `status 503`, `connection refused`.
  std::string failure_in_words() const;
};

/// Makes one attempt at a request. `begin_body` is called before the first byte of a successful
/// response's body and returns who takes the bytes. Thread-safe; connections are kept and used
/// again. Never throws for what a server does. Throws: Error(unsupported) without libcurl.
HttpResponse perform(const HttpRequest& request,
                     const std::function<TakeBytes(const HttpResponse&)>& begin_body);

/// How long and how often failed requests are repeated.
struct RetryPolicy {
  int max_attempts = 10;                      // AWS_MAX_ATTEMPTS
  int max_attempts_without_server = 3;        // if no server answers at all
  std::chrono::milliseconds first_wait{100};  // doubles with each attempt
  std::chrono::milliseconds max_wait{10'000};
  std::chrono::seconds deadline{120};  // from the last byte that arrived

  /// Returns the policy of the process, with AWS_MAX_ATTEMPTS if it is set.
  static RetryPolicy of_process();
};

/// Decides about repeating one request. Not thread-safe.
class Retries {
 public:
  explicit Retries(RetryPolicy policy) : policy_(policy) {}

  /// Waits before another attempt, and returns true; returns false if the request has failed for
  /// good. A server may ask for the wait (Retry-After).
  bool wait_after(const HttpResponse& response);
  /// Starts the counts anew, because bytes have arrived.
  void note_progress();
  int num_attempts() const { return num_attempts_; }

 private:
  RetryPolicy policy_;
  int num_attempts_ = 0;
  int num_without_progress_ = 0;
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

/// Ends all transfers, and lets none begin: the process ends.
void abort_transfers();

/// Returns how many requests the process has sent, and how many bytes of bodies have arrived.
struct TransferCounts {
  std::uint64_t num_requests = 0;
  std::uint64_t nbytes = 0;
};
TransferCounts transfer_counts();

}  // namespace tessera::object_store
