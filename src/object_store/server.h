#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "object_store/bucket_listing.h"
#include "object_store/http_request.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// One version of an object: what is checked with every read, so that an object that changes is
/// noticed.
struct ObjectVersion {
  std::uint64_t nbytes = 0;
  std::string etag{};           // with its quotes; empty if the server does not say it
  std::string last_modified{};  // only without an etag

  /// Returns size and ETag, or date, in words. The text differs after a change of the object.
  std::string in_words() const;
  friend bool operator==(const ObjectVersion&, const ObjectVersion&) = default;
};

/// An object, and the bytes at its begin that came with the question for its version.
struct FoundObject {
  ObjectVersion version;
  std::vector<std::byte> begin{};
};

/// A server that holds objects: what all kinds have in common. Paths are URLs as the user gives
/// them. Thread-safe.
class Server {
 public:
  using Query = std::vector<std::pair<std::string, std::string>>;

  virtual ~Server() = default;

  /// Returns what is in a folder, sorted by name: empty for a folder that does not exist. Returns
  /// nothing if the server cannot list folders.
  virtual std::optional<std::vector<Entry>> list(const std::string& url) = 0;
  /// Returns the object, or nothing if no object has this URL. Sends one request.
  std::optional<FoundObject> find(const std::string& url);
  /// Fills `out` with the bytes of the object from `offset` on. Repeats requests that fail, and
  /// goes on after cut connections. Throws: Error(mismatch) if the object is not `version` any
  /// more; Error(io).
  void read(const std::string& url, const ObjectVersion& version, std::uint64_t offset,
            std::span<std::byte> out);

 protected:
  /// Returns the request for an object or a question, signed if necessary.
  virtual HttpRequest request_for(const std::string& url, const Query& query,
                                  std::vector<std::string> headers) = 0;
  /// Learns from an answer how to ask, such as the region of a bucket. Returns whether to ask
  /// again.
  virtual bool learns_from(const std::string& /*url*/, const HttpResponse& /*response*/) {
    return false;
  }
  /// Returns the error for an answer that is no success.
  virtual Error error_for(const std::string& url, const HttpResponse& response) = 0;
  /// Whether an answer means that there is no object. A server that shows objects to us, but does
  /// not let us list them, refuses also those that do not exist.
  bool is_missing(const HttpResponse& response) const;
  /// How often one request is sent anew because of what `learns_from` has learned.
  static constexpr int kMaxLessons = 3;
  /// Whether reads say which version they want. Not if redirects lead to servers with other ETags.
  virtual bool sends_if_match() const { return true; }

  /// Returns the answer and its body, which may have `max_nbytes`. A status of 404 is an answer;
  /// other failures are thrown.
  std::pair<HttpResponse, std::string> ask(const std::string& url, const Query& query,
                                           std::uint64_t max_nbytes,
                                           const std::vector<std::string>& headers = {});

 private:
  class RangeRead;

  std::atomic<bool> has_shown_object_ = false;
};

/// Returns an error for an answer that says nothing in particular.
Error plain_error(const std::string& url, const HttpResponse& response);

}  // namespace tessera::object_store
