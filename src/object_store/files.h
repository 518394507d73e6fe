#pragma once

#include <optional>
#include <string>

#include "object_store/named_object.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {

/// Returns the files of the operating system and those behind URLs (`is_url`), as one file system.
/// Files behind URLs can only be read. Lives as long as the process.
FileSystem& files();

/// Returns how many threads read, unless the user says otherwise: one per core, but more if a URL
/// was opened, because they wait for its server most of the time.
int default_num_threads();

/// Returns what the name stands for; nothing if it is free.
std::optional<NamedObject> find_name(const std::string& path);

/// Returns what tells an open object from another one with its URL and size, in words; empty for a
/// file of the operating system.
std::string version_of(const ReadableFile& file);

/// Names the S3 that `s3://` reads from, such as `http://localhost:9000`, instead of the
/// environment.
void set_endpoint(const std::string& url);

/// Names the S3 of the bucket in a path `s3://BUCKET/…`, for all paths in that bucket, until
/// another call names another. Does nothing for other paths. Throws: Error(invalid_argument) if the
/// endpoint is not a URL.
void set_bucket_endpoint(const std::string& path, const std::string& endpoint);

/// Returns an argument of a command line without the query of a web URL in it, which may be a
/// signature. Requests for this URL send it all the same.
std::string keep_query(const std::string& argument);

/// Makes the next opening of a URL, or of one below it, ask the server again. Does nothing for
/// other paths.
void forget(const std::string& path);

/// Whether a path to write to is on an object store, `s3://BUCKET/KEY`. Throws: Error(unsupported)
/// for other URLs, which Tessera only reads; Error(invalid_argument) for a whole bucket.
bool is_on_store(const std::string& path);

/// Refuses a path to write to that is a URL. Throws: Error(unsupported).
void require_local(const std::string& path);

}  // namespace tessera::object_store
