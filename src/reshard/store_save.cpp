#include "reshard/store_save.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "formats/index_names.h"
#include "formats/staging/replaceable.h"
#include "object_store/files.h"
#include "reshard/spool_folder.h"
#include "tessera/base/error.h"

namespace tessera::reshard {

using object_store::Existing;

std::set<std::string> RecordingFileSystem::made() const {
  const std::scoped_lock lock(mutex_);
  return made_;
}

std::unique_ptr<WritableFile> RecordingFileSystem::create(const std::string& path) {
  auto file = ForwardingFileSystem::create(path);
  const std::scoped_lock lock(mutex_);
  made_.insert(path);
  return file;
}
void RecordingFileSystem::rename(const std::string& from, const std::string& to) {
  ForwardingFileSystem::rename(from, to);
  const std::scoped_lock lock(mutex_);
  if (made_.erase(from) > 0) made_.insert(to);
}
void RecordingFileSystem::remove_all(const std::string& path) {
  ForwardingFileSystem::remove_all(path);
  const std::scoped_lock lock(mutex_);
  std::erase_if(
      made_, [&](const std::string& made) { return made == path || made.starts_with(path + "/"); });
}

StoreSave::~StoreSave() {
  if (!folder_.empty()) ::rmdir(folder_.c_str());
}

std::string StoreSave::begin(OverwritePolicy overwrite) {
  object_store::forget(url_);
  replaced_ = object_store::list_objects(url_);
  is_marked_ = object_store::take_incomplete_mark(replaced_);
  object_store::require_one_kind(url_, replaced_);
  if (!replaced_.empty() && overwrite == OverwritePolicy::refuse &&
      !formats::is_interrupted_write(url_, {})) {
    throw Error(ErrorKind::already_exists, {.path = url_},
                "destination exists (OverwritePolicy::replace replaces a checkpoint)");
  }
  object_store::find_unfinished(url_, object_store::Unfinished::remove);
  folder_ = make_spool_folder({}, url_);
  return join_path(folder_, last_component(url_));
}

void StoreSave::remove_old_files() {
  const auto is_readable_alone = [](const std::string& name) {
    return !formats::is_index_name(name) && !formats::needs_index(name);
  };
  const auto num_readable = std::ranges::count_if(
      replaced_, [&](const auto& object) { return is_readable_alone(object.first); });
  if (num_readable > 0 && replaced_.size() > 1 && !std::exchange(is_marked_, true)) {
    object_store::mark_incomplete(url_);
  }
  object_store::remove_objects(url_, replaced_, formats::is_index_name);
  object_store::remove_objects(url_, replaced_, is_readable_alone);
  std::erase_if(replaced_, [&](const auto& object) {
    return formats::is_index_name(object.first) || is_readable_alone(object.first);
  });
}

void StoreSave::upload_own_files(const std::string& directory) {
  upload_own_files(directory, Existing::replace);
}

void StoreSave::upload_own_files(const std::string& directory, Existing existing) {
  for (const std::string& path : files_.made()) {
    if (!path.starts_with(directory + "/") || uploaded_.contains(path)) continue;
    const std::string name = path.substr(directory.size() + 1);
    object_store::upload_file(fs_, path, join_path(url_, name), existing);
    uploaded_.insert(path);
  }
}

void StoreSave::finish(const std::string& directory) {
  const object_store::StoredObjects there = object_store::list_objects(url_);
  const std::vector<std::string> names = fs_.list_directory(directory);
  for (const std::string& name : names) {
    if (formats::is_index_name(name)) continue;
    const std::uint64_t nbytes = fs_.open(join_path(directory, name))->nbytes();
    const auto found = there.find(name);
    if (found != there.end() && found->second.nbytes == nbytes) continue;
    throw Error::expected(ErrorKind::io, {.path = join_path(url_, name)}, "upload of a rank",
                          std::to_string(nbytes) + " bytes",
                          found == there.end() ? "none" : found->second.in_words(),
                          "does another program write to this URL?");
  }
  object_store::remove_objects(url_, replaced_, [&](const std::string& name) {
    return !name.empty() && std::ranges::find(names, name) == names.end();
  });
  if (is_marked_) object_store::remove_incomplete_mark(url_);
  upload_own_files(directory, Existing::refuse);
  object_store::forget(url_);
}

}  // namespace tessera::reshard
