#include "object_store/http_request.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <stop_token>
#include <utility>

#include "base/blocked_sigpipe.h"
#include "base/current_stop.h"
#include "base/lock_while_forking.h"
#include "object_store/curl_library.h"
#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

// Limits of time and of attempts: HttpRequest in http_request.h, RetryPolicy in retries.h.
constexpr std::size_t kMaxErrorBodyNbytes = std::size_t{64} << 10;
constexpr std::size_t kMaxHeaderNbytes = std::size_t{64} << 10;
constexpr long kConnectTimeoutSeconds = 10;
/// After a stop, a transfer that moves bytes may end, for example so that a checkpoint appears
/// completely. One that stalls for longer is ended.
constexpr std::chrono::seconds kMaxStallAfterStop{5};

std::atomic<bool> is_aborted = false;
std::atomic<std::uint64_t> num_requests = 0;
std::atomic<std::uint64_t> num_body_bytes = 0;

/// The idle connections of the process. Each is in its own CURLSH, which one transfer at a time
/// uses. Every transfer gets a new curl handle: libcurl 7.88 reads freed memory if a handle is used
/// again and the first header of the answer begins with a blank (curl/curl#11101, #11620). After
/// fork(), the child does not use the connections of its parent.
class ConnectionPool {
 public:
  static ConnectionPool& of_process() {
    static auto& pool = *new ConnectionPool;  // never destroyed: threads may use it until the end
    return pool;
  }

  curl::Share* take() {
    {
      const std::scoped_lock lock(mutex_);
      if (std::exchange(process_, ::getpid()) != ::getpid()) idle_.clear();
      if (!idle_.empty()) {
        curl::Share* share = idle_.back();
        idle_.pop_back();
        return share;
      }
    }
    const CurlLibrary& curl = CurlLibrary::of_process();
    curl::Share* share = curl.share_init();
    if (share == nullptr) throw Error(ErrorKind::io, {}, "libcurl cannot make a share");
    for (const int what : {curl::kConnections, curl::kDnsCache, curl::kTlsSessions}) {
      curl.share_setopt(share, curl::kShareWhat, what);
    }
    return share;
  }

  void give_back(curl::Share* share) {
    const std::scoped_lock lock(mutex_);
    idle_.push_back(share);
  }

 private:
  static std::mutex& mutex_of_process() { return of_process().mutex_; }

  ConnectionPool() { tessera::detail::lock_while_forking<mutex_of_process>(); }

  std::mutex mutex_;
  std::vector<curl::Share*> idle_;
  pid_t process_ = ::getpid();
};

struct Transfer {
  HttpResponse response;
  const std::function<TakeBytes(const HttpResponse&)>& begin_body;
  TakeBytes take{};
  std::size_t header_nbytes = 0;
  std::span<const std::byte> body{};  // of the request
  std::size_t nbytes_sent = 0;        // of the body
  std::stop_token stop{};
  std::int64_t nbytes_moved = 0;  // sent and received
  std::chrono::steady_clock::time_point last_move = std::chrono::steady_clock::now();
};

