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
  std::string etag{};        // of a file, as the server writes it; empty if it does not state it

  friend bool operator==(const Entry&, const Entry&) = default;
};

/// Whether a name that a server gives for an entry can be a file's name in a folder. False for an
/// empty name, `.`, `..`, and a name with a slash or a zero byte, which could lead elsewhere.
bool is_entry_name(std::string_view name);

/// One page of the list of a bucket's objects.
struct BucketPage {
  std::vector<Entry> entries{};
  std::string continuation_token{};  // asks for the next page; empty on the last page
};

/// Parses the answer to S3's request ListObjectsV2 with the delimiter `/`. `prefix`: of the
/// request; empty, or ends with a slash. Names of entries are relative to the prefix. Leaves out
/// the placeholder objects that some programs make for folders (their keys end with a slash), and
/// entries with the name `.` or `..`. Throws: Error(corruption) naming `where`, also for names with
/// a slash or a zero byte.
BucketPage parse_bucket_page(std::string_view xml, const std::string& prefix,
                             const std::string& where);

/// The XML body of an S3 error.
struct S3ErrorBody {
  std::string code{};
  std::string message{};
  std::string region{};    // region that the server wants in signatures
  std::string endpoint{};  // host that a redirect names
};
/// Parses the body of an error. All texts are empty if the body is not XML of S3.
S3ErrorBody parse_s3_error(std::string_view xml);

}  // namespace tessera::object_store
