#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "object_store/md5.h"
#include "object_store/s3_server.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// What to do if the object exists already.
enum class Existing {
  replace,
  refuse,  // fail, unless the object has the same bytes
};

/// A part of an unfinished upload. The server stores it, but readers do not see it yet.
struct UploadedPart {
  int number = 1;  // from 1
  std::uint64_t nbytes = 0;
  std::string etag{};  // with its quotes
  Md5 md5{};           // of the bytes that were sent
};

/// An upload in parts that was begun, and was neither completed nor aborted.
struct UnfinishedUpload {
  std::string key;
  std::string id;
};

/// Writes objects with the requests of S3, each with a checksum of its body. If an answer is lost,
/// the request is repeated without harm. Thread-safe. Throws: Error(io) naming the URL if a request
/// fails for good; Error(already_exists) for an object that must not exist.
class S3Uploads {
 public:
  /// Requires: `server` outlives this.
  explicit S3Uploads(S3Server& server) : server_(server) {}

  /// Writes an object in one request. Returns its version.
  ObjectVersion put(const std::string& url, std::span<const std::byte> bytes, Existing existing);
  /// Begins an upload in parts and returns its ID. The object appears with `complete`.
  std::string begin(const std::string& url);
  /// Uploads a part. Replaces an earlier part with the same number.
  UploadedPart put_part(const std::string& url, const std::string& id, int number,
                        std::span<const std::byte> bytes);
  /// Makes the object appear from its parts. Returns its version. Requires: `parts` is not empty and
  /// sorted by number.
  ObjectVersion complete(const std::string& url, const std::string& id,
                         const std::vector<UploadedPart>& parts, Existing existing);
  /// Removes an unfinished upload and its parts. Does nothing if there is no such upload.
  void abort(const std::string& url, const std::string& id);
  /// Returns the parts of an unfinished upload, without UploadedPart::md5.
  std::vector<UploadedPart> list_parts(const std::string& url, const std::string& id);
  /// Returns the unfinished uploads whose keys begin with the key of `url`, oldest first. May
  /// return none on servers that cannot search by prefix: MinIO only finds whole keys.
  std::vector<UnfinishedUpload> list_unfinished(const std::string& url);
  /// Removes an object. Does nothing if there is none.
  void remove(const std::string& url);

 private:
  bool holds(const std::string& url, std::uint64_t nbytes, const std::string& etag);
  S3Server::Answer send_if_free(const std::string& url, S3Server::Call call, Existing existing);
  Error failure(const std::string& url, const S3Server::Answer& answer,
                std::string_view what) const;

  S3Server& server_;
};

}  // namespace tessera::object_store
