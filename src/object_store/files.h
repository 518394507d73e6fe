#pragma once

#include <optional>
#include <string>

#include "object_store/named_object.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {

/// Returns the files of the operating system and the files at URLs (`is_url`), as one file system.
/// Files at URLs can only be read. Lives as long as the process.
FileSystem& files();

/// The number of threads that send requests: more than cores, because they mostly wait for the
/// server.
inline constexpr int kNumThreadsForUrls = 16;

/// Returns the default number of threads that read: one per core, at most 16. If a URL was opened,
/// returns kNumThreadsForUrls.
int default_num_threads();

/// Returns what `path` names: a file, folder, link or other object; nothing if nothing is there.
/// Does not follow a link.
std::optional<NamedObject> find_name(const std::string& path);

/// As `find_name`, but follows all links.
std::optional<NamedObject> find_target(const std::string& path);

/// Sets the server for `s3://` URLs to `url`, such as `http://localhost:9000`. Overrides the user's
/// AWS settings. Buckets that have a server of their own (set_bucket_endpoint) keep it.
void set_endpoint(const std::string& url);

/// Sets the server for all `s3://` paths in the bucket of `path`, `s3://BUCKET/…`. A later call
/// replaces it. Does nothing if `path` is not an `s3://` URL. Throws: Error(invalid_argument) if
/// `endpoint` is not a URL.
void set_bucket_endpoint(const std::string& path, const std::string& endpoint);

/// Removes the query from a web URL in a command-line argument, because the query may be a secret
/// signature. Returns the rest. Stores the query, so that requests for this URL still send it.
std::string keep_query(const std::string& argument);

/// Forgets what is known about a URL, the URLs below it, the folder that contains it and the other
/// entries of this folder. The next `open` asks the server again. Does nothing for local paths.
void forget(const std::string& path);

/// Whether a path to write to is on an object store, `s3://BUCKET/KEY`. Throws: Error(unsupported)
/// for other URLs, which Tessera only reads; Error(invalid_argument) for a whole bucket.
bool is_on_store(const std::string& path);

/// Throws Error(unsupported) if a path to write to is a URL.
void require_local(const std::string& path);

}  // namespace tessera::object_store