std::string_view trimmed(std::string_view text) {
  const auto is_space = [](char c) { return c == ' ' || c == '\t' || c == '\r' || c == '\n'; };
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

/// Receives one line of a response's header. All these callbacks are called from C, so they must
/// not throw.
std::size_t take_header(const char* data, std::size_t, std::size_t nbytes, void* user) noexcept {
  try {
    auto& transfer = *static_cast<Transfer*>(user);
    const std::string_view line(data, nbytes);
    if (line.starts_with("HTTP/")) {  // a new response, perhaps after a redirect
      transfer.response.headers.clear();
      transfer.header_nbytes = 0;
      const std::size_t space = line.find(' ');
      if (space != std::string_view::npos) {
        transfer.response.status = std::atoi(std::string(line.substr(space + 1, 3)).c_str());
      }
      return nbytes;
    }
    transfer.header_nbytes += nbytes;
    const std::size_t colon = line.find(':');
    if (transfer.header_nbytes > kMaxHeaderNbytes || colon == std::string_view::npos) return nbytes;
    std::string name(trimmed(line.substr(0, colon)));
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
    transfer.response.headers[name] = trimmed(line.substr(colon + 1));
    return nbytes;
  } catch (...) {
    return 0;
  }
}

std::size_t take_body(const char* data, std::size_t, std::size_t nbytes, void* user) noexcept {
  try {
    auto& transfer = *static_cast<Transfer*>(user);
    num_body_bytes += nbytes;
    if (!transfer.response.is_success()) {
      std::string& body = transfer.response.error_body;
      body.append(data, std::min(nbytes, kMaxErrorBodyNbytes - body.size()));
      return nbytes;
    }
    if (!transfer.take) transfer.take = transfer.begin_body(transfer.response);
    return transfer.take(std::as_bytes(std::span(data, nbytes))) ? nbytes : 0;
  } catch (...) {
    return 0;
  }
}

/// Copies the next bytes of a request's body into curl's buffer.
std::size_t give_body(char* out, std::size_t size, std::size_t num, void* user) noexcept {
  auto& transfer = *static_cast<Transfer*>(user);
  const std::size_t nbytes = std::min(size * num, transfer.body.size() - transfer.nbytes_sent);
  if (nbytes > 0) std::memcpy(out, transfer.body.data() + transfer.nbytes_sent, nbytes);
  transfer.nbytes_sent += nbytes;
  return nbytes;
}

/// Moves to another position in the body, so that curl can send the body again on another
/// connection. Returns 0 for success, as curl expects.
int seek_body(void* user, std::int64_t offset, int origin) noexcept {
  auto& transfer = *static_cast<Transfer*>(user);
  if (origin != SEEK_SET || offset < 0 ||
      static_cast<std::uint64_t>(offset) > transfer.body.size()) {
    return 1;
  }
  transfer.nbytes_sent = static_cast<std::size_t>(offset);
  return 0;
}

/// Returns 1 if the transfer must end (abort_transfers, or a stop while it stalls), else 0. curl
/// calls this at least once per second.
int watch(void* user, std::int64_t, std::int64_t received, std::int64_t,
          std::int64_t sent) noexcept {
  auto& transfer = *static_cast<Transfer*>(user);
  const auto now = std::chrono::steady_clock::now();
  if (std::exchange(transfer.nbytes_moved, received + sent) != received + sent) {
    transfer.last_move = now;
  }
  const bool stalls = now - transfer.last_move > kMaxStallAfterStop;
  return is_aborted || (stalls && transfer.stop.stop_requested()) ? 1 : 0;
}

const char* certificates() {
  for (const char* name : {"AWS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"}) {
    const char* path = std::getenv(name);
    if (path != nullptr && *path != '\0') return path;
  }
  return nullptr;
}

void set_method(const CurlLibrary& curl, curl::Handle* handle, const HttpRequest& request,
                Transfer& transfer) {
  if (request.method == "GET") return;
  curl.easy_setopt(handle, curl::kCustomRequest, request.method.c_str());
  if (request.method != "PUT" && request.method != "POST") return;
  transfer.body = request.body;
  curl.easy_setopt(handle, curl::kUpload, 1L);
  curl.easy_setopt(handle, curl::kUploadBufferSize, 512L << 10);
  curl.easy_setopt(handle, curl::kInFileSizeLarge, static_cast<std::int64_t>(request.body.size()));
  curl.easy_setopt(handle, curl::kReadFunction, &give_body);
  curl.easy_setopt(handle, curl::kReadData, &transfer);
  curl.easy_setopt(handle, curl::kSeekFunction, &seek_body);
  curl.easy_setopt(handle, curl::kSeekData, &transfer);
}

void set_options(const CurlLibrary& curl, curl::Handle* handle, const HttpRequest& request,
                 Transfer& transfer, char* error_text) {
  curl.easy_setopt(handle, curl::kUrl, request.url.c_str());
  curl.easy_setopt(handle, curl::kErrorBuffer, error_text);
  curl.easy_setopt(handle, curl::kUserAgent, "tessera");
  curl.easy_setopt(handle, curl::kNoSignal, 1L);
  curl.easy_setopt(handle, curl::kPathAsIs, 1L);
  curl.easy_setopt(handle, curl::kHttpVersion, curl::kHttp11);  // a connection for each transfer
  curl.easy_setopt(handle, curl::kTcpKeepAlive, 1L);
  curl.easy_setopt(handle, curl::kBufferSize, 512L << 10);
  curl.easy_setopt(handle, curl::kConnectTimeout, kConnectTimeoutSeconds);
  curl.easy_setopt(handle, curl::kLowSpeedLimit, 1L);
  curl.easy_setopt(handle, curl::kLowSpeedTime, static_cast<long>(request.max_stall.count()));
  curl.easy_setopt(handle, curl::kProtocols, curl::kHttpAndHttps);
  curl.easy_setopt(handle, curl::kRedirProtocols, curl::kHttpAndHttps);
  curl.easy_setopt(handle, curl::kFollowLocation, request.follows_redirects ? 1L : 0L);
  curl.easy_setopt(handle, curl::kMaxRedirs, 10L);
  if (const char* path = certificates()) curl.easy_setopt(handle, curl::kCaInfo, path);
  curl.easy_setopt(handle, curl::kHeaderFunction, &take_header);
  curl.easy_setopt(handle, curl::kHeaderData, &transfer);
  curl.easy_setopt(handle, curl::kWriteFunction, &take_body);
  curl.easy_setopt(handle, curl::kWriteData, &transfer);
  curl.easy_setopt(handle, curl::kXferInfoFunction, &watch);
  curl.easy_setopt(handle, curl::kXferInfoData, &transfer);
  curl.easy_setopt(handle, curl::kNoProgress, 0L);
  set_method(curl, handle, request, transfer);
}

}  // namespace

