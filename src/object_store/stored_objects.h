#pragma once

#include <functional>
#include <map>
#include <string>

#include "object_store/s3_uploads.h"
#include "object_store/server.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {

/// Objects by their path from a folder. The path of a single object from itself is empty.
using StoredObjects = std::map<std::string, ObjectVersion>;

/// Returns the object at a URL `s3://…`, or else all objects in that folder and in folders within.
/// Asks the server itself.
StoredObjects list_objects(const std::string& url);

/// Removes these objects of a folder.
void remove_objects(const std::string& url, const StoredObjects& objects,
                    const std::function<bool(const std::string& name)>& is_removed);

/// Uploads a local file, in parts if it is large. Throws: as S3Uploads.
void upload_file(const FileSystem& fs, const std::string& path, const std::string& url,
                 Existing existing);

/// Removes the unfinished uploads at a URL, and in the folder of that name, or only counts them.
enum class Unfinished { count, remove };
int find_unfinished(const std::string& url, Unfinished action);

}  // namespace tessera::object_store
