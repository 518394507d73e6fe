#include "object_store/spool.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <tuple>

#include "base/digest.h"
#include "base/random_name.h"
#include "object_store/files.h"
#include "object_store/md5.h"
#include "object_store/remote_file_system.h"
#include "object_store/url.h"
#include "tessera/base/error.h"
#include "tessera/base/parallel.h"

namespace tessera::object_store {
namespace {

constexpr std::size_t kMaxWaitingParts = 8;
// Names of uploads that have no bytes and are never completed: notes for other runs.
constexpr const char* kClaimPrefix = ".tessera-claim-";
constexpr const char* kNoObject = ".tessera-none";  // an object that no program writes

/// Returns the objects at a URL, without the mark.
StoredObjects objects_at(const std::string& url) {
  StoredObjects objects = list_objects(url);
  take_incomplete_mark(objects);
  return objects;
}

}  // namespace

/// A file in the spool that is being written.
class Spool::File final : public WritableFile {
 public:
  File(Spool& spool, FilePointer file)
      : spool_(spool), file_(std::move(file)), open_(file_->open()) {}

  const std::string& path() const override { return file_->path(); }
  void write_at(std::uint64_t offset, std::span<const std::byte> bytes) override {
    spool_.upload(file_, file_->write_at(offset, bytes));
  }
  void resize(std::uint64_t nbytes) override { file_->resize(nbytes); }
  void sync() override { spool_.upload(file_, file_->sync()); }
  void close() override { open_.reset(); }

