#include "object_store/upload_parts.h"

#include <algorithm>
#include <span>

#include "base/base64.h"
#include "base/digest.h"
#include "object_store/md5.h"

namespace tessera::object_store {
namespace {

bool is_hex(std::string_view text) {
  return std::ranges::all_of(
      text, [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

/// Appends the 16 bytes of an MD5 digest that an ETag spells.
void append_digest(std::string& digests, std::string_view etag) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  for (std::size_t i = 0; i + 1 < etag.size(); i += 2) {
    digests += static_cast<char>(digit(etag[i]) << 4 | digit(etag[i + 1]));
  }
}

std::string big_endian(std::uint32_t number) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift & 0xFF);
  return bytes;
}

std::string escaped(const std::string& text) {
  std::string xml;
  for (const char c : text) {
    xml += c == '"' ? "&quot;" : c == '&' ? "&amp;" : c == '<' ? "&lt;" : std::string(1, c);
  }
  return xml;
}

}  // namespace

std::string without_quotes(std::string etag) {
  if (etag.size() >= 2 && etag.starts_with('"') && etag.ends_with('"')) {
    etag = etag.substr(1, etag.size() - 2);
  }
  return etag;
}

bool looks_like_md5(std::string_view etag) {
  return etag.size() == 32 && is_hex(etag);
}

bool looks_like_md5_of_parts(std::string_view etag, std::size_t num_parts) {
  const std::string suffix = "-" + std::to_string(num_parts);
  return etag.size() == 32 + suffix.size() && etag.ends_with(suffix) && is_hex(etag.substr(0, 32));
}

std::string crc32_text(std::uint32_t crc) {
  return tessera::detail::base64_encode(big_endian(crc));
}

std::optional<std::string> etag_of_parts(const std::vector<UploadedPart>& parts) {
  std::string digests;
  for (const UploadedPart& part : parts) {
    if (!part.has_md5_etag) return std::nullopt;
    append_digest(digests, without_quotes(part.etag));
  }
  return Md5::of(std::as_bytes(std::span(digests))).hex() + "-" + std::to_string(parts.size());
}

std::string crc32_of_parts(const std::vector<UploadedPart>& parts) {
  std::string crcs;
  for (const UploadedPart& part : parts) crcs += big_endian(part.crc32);
  return crc32_text(crc32(0, std::as_bytes(std::span(crcs)))) + "-" + std::to_string(parts.size());
}

bool is_crc32_of_parts(const std::string& text, const std::vector<UploadedPart>& parts) {
  const std::string composite = crc32_of_parts(parts);
  if (text == composite || text == composite.substr(0, composite.rfind('-'))) return true;
  std::uint32_t whole = 0;
  for (const UploadedPart& part : parts) whole = crc32_combine(whole, part.crc32, part.nbytes);
  return text == crc32_text(whole);
}

std::string completion_in_xml(const std::vector<UploadedPart>& parts, BodyCheck check) {
  std::string xml = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  for (const UploadedPart& part : parts) {
    xml += "<Part><PartNumber>" + std::to_string(part.number) + "</PartNumber><ETag>" +
           escaped(part.etag) + "</ETag>";
    if (check == BodyCheck::crc32) {
      xml += "<ChecksumCRC32>" + crc32_text(part.crc32) + "</ChecksumCRC32>";
    }
    xml += "</Part>";
  }
  return xml + "</CompleteMultipartUpload>";
}

}  // namespace tessera::object_store
