#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::object_store {

/// The checksum by which a server checks the bodies that it receives.
enum class BodyCheck {
  md5,    // the header Content-MD5, which all servers know
  crc32,  // the header x-amz-checksum-crc32: 20 times cheaper, but not all servers know it
};

/// An upload in parts that has begun. All parts are checked in the same way.
struct MultipartUpload {
  std::string id{};  // empty: not begun
  BodyCheck check = BodyCheck::md5;
};

/// A part of an unfinished upload. The server stores it, but readers do not see it yet.
struct UploadedPart {
  int number = 1;  // from 1
  std::uint64_t nbytes = 0;
  std::string etag{};         // with its quotes
  bool has_md5_etag = false;  // the ETag seems to be the MD5 of the bytes
  std::uint32_t crc32 = 0;    // of the bytes that were sent
};

std::string without_quotes(std::string etag);

/// Whether an ETag, without its quotes, has the form of an MD5 digest.
bool looks_like_md5(std::string_view etag);

/// Whether `etag` (no quotes) is 32 hex digits and `-<num_parts>`, as S3 makes it of parts' MD5s.
bool looks_like_md5_of_parts(std::string_view etag, std::size_t num_parts);

/// Returns a CRC-32 as S3 writes it in headers and answers: big-endian bytes in base64.
std::string crc32_text(std::uint32_t crc);

/// Returns the ETag, without quotes, that an object of these parts must have. Returns nothing if
/// the ETags of the parts are not MD5 digests.
std::optional<std::string> etag_of_parts(const std::vector<UploadedPart>& parts);

/// Returns the checksum of an object of these parts: S3 computes the CRC-32 of the CRC-32s of the
/// parts, and appends the number of parts.
std::string crc32_of_parts(const std::vector<UploadedPart>& parts);

/// Whether a checksum that a server states is that of an object of these parts. A server may also
/// state `crc32_of_parts` without the number of parts, or the CRC-32 of the whole object.
bool is_crc32_of_parts(const std::string& text, const std::vector<UploadedPart>& parts);

/// Returns the body of the request that completes an upload.
std::string completion_in_xml(const std::vector<UploadedPart>& parts, BodyCheck check);

}  // namespace tessera::object_store