 private:
  Spool& spool_;
  FilePointer file_;
  std::shared_ptr<const tessera::detail::FileDescriptor> open_;
};

Spool::Spool(std::string folder, SpoolOptions options)
    : ForwardingFileSystem(FileSystem::posix()),
      folder_(std::move(folder)),
      options_(std::move(options)),
      path_(join_path(folder_, last_component(options_.url))),
      parent_url_(options_.url.substr(0, options_.url.size() - last_component(path_).size())),
      uploads_(RemoteFileSystem::of_process().s3(options_.url)),
      is_marked_(options_.is_marked),
      workers_(kMaxWaitingParts) {
  int num_unfinished = 0;
  if (options_.discards) {
    find_unfinished(options_.url, Unfinished::remove);
  } else if (!options_.resumes) {
    num_unfinished = find_unfinished(options_.url, Unfinished::count);
  }
  if (num_unfinished > 0) {
    throw Error(ErrorKind::already_exists, {.path = options_.url},
                "uploads: an interrupted run has left " + std::to_string(num_unfinished) +
                    " unfinished upload" + (num_unfinished == 1 ? "" : "s") + " at this URL",
                {Remedy::Action::resume_or_discard});
  }
  std::error_code error;
  std::filesystem::create_directories(folder_, error);
  if (error) throw Error(ErrorKind::io, {.path = folder_}, "create: " + error.message());
}

Spool::~Spool() {
  workers_.stop();
  ::rmdir(folder_.c_str());
}

void Spool::abort() {
  workers_.stop();
  std::map<std::string, Begun> begun;
  {
    const std::scoped_lock lock(mutex_);
    begun.swap(begun_);
  }
  for (const auto& [id, upload] : begun) uploads_.abort(upload.url, id);
  // No object has appeared yet, so there is nothing that the mark must tell.
  if (published_.empty() && !options_.replaced && !options_.is_marked) remove_mark();
}

LeftOnServer Spool::keep() {
  workers_.stop();
  const std::scoped_lock lock(mutex_);
  LeftOnServer left{.num_objects = published_.size(),
                    .has_begun_to_replace = has_begun_to_replace_};
  for (const auto& [id, upload] : begun_) left.unfinished_nbytes += upload.nbytes;
  return left;
}

/// Whether a path is a staging path or below one. Only such files are uploaded.
bool Spool::is_staged(const std::string& path) const {
  if (!path.starts_with(folder_ + "/")) return false;
  const std::string rest = path.substr(folder_.size() + 1);
  return rest.substr(0, rest.find('/')).ends_with(options_.staging_suffix);
}

std::string Spool::url_of(const std::string& staged_path) const {
  std::string rest = staged_path.substr(folder_.size() + 1);
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  const std::size_t suffix = slash - options_.staging_suffix.size();
  return parent_url_ + rest.substr(0, suffix) + rest.substr(slash);
}

/// Returns the file's path relative to the destination folder; empty for a file outside of it.
std::string Spool::name_of(const SpooledFile& file) const {
  if (!file.url().starts_with(options_.url + "/")) return {};
  return file.url().substr(options_.url.size() + 1);
}

Spool::FilePointer Spool::spooled(const std::string& path) {
  FilePointer file;
  bool will_mark = false;
  {
    const std::scoped_lock lock(mutex_);
    FilePointer& known = files_[path];
    if (!known) {
      known = std::make_shared<SpooledFile>(path, url_of(path), options_.min_part_nbytes,
                                            options_.release);
      will_mark = shows_need_of_mark(*known);
    }
    file = known;
  }
  if (will_mark) require_right_to_remove();  // now, and not after hours of uploads
  return file;
}

void Spool::upload(const FilePointer& file, std::vector<SpooledFile::Work> work) {
  for (const SpooledFile::Work& part : work) {
    workers_.run(part.range.nbytes(), [this, file, part] { upload_part(*file, part); });
  }
}

/// Begins the upload of a file in parts, or takes over the upload of an interrupted run.
void Spool::begin_upload(SpooledFile& file) {
  const std::scoped_lock lock(file.begin_mutex);
  if (!file.upload.id.empty()) return;
  if (options_.resumes || options_.discards) {
    const std::string key = parse_url(file.url()).path;
    for (const UnfinishedUpload& upload : uploads_.list_unfinished(file.url())) {
      if (upload.key != key) continue;
      if (!options_.resumes || !file.upload.id.empty()) {
        uploads_.abort(file.url(), upload.id);
        continue;
      }
      ListedParts listed = uploads_.list_parts(file.url(), upload.id);
      const bool has_crc32 = upload.check == BodyCheck::crc32 || listed.check == BodyCheck::crc32;
      file.upload = {upload.id, has_crc32 ? BodyCheck::crc32 : BodyCheck::md5};
      for (UploadedPart& part : listed.parts) {
        file.kept[part.number] = std::move(part);
      }
    }
  }
  if (file.upload.id.empty()) file.upload = uploads_.begin(file.url());
  const std::scoped_lock begun_lock(mutex_);
  begun_[file.upload.id] = {file.url()};
}

void Spool::upload_part(SpooledFile& file, const SpooledFile::Work& work) {
  begin_upload(file);
  const std::vector<std::byte> bytes = file.read(work.range);
  const int number = work.index + 1;
  const auto kept = file.kept.find(number);
  std::optional<UploadedPart> part;
  if (kept != file.kept.end()) part = listed_part(kept->second, bytes);
  if (!part) part = uploads_.put_part(file.url(), file.upload, number, bytes);
  file.note_uploaded(work, *std::move(part));
  const std::scoped_lock lock(mutex_);
  begun_[file.upload.id].nbytes += bytes.size();
}

/// Uploads what is left of a file and completes the upload, so that the object appears.
void Spool::publish_file(SpooledFile& file) {
  const Existing existing = options_.replaced ? Existing::replace : Existing::refuse;
  std::optional<ObjectVersion> version;
  bool is_in_parts = false;
  if (file.is_one_part() && file.upload.id.empty()) {
    const std::vector<std::byte> bytes = file.read({0, file.nbytes()});
    if (left_.contains(file.url())) {
      const UploadedPart whole{.number = 1, .nbytes = bytes.size(), .crc32 = crc32(0, bytes)};
      version = left_version(file.url(), {whole}, Md5::of(bytes).hex());
    }
    if (!version) version = uploads_.put(file.url(), bytes, existing);
  } else {
    is_in_parts = true;
    for (const SpooledFile::Work& part : file.rest()) upload_part(file, part);
    const std::vector<UploadedPart> parts = file.uploaded_parts();
    if (left_.contains(file.url())) {
      version = left_version(file.url(), parts, etag_of_parts(parts).value_or(""));
    }
    if (version) {
      uploads_.abort(file.url(), file.upload.id);
    } else {
      version = uploads_.complete(file.url(), file.upload, parts, existing);
    }
  }
  const std::scoped_lock lock(mutex_);
  if (is_in_parts) begun_.erase(file.upload.id);
  published_[file.url()] = *std::move(version);
}

/// Returns the files at a staging path in the order in which they appear: small files first, the
/// index last, because without it readers find no checkpoint.
std::vector<Spool::FilePointer> Spool::in_order_of_publication(
    const std::string& staging_path) const {
  std::vector<FilePointer> files;
  {
    const std::scoped_lock lock(mutex_);
    for (const auto& [path, file] : files_) {
      if (path == staging_path || path.starts_with(staging_path + "/")) files.push_back(file);
    }
  }
  std::ranges::sort(files, {}, [&](const FilePointer& file) {
    const bool is_index = options_.is_index && options_.is_index(name_of(*file));
    return std::tuple(is_index, file->nbytes(), file->path());
  });
  return files;
}

/// Begins an upload that readers do not see and that no run completes. Returns false if the server
/// does not support this. (If it is down, the next request throws.)
bool Spool::begin_note(const std::string& url) {
  MultipartUpload upload;
  try {
    upload = uploads_.begin(url);
  } catch (const Error&) {
    return false;
  }
  const std::scoped_lock lock(mutex_);
  begun_[upload.id] = {url};
  return true;
}

/// Whether some of the files may look like a complete checkpoint before all of them, and their
/// index, are there.
bool Spool::may_be_whole_without_index(const std::vector<FilePointer>& files) const {
  return files.size() > 1 && options_.may_be_whole_without_index &&
         std::ranges::any_of(files, [&](const FilePointer& file) {
           return options_.may_be_whole_without_index(name_of(*file));
         });
}

/// Whether some of the old or new objects may look like a complete checkpoint: if objects are
/// removed one after the other, or if several new ones appear that can be read without an index.
bool Spool::needs_mark(const std::vector<FilePointer>& files) const {
  return options_.replaced ? !replaces_one_object(files) : may_be_whole_without_index(files);
}

/// Whether `needs_mark` will be true, as a new file in `files_` shows. Requires: holds `mutex_`.
bool Spool::shows_need_of_mark(const SpooledFile& file) {
  const std::string name = name_of(file);
  if (name.empty() && file.url() != options_.url) return false;  // beside the destination
  if (options_.replaced) {
    return options_.replaced->size() != 1 || !options_.replaced->contains(name);
  }
  is_any_without_index_ = is_any_without_index_ || (options_.may_be_whole_without_index &&
                                                    options_.may_be_whole_without_index(name));
  return is_any_without_index_ && files_.size() > 1;
}

/// Throws if this user may not remove objects at the destination, as the mark needs. Removes an
/// object that does not exist: the mark itself may be that of another run.
void Spool::require_right_to_remove() {
  {
    const std::scoped_lock lock(mutex_);
    if (std::exchange(may_remove_, true)) return;
  }
  uploads_.remove(join_path(options_.url, kNoObject));
}

void Spool::mark() {
  bool is_marked = false;
  {
    const std::scoped_lock lock(mutex_);
    is_marked = is_marked_;
  }
  if (!is_marked) mark_incomplete(options_.url);
  const std::scoped_lock lock(mutex_);
  is_marked_ = true;
  has_begun_to_replace_ = options_.replaced.has_value();
}

/// Removes the mark again if the old checkpoint is still complete, because the server refused to
/// remove its first object.
void Spool::take_back_mark() noexcept {
  if (options_.is_marked) return;  // it was incomplete before
  try {
    require_replaced_unchanged();
    remove_mark();
    const std::scoped_lock lock(mutex_);
    has_begun_to_replace_ = false;
  } catch (...) {
    // Ignored: the mark stays, and the next run can resume or discard what is there.
  }
}

void Spool::remove_mark() {
  {
    const std::scoped_lock lock(mutex_);
    if (!std::exchange(is_marked_, false)) return;
  }
  remove_incomplete_mark(options_.url);
}

/// Throws if an object at the destination has not the name and size of a file that this run writes:
/// then it is not from the run that this one resumes. Otherwise keeps the objects in `left_`.
void Spool::require_own_names(const std::vector<FilePointer>& files) {
  const StoredObjects there = objects_at(options_.url);
  const std::scoped_lock lock(mutex_);
  for (const auto& [name, version] : there) {
    const std::string url = name.empty() ? options_.url : join_path(options_.url, name);
    const auto file = std::ranges::find(files, url, [](const auto& each) { return each->url(); });
    if (file == files.end() || (*file)->nbytes() != version.nbytes) {
      throw Error::expected(
          ErrorKind::already_exists, {.path = url}, "object to resume",
          file == files.end()
              ? "none, because the new checkpoint has no such file"
              : "the " + std::to_string((*file)->nbytes()) + " bytes that this run writes",
          version.in_words(), "another checkpoint is here; nothing was changed");
    }
    left_[url] = version;
  }
}

/// Returns the version of an object that the interrupted run wrote. Throws if it is not the object
/// that this run would write. `etag`: of that object if ETags are MD5 digests, without quotes;
/// empty if it is not known. If the object has another ETag, its bytes are read and compared,
/// because ETags of encrypted objects are no digests.
ObjectVersion Spool::left_version(const std::string& url, const std::vector<UploadedPart>& parts,
                                  const std::string& etag) {
  const ObjectVersion& left = left_.at(url);
  if (!etag.empty() && without_quotes(left.etag) == etag) return left;
  if (uploads_.holds(url, left, parts)) return left;
  throw Error::expected(
      ErrorKind::already_exists, {.path = url}, "object to resume",
      "the bytes that this run writes" + (etag.empty() ? etag : ": ETag \"" + etag + '"'),
      left.in_words(), "another program or run wrote it");
}

/// Throws if another program is uploading a checkpoint to the destination. Does nothing on Amazon
/// S3, which refuses to replace objects by itself.
///
/// Each writer begins an upload below the destination, its claim, and then lists the claims there.
/// Readers do not see such uploads. If two writers overlap, at least the one that begins later sees
/// the other's claim, and throws. A writer ends its claim only after its index has appeared, so a
/// writer that begins after that sees the index.
void Spool::claim() {
  {
    const std::scoped_lock lock(mutex_);
    if (uploads_.surely_refuses_existing() || std::exchange(is_claimed_, true)) return;
  }
  const std::string prefix = join_path(options_.url, kClaimPrefix);
  const std::string url = prefix + tessera::detail::random_name();
  if (!begin_note(url)) return;
  for (const UnfinishedUpload& other : uploads_.list_unfinished(prefix)) {
    if (other.key == parse_url(url).path) continue;  // our own; a repeated request may make two
    throw Error::expected(ErrorKind::already_exists, {.path = options_.url}, "claim",
                          "no upload of another program", "'" + printable(other.key) + "'",
                          "another program writes here");
  }
}

/// Throws if the objects at the destination are no longer those of SpoolOptions::replaced.
void Spool::require_replaced_unchanged() const {
  const StoredObjects now = objects_at(options_.url);
  const auto in_words = [](const StoredObjects& objects, const std::string& name) {
    const auto found = objects.find(name);
    return found == objects.end() ? std::string("none") : found->second.in_words();
  };
  for (const auto* objects : {&now, &*options_.replaced}) {
    for (const auto& [name, version] : *objects) {
      const std::string before = in_words(*options_.replaced, name);
      const std::string after = in_words(now, name);
      if (before == after) continue;
      throw Error::expected(ErrorKind::already_exists,
                            {.path = name.empty() ? options_.url : join_path(options_.url, name)},
                            "object to replace",
                            "the object that was there at the start: " + before, after,
                            "another program writes here");
    }
  }
}

namespace {

/// Whether two versions may be the same one. Some servers give an ETag of one form in the answer to
/// an upload, and of another form in lists.
bool may_be_equal(const ObjectVersion& one, const ObjectVersion& other) {
  return one.nbytes == other.nbytes &&
         (one.etag == other.etag || one.etag.size() != other.etag.size());
}

}  // namespace

/// Throws if another program has written into the folder of the destination. Some servers do not
/// refuse to replace an object, and no server refuses objects with other names in the same folder.
/// `replaced_url` is the old object that the upload is about to replace; empty if it replaces none.
void Spool::require_no_objects_of_others(const std::string& replaced_url) const {
  const StoredObjects there = objects_at(options_.url);
  const auto refuse = [](const std::string& url, const std::string& expected,
                         const std::string& found) {
    throw Error::expected(ErrorKind::already_exists, {.path = url}, "object", expected, found,
                          "another program writes here, or an earlier run left it");
  };
  const std::scoped_lock lock(mutex_);
  for (const auto& [name, version] : there) {
    const std::string url = join_path(options_.url, name);
    if (published_.contains(url)) continue;
    // `publish_file` compares it with the file of this run.
    if (left_.contains(url) && left_.at(url).in_words() == version.in_words()) continue;
    if (url != replaced_url) refuse(url, "none", version.in_words());
    const auto old = options_.replaced->find(name);
    if (old == options_.replaced->end() || old->second.in_words() != version.in_words()) {
      refuse(url, "the object that was there at the start", version.in_words());
    }
  }
  for (const auto& [url, version] : published_) {
    if (!url.starts_with(options_.url + "/")) continue;  // a file beside the destination
    const std::string name = url.substr(options_.url.size() + 1);
    const auto found = there.find(name);
    if (found == there.end() || !may_be_equal(found->second, version)) {
      refuse(url, "the one that this run wrote: " + version.in_words(),
             found == there.end() ? "none" : found->second.in_words());
    }
  }
}

/// Whether the old and the new checkpoint are one object of the same name, which the server
/// replaces in one step.
bool Spool::replaces_one_object(const std::vector<FilePointer>& files) const {
  return files.size() == 1 && options_.replaced && options_.replaced->size() == 1 &&
         options_.replaced->contains(name_of(*files.front()));
}

/// Removes the old objects without which readers find no checkpoint, so that no reader sees a
/// mixture of old and new files: the index if the new checkpoint has an index of the same name and
/// its other files cannot be read without it, else all objects. Returns whether some are left that
/// `remove_old_objects_after` may have to remove.
bool Spool::remove_old_objects_before(const std::vector<FilePointer>& files) const {
  if (replaces_one_object(files)) return false;
  const auto is_index = [&](const std::string& name) {
    return options_.is_index && options_.is_index(name);
  };
  const std::string last = files.empty() ? std::string() : name_of(*files.back());
  remove_objects(options_.url, *options_.replaced, is_index);
  const bool needs_index = options_.needs_index && options_.needs_index(last);
  if (last.empty() || (is_index(last) && needs_index && options_.replaced->contains(last))) {
    return true;
  }
  remove_objects(options_.url, *options_.replaced, std::not_fn(is_index));
  return false;
}

/// Removes the old objects that the new checkpoint lacks, except indexes, which are removed before.
void Spool::remove_old_objects_after(const std::vector<FilePointer>& files) const {
  remove_objects(options_.url, *options_.replaced, [&](const std::string& name) {
    return !(options_.is_index && options_.is_index(name)) &&
           std::ranges::none_of(files, [&](const auto& file) { return name_of(*file) == name; });
  });
}

void Spool::publish(const std::string& staging_path, const std::string& path) {
  std::vector<FilePointer> files = in_order_of_publication(staging_path);
  for (const FilePointer& file : files) upload(file, file->sync());
  workers_.wait();
  const bool replaces = options_.replaced && path == path_;
  if (replaces) require_replaced_unchanged();
  if (!options_.replaced && options_.resumes && path == path_) require_own_names(files);
  if (!options_.replaced && !options_.resumes) {
    claim();
    if (path == path_) require_no_objects_of_others();
  }
  const bool is_folder = !files.empty() && !name_of(*files.back()).empty();
  const bool is_index_last =
      is_folder && options_.is_index && options_.is_index(name_of(*files.back()));
  if (path == path_ && needs_mark(files)) mark();
  bool has_old_objects = false;
  if (replaces) {
    try {
      has_old_objects = remove_old_objects_before(files);
    } catch (const Error&) {
      take_back_mark();
      throw;
    }
  }
  const auto num_before_last = static_cast<std::int64_t>(files.empty() ? 0 : files.size() - 1);
  std::uint64_t max_nbytes = 0;
  for (const FilePointer& file : files) max_nbytes = std::max(max_nbytes, file->nbytes());
  const std::uint64_t part_nbytes = PartSizes::of_file(max_nbytes, options_.min_part_nbytes);
  parallel_for(num_before_last, UploadLimits::num_uploads(part_nbytes), {},
               [&](std::int64_t i) { publish_file(*files[static_cast<std::size_t>(i)]); });
  if (has_old_objects) remove_old_objects_after(files);
  // If readers find no checkpoint without the last file, the mark is removed before that file
  // appears; otherwise at the end. A single object may not have a folder of its name beside it.
  const bool needs_index = is_index_last && !may_be_whole_without_index(files);
  if (path == path_ && (needs_index || !is_folder)) remove_mark();
  if (path == path_ && is_folder) {
    require_no_objects_of_others(replaces && replaces_one_object(files) ? files.back()->url() : "");
  }
  if (!files.empty()) publish_file(*files.back());
  if (path == path_ && is_folder) require_no_objects_of_others();  // again, after the upload
  std::map<std::string, Begun> abandoned;  // the claim, and uploads of files that were removed
  {
    const std::scoped_lock lock(mutex_);
    for (const FilePointer& file : files) files_.erase(file->path());
    if (path == path_) abandoned.swap(begun_);
  }
  if (path == path_) remove_mark();
  for (const auto& [id, upload] : abandoned) uploads_.abort(upload.url, id);
  // Remove the unfinished uploads of files that the interrupted run had and this run does not have.
  if (path == path_ && options_.resumes) find_unfinished(options_.url, Unfinished::remove);
  forget(options_.url);
}

std::unique_ptr<ReadableFile> Spool::open(const std::string& path) const {
  return is_url(path) ? object_store::files().open(path) : ForwardingFileSystem::open(path);
}
std::unique_ptr<WritableFile> Spool::create(const std::string& path) {
  auto file = ForwardingFileSystem::create(path);
  if (!is_staged(path)) return file;
  file->close();
  return std::make_unique<File>(*this, spooled(path));
}
std::unique_ptr<WritableFile> Spool::open_for_update(const std::string& path) {
  auto file = ForwardingFileSystem::open_for_update(path);
  if (!is_staged(path)) return file;
  file->close();
  return std::make_unique<File>(*this, spooled(path));
}

void Spool::rename(const std::string& from, const std::string& to) {
  if (!is_staged(from) || is_staged(to)) return ForwardingFileSystem::rename(from, to);
  publish(from, to);
  ForwardingFileSystem::remove_all(from);
}

void Spool::remove_all(const std::string& path) {
  {
    const std::scoped_lock lock(mutex_);
    std::erase_if(files_, [&](const auto& entry) {
      return entry.first == path || entry.first.starts_with(path + "/");
    });
  }
  ForwardingFileSystem::remove_all(path);
}

}  // namespace tessera::object_store
