#include "object_store/stored_objects.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <span>
#include <utility>
#include <vector>

#include "base/checked_math.h"
#include "object_store/files.h"
#include "object_store/remote_file_system.h"
#include "object_store/spooled_file.h"
#include "object_store/upload_workers.h"
#include "object_store/url.h"
#include "tessera/base/parallel.h"

namespace tessera::object_store {
namespace {

constexpr int kMaxFolders = 8;  // within each other

S3Server& server_of(const std::string& url) {
  return RemoteFileSystem::of_process().s3(url);
}

std::string url_in(const std::string& url, const std::string& name) {
  return name.empty() ? url : join_path(url, name);
}

/// Lists the folder `url` and the folders in it, those of one level at the same time.
void add_objects(const std::string& url, StoredObjects& objects) {
  std::vector<std::string> folders{""};
  for (int level = 0; level <= kMaxFolders && !folders.empty(); ++level) {
    std::vector<std::vector<Entry>> listed(folders.size());
    parallel_for(static_cast<std::int64_t>(folders.size()), kNumThreadsForUrls, {},
                 [&](std::int64_t i) {
                   const auto folder = static_cast<std::size_t>(i);
                   listed[folder] = server_of(url).list(url_in(url, folders[folder])).value();
                 });
    std::vector<std::string> next;
    for (std::size_t i = 0; i < folders.size(); ++i) {
      for (const Entry& entry : listed[i]) {
        std::string name = folders[i].empty() ? entry.name : join_path(folders[i], entry.name);
        if (entry.is_folder) {
          next.push_back(std::move(name));
        } else {
          objects[name] = {.nbytes = entry.nbytes, .etag = entry.etag};
        }
      }
    }
    folders = std::move(next);
  }
}

}  // namespace

StoredObjects list_objects(const std::string& url) {
  StoredObjects objects;
  if (const auto found = server_of(url).find(url)) objects[""] = found->version;
  add_objects(url, objects);
  return objects;
}

void require_one_kind(const std::string& url, const StoredObjects& objects) {
  if (objects.size() < 2 || !objects.contains("")) return;
  throw Error::expected(
      ErrorKind::invalid_argument, {.path = url}, "destination", "an object or a folder",
      "both: an object of this name, and " + std::to_string(objects.size() - 1) +
          " below it, such as '" + printable(std::next(objects.begin())->first) + "'",
      "nothing was removed; move one of them, or write elsewhere");
}

void remove_objects(const std::string& url, const StoredObjects& objects,
                    const std::function<bool(const std::string& name)>& is_removed) {
  S3Uploads uploads(server_of(url));
  std::vector<std::string> urls;
  for (const auto& [name, version] : objects) {
    if (is_removed(name)) urls.push_back(url_in(url, name));
  }
  parallel_for(static_cast<std::int64_t>(urls.size()), kNumThreadsForUrls, {},
               [&](std::int64_t i) { uploads.remove(urls[static_cast<std::size_t>(i)]); });
}

void upload_file(const FileSystem& fs, const std::string& path, const std::string& url,
                 Existing existing) {
  S3Uploads uploads(server_of(url));
  const auto file = fs.open(path);
  const std::uint64_t part_nbytes = PartSizes::of_file(file->nbytes());
  const auto read = [&](std::uint64_t begin) {
    std::vector<std::byte> bytes(
        static_cast<std::size_t>(std::min(part_nbytes, file->nbytes() - begin)));
    file->read_at(begin, bytes);
    return bytes;
  };
  if (file->nbytes() <= part_nbytes) {
    uploads.put(url, read(0), existing);
    return;
  }
  const MultipartUpload upload = uploads.begin(url);
  try {
    std::vector<UploadedPart> parts(
        static_cast<std::size_t>(ceil_div(file->nbytes(), part_nbytes)));
    parallel_for(static_cast<std::int64_t>(parts.size()), UploadLimits::num_uploads(part_nbytes),
                 {}, [&](std::int64_t i) {
                   const std::vector<std::byte> bytes =
                       read(static_cast<std::uint64_t>(i) * part_nbytes);
                   parts[static_cast<std::size_t>(i)] =
                       uploads.put_part(url, upload, static_cast<int>(i) + 1, bytes);
                 });
    uploads.complete(url, upload, parts, existing);
  } catch (...) {
    try {
      uploads.abort(url, upload.id);
    } catch (const Error&) {
      // Ignored: the next save removes what is left.
    }
    throw;
  }
}

void mark_incomplete(const std::string& url) {
  constexpr std::string_view kText =
      "Tessera is writing or removing the checkpoint in this folder, or was interrupted.\n";
  S3Uploads uploads(server_of(url));
  const std::string mark_url = url_in(url, std::string(kIncompleteMark));
  uploads.remove(mark_url);  // throws if the caller may not remove objects
  try {
    uploads.put(mark_url, std::as_bytes(std::span(kText)), Existing::replace);
  } catch (const Error&) {
    try {
      uploads.remove(mark_url);  // if only the answer was lost
    } catch (const Error&) {
      // Ignored: the first error says more.
    }
    throw;
  }
}

void remove_incomplete_mark(const std::string& url) {
  S3Uploads(server_of(url)).remove(url_in(url, std::string(kIncompleteMark)));
}

bool take_incomplete_mark(StoredObjects& objects) {
  return objects.erase(std::string(kIncompleteMark)) > 0;
}

int find_unfinished(const std::string& url, Unfinished action) {
  S3Uploads uploads(server_of(url));
  const Url parts = parse_url(url);
  int num_found = 0;
  for (const UnfinishedUpload& upload : uploads.list_unfinished(url)) {
    if (upload.key != parts.path && !upload.key.starts_with(parts.path + "/")) continue;
    const std::string upload_url = "s3://" + parts.host + "/" + upload.key;
    ++num_found;
    if (action == Unfinished::remove) uploads.abort(upload_url, upload.id);
  }
  return num_found;
}

}  // namespace tessera::object_store
