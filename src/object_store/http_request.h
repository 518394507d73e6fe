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

/// One request. Only `PUT` and `POST` send the `body`.
struct HttpRequest {
  std::string url;
  std::vector<std::string> headers{};  // `Name: value`; may hold credentials
  bool follows_redirects = false;      // other servers do not get the Authorization header
  std::string method = "GET";
  std::span<const std::byte> body{};   // not copied: must outlive the request
  std::chrono::seconds max_stall{30};  // longest time without a byte sent or received
};

/// Receives the bytes of a body as they arrive. Returns false to end the transfer.
using TakeBytes = std::function<bool(std::span<const std::byte>)>;

/// The result of one attempt at a request.
struct HttpResponse {
  int status = 0;                              // 0: the transfer ended before a status arrived
  std::map<std::string, std::string> headers;  // of the last response; names in lower case
  std::string error_body{};                    // if the status is an error; at most 64 KiB
  int curl_code = 0;                           // 0: the whole response arrived
  std::string curl_message{};                  // in words, if curl_code is not 0

  bool is_success() const { return status >= 200 && status < 300; }
  /// Returns the value of a header; empty if there is none. `name`: in lower case.
  std::string header(const std::string& name) const;
  /// Whether another attempt may succeed, for example because the server was overloaded.
  bool may_succeed_later() const;
  /// Returns the failure in words, for a message: `status 503`, `connection refused`.
  std::string failure_in_words() const;
};

/// Makes one attempt at a request. Calls `begin_body` before the first byte of a successful
/// response's body; it returns the function that receives the bytes. If either throws, the
/// exception is lost, and the transfer fails. Keeps connections for later calls. Thread-safe. Does
/// not throw if the server or the connection fails. Throws: Error(unsupported) without libcurl;
/// Error(interrupted) if this thread's work is stopped (CurrentStop) and the transfer stalls.
HttpResponse perform(const HttpRequest& request,
                     const std::function<TakeBytes(const HttpResponse&)>& begin_body);

/// Ends all transfers, and prevents new ones. Called when the process ends.
void abort_transfers();
/// Returns whether abort_transfers was called.
bool are_transfers_aborted();

/// How many requests the process has sent, and how many bytes of bodies it has received.
struct TransferCounts {
  std::uint64_t num_requests = 0;
  std::uint64_t nbytes = 0;
};
TransferCounts transfer_counts();

}  // namespace tessera::object_store
