#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::object_store {

/// Whether `path` names an object on a server: it begins with `s3://`, `hf://`, `https://` or
/// `http://`. Throws: Error(invalid_argument) for other paths that begin like a URL (`gs://…`,
/// `S3://…`, and `s3:/…`, which pathlib makes of a URL): as local paths they would name a folder
/// such as `gs:`. If that is meant, the path begins with `./`.
bool is_url(std::string_view path);

/// The parts of a URL `scheme://host/path`, not decoded.
struct Url {
  std::string scheme;  // lower case
  std::string host;    // with the port, if there is one; the bucket of `s3://`
  std::string path;    // without the leading slash; empty for the root
  std::string query;   // without the question mark
};

/// Returns the parts of a URL. A question mark begins a query only in `http://` and `https://`: in
/// other schemes it is part of a name. Throws: Error(invalid_argument) if there is no host, or if
/// the host holds a user name or a password.
Url parse_url(const std::string& url);

/// Returns `text` with every byte as `%XX`, except letters, digits, `-._~`, and the bytes in
/// `kept`, such as a slash.
std::string percent_encode(std::string_view text, std::string_view kept = {});

/// Undoes `percent_encode`, and turns `+` into a space. Returns nothing if a `%` is not followed by
/// two hex digits.
std::optional<std::string> form_decode(std::string_view text);

}  // namespace tessera::object_store
