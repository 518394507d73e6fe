#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "object_store/s3_server.h"
#include "object_store/upload_parts.h"
#include "tessera/base/error.h"

namespace tessera::object_store {

/// What to do if the object exists already.
enum class Existing {
  replace,
  refuse,  // throws Error(already_exists), unless the object has the same bytes
};

/// An upload in parts that was begun, and was neither completed nor aborted.
struct UnfinishedUpload {
  std::string key;
  std::string id;
  BodyCheck check = BodyCheck::md5;  // as the server lists it; md5 if the list does not say
};

/// The parts of an unfinished upload, and how its parts are checked.
struct ListedParts {
  std::vector<UploadedPart> parts;
  BodyCheck check = BodyCheck::md5;  // as the server lists it; md5 if the list does not say
};

/// Returns `listed`, with the CRC-32 of `bytes`, if its size and ETag (an MD5) are those of
/// `bytes`: the server has these bytes. Otherwise returns nothing: upload `bytes`.
std::optional<UploadedPart> listed_part(const UploadedPart& listed,
                                        std::span<const std::byte> bytes);

/// Writes objects with the requests of S3, each with a checksum of its body. If an answer is lost,
/// repeats the request, which does no harm. Thread-safe. Throws: Error(io or not_found) naming the
/// URL if a request fails for good; Error(already_exists) for an object that must not exist.
///
/// The checksum is a CRC-32 if the server checks it (it then repeats the value in its answer), and
/// an MD5 digest otherwise. Until an answer has shown this, `put` sends both.
class S3Uploads {
 public:
  /// Requires: `server` outlives this.
  explicit S3Uploads(S3Server& server) : server_(server) {}

  /// Whether the server surely obeys Existing::refuse: true only for Amazon S3. Other servers may
  /// ignore its condition (If-None-Match), and then replace the object.
  bool surely_refuses_existing() const { return server_.is_amazon(); }

  /// Writes an object in one request. Returns its version.
  ObjectVersion put(const std::string& url, std::span<const std::byte> bytes, Existing existing);
  /// Begins an upload in parts. The object appears with `complete`.
  MultipartUpload begin(const std::string& url);
  /// Uploads a part. Replaces an earlier part with the same number.
  UploadedPart put_part(const std::string& url, const MultipartUpload& upload, int number,
                        std::span<const std::byte> bytes);
  /// Makes the object appear from its parts. Returns its version. Requires: `parts` is not empty
  /// and sorted by number.
  ObjectVersion complete(const std::string& url, const MultipartUpload& upload,
                         const std::vector<UploadedPart>& parts, Existing existing);
  /// Removes an unfinished upload and its parts. Does nothing if there is no such upload.
  void abort(const std::string& url, const std::string& id);
  /// Returns the parts of an upload, without UploadedPart::crc32; no parts if it no longer exists.
  ListedParts list_parts(const std::string& url, const std::string& id);
  /// Returns the unfinished uploads whose keys begin with the key of `url`. Returns fewer, or none,
  /// if the server refuses the list or cannot search by prefix: MinIO only finds whole keys.
  std::vector<UnfinishedUpload> list_unfinished(const std::string& url);
  /// Whether an object has the bytes of `parts`. Reads the object and compares the CRC-32 of each
  /// part, so it also works if the ETag is no digest of the bytes (SSE-KMS).
  bool holds(const std::string& url, const ObjectVersion& version,
             const std::vector<UploadedPart>& parts);
  /// Removes an object. Does nothing if there is no such object.
  void remove(const std::string& url);

 private:
  class Body;
  /// Which checksums a request states in its headers.
  struct Checks {
    bool md5 = true;
    bool crc32 = false;
  };

  Checks checks_for(std::optional<BodyCheck> check_of_upload) const;
  void note_crc32(const Checks& checks, const S3Server::Answer& answer);
  S3Server::Answer send_body(const std::string& url, S3Server::Call call, Body& body,
                             std::string_view what, Existing existing,
                             std::optional<BodyCheck> check_of_upload);
  static void require_checksum_of(const std::string& url, const std::vector<UploadedPart>& parts,
                                  const std::string& etag, const std::string& crc32);
  std::optional<ObjectVersion> find_equal(const std::string& url,
                                          const std::vector<UploadedPart>& parts,
                                          const std::string& etag);
  S3Server::Answer send_if_free(const std::string& url, S3Server::Call call, Existing existing);
  Error failure(const std::string& url, const S3Server::Answer& answer,
                std::string_view what) const;

  S3Server& server_;
};

}  // namespace tessera::object_store
