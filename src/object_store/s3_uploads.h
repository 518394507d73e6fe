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

/// What to do with an object that is there already.
enum class Existing {
  replace,
  refuse,  // unless it has the bytes that are uploaded
};

/// A part of an object that a server has, but shows to nobody yet.
struct UploadedPart {
  int number = 1;  // from 1
  std::uint64_t nbytes = 0;
  std::string etag{};  // with its quotes
  Md5 md5{};           // of the bytes that were sent
};

/// An upload in parts that has been begun, and neither completed nor aborted.
struct UnfinishedUpload {
  std::string key;
  std::string id;
};

/// Writes objects: S3's requests, each with a checksum of its body. Answers that were lost do no
/// harm. Thread-safe. Throws: Error(io) naming the URL if a request fails for good;
/// Error(already_exists) for an object that must not be there.
class S3Uploads {
 public:
  /// Requires: `server` outlives this.
  explicit S3Uploads(S3Server& server) : server_(server) {}

  /// Writes an object in one request. Returns its version.
  ObjectVersion put(const std::string& url, std::span<const std::byte> bytes, Existing existing);
  /// Begins an upload in parts and returns its ID. The object appears with `complete`.
  std::string begin(const std::string& url);
  /// Uploads a part. A part of the same number is replaced.
  UploadedPart put_part(const std::string& url, const std::string& id, int number,
                        std::span<const std::byte> bytes);
  /// Makes an object of its parts. Returns its version. Requires: `parts` are sorted by number, and
  /// there is one.
  ObjectVersion complete(const std::string& url, const std::string& id,
                         const std::vector<UploadedPart>& parts, Existing existing);
  /// Removes an unfinished upload and its parts. Does nothing if there is no such upload.
  void abort(const std::string& url, const std::string& id);
  /// Returns the parts that an unfinished upload has, without their MD5.
  std::vector<UploadedPart> list_parts(const std::string& url, const std::string& id);
  /// Returns the unfinished uploads of the bucket whose keys begin with that of `url`, oldest
  /// first. Returns none if the server does not tell: MinIO only knows whole keys.
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
