#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "object_store/s3_uploads.h"
#include "object_store/server.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {

/// Objects, with their paths relative to a folder as keys. For a single object, the key is empty.
using StoredObjects = std::map<std::string, ObjectVersion>;

/// Returns the object at a URL `s3://…`, and all objects in the folder of that name, and in the
/// folders in it, at most 8 levels deep. Always asks the server.
StoredObjects list_objects(const std::string& url);

/// Throws Error(invalid_argument) if both an object and a folder have this URL. Readers see only
/// one of them, so a writer could replace the other one unseen. `objects`: from `list_objects`.
void require_one_kind(const std::string& url, const StoredObjects& objects);

/// Removes each object of `objects`, in the folder `url`, if `is_removed` returns true for its key.
/// Several at the same time, in no order. If one cannot be removed, leaves those not yet begun.
void remove_objects(const std::string& url, const StoredObjects& objects,
                    const std::function<bool(const std::string& name)>& is_removed);

/// Uploads a local file, in parts if it is large. Throws: as S3Uploads.
void upload_file(const FileSystem& fs, const std::string& path, const std::string& url,
                 Existing existing);

/// The name of an object that says that the folder holds no complete checkpoint: a run is adding or
/// removing files there, or was interrupted. Readers refuse a folder with it. It is needed where
/// the files alone do not show this, because they have no index.
inline constexpr std::string_view kIncompleteMark = ".tessera-incomplete";
/// Puts the mark into the folder `url`. Before that, makes sure that this user may remove objects
/// there. A mark that the user cannot remove would hide an intact checkpoint from all readers.
void mark_incomplete(const std::string& url);
void remove_incomplete_mark(const std::string& url);
/// Removes the mark from a list of objects. Returns whether it was there.
bool take_incomplete_mark(StoredObjects& objects);

/// Whether find_unfinished only counts the uploads, or also aborts them.
enum class Unfinished { count, remove };
/// Returns the number of unfinished uploads to the object `url` and to all objects under `url/`.
int find_unfinished(const std::string& url, Unfinished action);

}  // namespace tessera::object_store
