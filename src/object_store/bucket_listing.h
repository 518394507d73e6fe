#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::object_store {

/// An entry of a folder on a server.
struct Entry {
  std::string name;
  bool is_folder = false;
  std::uint64_t nbytes = 0;  // of a file
  std::string etag{};        // of a file, with its quotes; empty if the server does not say it

  friend bool operator==(const Entry&, const Entry&) = default;
};

/// Whether a server's name for an entry is one that a file can have: not empty, `.` or `..`, and
/// without a slash or a zero byte. A name of another kind could lead out of a folder.
bool is_entry_name(std::string_view name);

/// A page of a bucket's list.
struct BucketPage {
  std::vector<Entry> entries{};
  std::string continuation_token{};  // of the next page; empty for the last one
};

/// Parses the answer to ListObjectsV2 for a prefix that is empty or ends with a slash, with the
/// delimiter `/`. Entries are named relative to the prefix. Left out are the object that some
/// programs make for the folder itself, and keys that end in `.` or `..`, which no file can have as
/// its name. Throws: Error(corruption) naming `where`, also for a name that is_entry_name refuses.
BucketPage parse_bucket_page(std::string_view xml, const std::string& prefix,
                             const std::string& where);

/// What an error of S3 says in XML.
struct S3ErrorBody {
  std::string code{};
  std::string message{};
  std::string region{};    // that the server wants in signatures
  std::string endpoint{};  // that a redirect names
};
/// Parses the body of an error. Returns empty texts for a body that is no XML of S3.
S3ErrorBody parse_s3_error(std::string_view xml);

}  // namespace tessera::object_store
