#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "object_store/bucket_listing.h"
#include "object_store/http_request.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// Identifies one version of an object. Every read checks that the object still has it; if not, the
/// read fails.
struct ObjectVersion {
  std::uint64_t nbytes = 0;
  std::string etag{};  // with quotes if the server sends them; empty if it does not state it
  std::string last_modified{};  // set only if there is no etag

  /// Returns the size, and the ETag or date, in words. The text of a changed object differs from
  /// the text before.
  std::string in_words() const;
  friend bool operator==(const ObjectVersion&, const ObjectVersion&) = default;
};

/// The version of an object, and its first bytes, which came in the same answer.
struct FoundObject {
  ObjectVersion version;
  std::vector<std::byte> begin{};
};

/// Base class of all kinds of servers that hold objects. Paths are URLs as the user gives them.
/// Thread-safe.
class Server {
 public:
  using Query = std::vector<std::pair<std::string, std::string>>;

  virtual ~Server() = default;

  /// Returns the entries of a folder, sorted by name; an empty list for a folder that does not
  /// exist. Returns nothing if the server cannot list folders.
  virtual std::optional<std::vector<Entry>> list(const std::string& url) = 0;
  /// Returns the object, or nothing if no object has this URL. Repeats requests that fail.
  std::optional<FoundObject> find(const std::string& url);
  /// Fills `out` with the bytes of the object from `offset` on. Repeats requests that fail, and
  /// continues after broken connections. Throws: Error(mismatch) if the object no longer has this
  /// version; Error(unsupported) if the server does not send ranges; what `error_for` returns.
  void read(const std::string& url, const ObjectVersion& version, std::uint64_t offset,
            std::span<std::byte> out);

  /// Returns the mutex that guards what all servers remember. It is never held during a request or
  /// while a file is read, and a fork does not leave it locked in the child.
  static std::mutex& memory_mutex();

 protected:
  /// Returns the request to send, signed if necessary: for an object, or, with a query, for
  /// information such as a list.
  virtual HttpRequest request_for(const std::string& url, const Query& query,
                                  std::vector<std::string> headers) = 0;
  /// Remembers values of an answer for the next request, such as the region of a bucket. Returns
  /// whether to send the request again.
  virtual bool learns_from(const std::string& /*url*/, const HttpResponse& /*response*/) {
    return false;
  }
  /// Returns the error for an answer with an error status.
  virtual Error error_for(const std::string& url, const HttpResponse& response) = 0;
  /// Whether an answer means that there is no object: 404, 410; after `find` found one on this host
  /// or in this bucket, also S3's AccessDenied. S3 answers so for missing objects if the user may
  /// read objects but not list them.
  bool is_missing(const std::string& url, const HttpResponse& response) const;
  /// How often one request is sent again after `learns_from` returned true.
  static constexpr int kMaxLessons = 3;
  /// Returns a text for ObjectVersion::etag to use instead of the server's ETag; nothing if the
  /// server's ETag is used.
  virtual std::optional<std::string> own_etag(const std::string& /*url*/) { return std::nullopt; }
  /// Whether reads send the expected ETag (If-Match). False if redirects lead to servers with other
  /// ETags.
  virtual bool sends_if_match() const { return true; }

  /// Sends a request. Returns the answer and its body, also if the status is 404. Throws:
  /// Error(corruption) for a body over `max_nbytes`; what `error_for` returns otherwise.
  std::pair<HttpResponse, std::string> ask(const std::string& url, const Query& query,
                                           std::uint64_t max_nbytes,
                                           const std::vector<std::string>& headers = {});

 private:
  class RangeRead;

  std::set<std::string> hosts_with_objects_;  // in which `find` found an object
};

/// Returns the error for an answer that failed: Error(not_found) for status 404 or 410, otherwise
/// Error(io). The error has no advice for the user.
Error plain_error(const std::string& url, const HttpResponse& response);

}  // namespace tessera::object_store
