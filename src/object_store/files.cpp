#include "object_store/files.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/file_descriptor.h"
#include "base/named_object.h"
#include "object_store/remote_file_system.h"
#include "object_store/url.h"
#include "tessera/base/error.h"
#include "tessera/base/parallel.h"

namespace tessera::object_store {
namespace {

std::atomic<bool> has_opened_url = false;

RemoteFileSystem& remote_files() {
  return RemoteFileSystem::of_process();
}

/// Forwards reads of a URL to the servers, all else to the operating system. Refuses to write URLs.
class Files final : public FileSystem {
 public:
  std::optional<FileKind> kind_of(const std::string& path) const override {
    return of(path).kind_of(path);
  }
  std::unique_ptr<ReadableFile> open(const std::string& path) const override {
    if (is_url(path)) has_opened_url = true;
    return of(path).open(path);
  }
  std::vector<std::string> list_directory(const std::string& path) const override {
    return of(path).list_directory(path);
  }
  std::string resolve_links(const std::string& path) const override {
    return of(path).resolve_links(path);
  }

  std::unique_ptr<WritableFile> create(const std::string& path) override {
    return to_write(path).create(path);
  }
  std::unique_ptr<WritableFile> open_for_update(const std::string& path) override {
    return to_write(path).open_for_update(path);
  }
  void make_directory(const std::string& path) override { to_write(path).make_directory(path); }
  void rename(const std::string& from, const std::string& to) override {
    to_write(to);
    to_write(from).rename(from, to);
  }
  void exchange(const std::string& a, const std::string& b) override {
    to_write(b);
    to_write(a).exchange(a, b);
  }
  void remove_all(const std::string& path) override { to_write(path).remove_all(path); }
  void sync_directory(const std::string& path) override { to_write(path).sync_directory(path); }

 private:
  static FileSystem& of(const std::string& path) {
    if (is_url(path)) return remote_files();
    return posix();
  }
  static FileSystem& to_write(const std::string& path) {
    require_local(path);
    return posix();
  }
};

using Stat = int(const char* path, struct stat* status);

/// Returns what `stat_call` (stat or lstat) finds at a local path.
std::optional<NamedObject> find_local(const std::string& path, Stat& stat_call) {
  using Kind = NamedObject::Kind;
  struct stat status {};
  if (stat_call(path.c_str(), &status) != 0) {
    if (errno == ENOENT || errno == ENOTDIR) return std::nullopt;
    tessera::detail::throw_system_error(errno, path, "stat");
  }
  if (S_ISREG(status.st_mode)) {
    return NamedObject{Kind::file, static_cast<std::uint64_t>(status.st_size),
                       tessera::detail::state_in_words(status), status.st_ino};
  }
  const Kind kind = S_ISDIR(status.st_mode)   ? Kind::folder
                    : S_ISLNK(status.st_mode) ? Kind::link
                                              : Kind::other;
  return NamedObject{kind, 0, std::string(tessera::detail::kind_in_words(status.st_mode))};
}

}  // namespace

FileSystem& files() {
  static Files files;
  return files;
}

int default_num_threads() {
  const int num_threads = tessera::default_num_threads();
  return has_opened_url ? std::max(num_threads, kNumThreadsForUrls) : num_threads;
}

std::optional<NamedObject> find_name(const std::string& path) {
  return is_url(path) ? remote_files().find_name(path) : find_local(path, ::lstat);
}

std::optional<NamedObject> find_target(const std::string& path) {
  return is_url(path) ? remote_files().find_name(path) : find_local(path, ::stat);
}

void set_endpoint(const std::string& url) {
  remote_files().set_endpoint(url);
}

void set_bucket_endpoint(const std::string& path, const std::string& endpoint) {
  if (path.starts_with("s3://")) remote_files().set_bucket_endpoint(path, endpoint);
}

std::string keep_query(const std::string& argument) {
  const std::size_t equals = argument.find('=');
  const std::size_t slash = std::min(argument.find('/'), argument.size());
  const std::size_t begin = equals < slash ? equals + 1 : 0;  // `PREFIX=URL`
  const std::string url = argument.substr(begin);
  if (!url.starts_with("https://") && !url.starts_with("http://")) return argument;
  const std::size_t mark = url.find('?');
  if (mark == std::string::npos) return argument;
  remote_files().keep_query(url.substr(0, mark), url.substr(mark + 1));
  return argument.substr(0, begin + mark);
}

void forget(const std::string& path) {
  if (is_url(path)) remote_files().forget(path);
}

bool is_on_store(const std::string& path) {
  if (!is_url(path)) return false;
  if (!path.starts_with("s3://")) {
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "destination",
                          "a local path, or s3://BUCKET/PREFIX",
                          "a URL from which Tessera only reads",
                          "write to a local path, then upload it");
  }
  if (parse_url(without_trailing_slashes(path)).path.empty()) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = path}, "destination",
                          "s3://BUCKET/PREFIX", "a whole bucket");
  }
  return true;
}

void require_local(const std::string& path) {
  if (!is_url(path)) return;
  throw Error::expected(ErrorKind::unsupported, {.path = path}, "destination", "a local path",
                        "a URL", "work on a local path, then upload it");
}

}  // namespace tessera::object_store