std::string HttpResponse::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? "" : found->second;
}

bool HttpResponse::may_succeed_later() const {
  if (status == 408 || status == 429 || status == 500 || status == 502 || status == 503 ||
      status == 504) {
    return true;
  }
  if (status == 400 && error_body.find("<Code>RequestTimeout</Code>") != std::string::npos) {
    return true;
  }
  switch (curl_code) {
    case curl::kOk:
    case curl::kUnsupportedProtocol:
    case curl::kUrlMalformat:
    case curl::kWriteError:
    case curl::kAbortedByCallback:
    case curl::kTooManyRedirects:
    case curl::kPeerFailedVerification:
    case curl::kSslCaCertBadFile:
      return false;
    default:
      return true;
  }
}

std::string HttpResponse::failure_in_words() const {
  if (curl_code != curl::kOk && (status == 0 || is_success())) return curl_message;
  return "status " + std::to_string(status);
}

HttpResponse perform(const HttpRequest& request,
                     const std::function<TakeBytes(const HttpResponse&)>& begin_body) {
  const CurlLibrary& curl = CurlLibrary::of_process();
  curl::Handle* handle = curl.easy_init();
  if (handle == nullptr) throw Error(ErrorKind::io, {}, "libcurl cannot make a handle");
  curl::Share* share = ConnectionPool::of_process().take();
  Transfer transfer{
      .response = {}, .begin_body = begin_body, .stop = tessera::detail::CurrentStop::token()};
  char error_text[curl::kErrorNbytes] = "";
  set_options(curl, handle, request, transfer, error_text);
  curl.easy_setopt(handle, curl::kShare, share);
  curl::List* headers = nullptr;
  for (const std::string& header : request.headers) {
    headers = curl.slist_append(headers, header.c_str());
  }
  // Do not send `Expect: 100-continue`: curl would wait a second for servers that do not answer it.
  if (!request.body.empty()) headers = curl.slist_append(headers, "Expect:");
  curl.easy_setopt(handle, curl::kHttpHeader, headers);
  ++num_requests;
  HttpResponse& response = transfer.response;
  {
    const BlockedSigpipe block;  // kNoSignal makes curl leave this to the program
    response.curl_code = curl.easy_perform(handle);
  }
  if (response.curl_code != curl::kOk) {
    response.curl_message =
        *error_text != '\0' ? error_text : curl.easy_strerror(response.curl_code);
  }
  curl.easy_cleanup(handle);
  curl.slist_free_all(headers);
  ConnectionPool::of_process().give_back(share);
  if (response.curl_code == curl::kAbortedByCallback && transfer.stop.stop_requested()) {
    throw Error(ErrorKind::interrupted, {}, "interrupted");
  }
  return std::move(response);
}

void abort_transfers() {
  is_aborted = true;
}

bool are_transfers_aborted() {
  return is_aborted;
}

TransferCounts transfer_counts() {
  return {num_requests, num_body_bytes};
}

}  // namespace tessera::object_store
