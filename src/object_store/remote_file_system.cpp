#include "object_store/remote_file_system.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "base/lock_while_forking.h"
#include "object_store/http_server.h"
#include "object_store/remote_file.h"
#include "object_store/s3_server.h"
#include "object_store/url.h"

namespace tessera::object_store {
namespace {

/// Whether a URL ends like a file name (`.json`). It is then more likely an object than a folder.
bool looks_like_file(const std::string& url) {
  constexpr std::size_t kMaxSuffixNbytes = 12;
  const std::string name = last_component(url);
  const std::string suffix = name.substr(std::min(name.rfind('.'), name.size() - 1) + 1);
  const auto is_alnum = [](unsigned char c) { return std::isalnum(c) != 0; };
  const auto is_letter = [](unsigned char c) { return std::isalpha(c) != 0; };
  return suffix.size() < name.size() && !suffix.empty() && suffix.size() <= kMaxSuffixNbytes &&
         std::ranges::all_of(suffix, is_alnum) && std::ranges::any_of(suffix, is_letter);
}

/// Returns the URL that a path names. Throws: Error(invalid_argument) for a web URL with a user
/// name or a password, which later messages would show.
std::string url_of_path(const std::string& path) {
  if (path.starts_with("http://") || path.starts_with("https://")) parse_url(path);
  return without_trailing_slashes(path);
}

bool is_root(const std::string& url) {
  return url.find('/', url.find("://") + 3) == std::string::npos;
}

const Entry* entry_in(const std::vector<Entry>& entries, const std::string& name) {
  const auto found = std::ranges::lower_bound(entries, name, {}, &Entry::name);
  return found == entries.end() || found->name != name ? nullptr : &*found;
}

void require_endpoint(const std::string& endpoint) {
  if (endpoint.starts_with("http://") || endpoint.starts_with("https://")) return;
  throw Error::expected(ErrorKind::invalid_argument, {}, "endpoint of S3",
                        "a URL such as http://localhost:9000", "'" + printable(endpoint) + "'");
}

Error missing(const std::string& path, std::string_view expected, std::string_view found) {
  return Error::expected(ErrorKind::not_found, {.path = path}, "open", expected, found);
}

}  // namespace

RemoteFileSystem::RemoteFileSystem()
    : http_(std::make_unique<HttpServer>()), hub_(std::make_unique<HubServer>()) {}
RemoteFileSystem::~RemoteFileSystem() = default;

RemoteFileSystem& RemoteFileSystem::of_process() {
  static auto& files = []() -> RemoteFileSystem& {
    // The servers' mutex is registered first, so that a fork locks it second, as `forget` does.
    Server::memory_mutex();
    tessera::detail::lock_while_forking<mutex_of_process>();
    return *new RemoteFileSystem;  // not destroyed: background requests use it
  }();
  return files;
}

Server& RemoteFileSystem::server_of(const std::string& url) const {
  if (url.starts_with("s3://")) return s3(url);
  if (!HubServer::serves(url)) return *http_;
  const std::scoped_lock lock(mutex_);
  return *hub_;
}

S3Server& RemoteFileSystem::s3(const std::string& url) const {
  const std::string bucket = parse_url(url).host;
  std::string endpoint;
  {
    const std::scoped_lock lock(mutex_);
    const auto own = endpoints_.find(bucket);
    endpoint = own == endpoints_.end() ? endpoint_ : own->second;
    const auto known = s3_.find(endpoint);
    if (known != s3_.end()) return *known->second;
  }
  S3Settings settings = read_s3_settings(environment_of_process());
  if (!endpoint.empty()) settings.endpoint = endpoint;
  if (!settings.endpoint.empty()) require_endpoint(settings.endpoint);
  auto made = std::make_unique<S3Server>(std::move(settings));
  const std::scoped_lock lock(mutex_);
  std::unique_ptr<S3Server>& server = s3_[endpoint];
  if (!server) server = std::move(made);  // else another thread was first
  return *server;
}

void RemoteFileSystem::set_endpoint(const std::string& url) {
  const std::scoped_lock lock(mutex_);
  endpoint_ = url;
  retire_s3_servers();
}

void RemoteFileSystem::set_bucket_endpoint(const std::string& url, const std::string& endpoint) {
  require_endpoint(endpoint);
  const std::string bucket = parse_url(url).host;
  const std::scoped_lock lock(mutex_);
  if (std::exchange(endpoints_[bucket], endpoint) == endpoint) return;
  const auto is_in_bucket = [&](const auto& known) {
    return known.first.starts_with("s3://") && parse_url(known.first).host == bucket;
  };
  std::erase_if(folders_, is_in_bucket);
  std::erase_if(objects_, is_in_bucket);
  ++num_forgets_;
}

/// Makes the next use of S3 read the user's settings again. Requires: the caller holds `mutex_`.
void RemoteFileSystem::retire_s3_servers() {
  for (auto& [endpoint, server] : s3_) old_servers_.push_back(std::move(server));
  s3_.clear();
}

void RemoteFileSystem::keep_query(const std::string& url, const std::string& query) {
  http_->keep_query(url, query);
}

void RemoteFileSystem::forget(const std::string& path) {
  const std::string url = without_trailing_slashes(path);
  const std::scoped_lock lock(mutex_);
  const std::string parent = directory_of(url);
  const auto is_forgotten = [&](const auto& known) {
    const std::string& known_url = known.first;
    return known_url == url || known_url == parent || known_url.starts_with(url + "/") ||
           directory_of(known_url) == parent;
  };
  std::erase_if(folders_, is_forgotten);
  std::erase_if(objects_, is_forgotten);
  ++num_forgets_;
  // Make new servers: the user's keys may have changed, or a branch may name another commit.
  retire_s3_servers();
  if (HubServer::serves(url)) {
    old_servers_.push_back(std::exchange(hub_, hub_->asking_again_for(url)));
  }
}

RemoteFileSystem::Folder RemoteFileSystem::known_folder(const std::string& url) const {
  const std::scoped_lock lock(mutex_);
  const auto found = folders_.find(url);
  return found == folders_.end() ? nullptr : found->second;
}

/// Returns the entries of a folder. Asks the server if they are not known yet. If the server cannot
/// list folders, returns the objects in the folder that were found before.
RemoteFileSystem::Folder RemoteFileSystem::folder(const std::string& url) const {
  if (Folder known = known_folder(url)) return known;
  const std::uint64_t num_forgets = num_forgets_;
  auto entries = server_of(url).list(url);
  const std::scoped_lock lock(mutex_);
  if (!entries) {
    entries.emplace();
    for (const auto& [path, found] : objects_) {
      if (!found || directory_of(path) != url) continue;
      entries->push_back({last_component(path), false, found->version.nbytes, found->version.etag});
    }
    std::ranges::sort(*entries, {}, &Entry::name);
    return std::make_shared<const std::vector<Entry>>(*std::move(entries));
  }
  auto listed = std::make_shared<const std::vector<Entry>>(*std::move(entries));
  if (num_forgets_ != num_forgets) return listed;
  return folders_.emplace(url, std::move(listed)).first->second;
}

std::optional<FoundObject> RemoteFileSystem::object(const std::string& url) const {
  {
    const std::scoped_lock lock(mutex_);
    const auto known = objects_.find(url);
    if (known != objects_.end()) return known->second;
  }
  const std::uint64_t num_forgets = num_forgets_;
  auto found = server_of(url).find(url);
  const std::scoped_lock lock(mutex_);
  if (num_forgets_ != num_forgets) return found;
  return objects_.emplace(url, std::move(found)).first->second;
}

/// Returns what the list of the parent folder says about a URL; nothing if the parent has not been
/// listed.
std::optional<RemoteFileSystem::Known> RemoteFileSystem::look_in_parent(
    const std::string& url) const {
  const Folder parent = known_folder(directory_of(url));
  if (!parent) return std::nullopt;
  const Entry* entry = entry_in(*parent, last_component(url));
  if (entry == nullptr) return Known{};
  if (entry->is_folder) return Known{.is_folder = true};
  return Known{.object = FoundObject{{.nbytes = entry->nbytes, .etag = entry->etag}}};
}

RemoteFileSystem::Known RemoteFileSystem::look_at(const std::string& url) const {
  if (const Folder known = known_folder(url); known && !known->empty()) return {.is_folder = true};
  if (auto known = look_in_parent(url)) return *std::move(known);
  if (url.starts_with("http") && !HubServer::serves(url)) return {.object = object(url)};
  if (is_root(url)) return {.is_folder = folder(url) != nullptr};
  const bool is_file_first = looks_like_file(url);
  if (is_file_first) {
    if (auto found = object(url)) return {.object = std::move(found)};
  }
  if (!folder(url)->empty()) return {.is_folder = true};
  return is_file_first ? Known{} : Known{.object = object(url)};
}

std::optional<FileKind> RemoteFileSystem::kind_of(const std::string& path) const {
  const std::string url = url_of_path(path);
  if (path.ends_with('/') && url.starts_with("http") && !HubServer::serves(url)) {
    throw Error::expected(ErrorKind::unsupported, {.path = path}, "source", "the URL of one file",
                          "a folder", "an ordinary web server cannot list a folder");
  }
  const Known known = look_at(url);
  if (known.is_folder) return FileKind::directory;
  return known.object ? std::optional(FileKind::regular) : std::nullopt;
}

std::unique_ptr<ReadableFile> RemoteFileSystem::open(const std::string& path) const {
  const std::string url = url_of_path(path);
  Known known = look_at(url);
  if (known.is_folder) throw missing(path, "a regular file", "a directory");
  if (!known.object) throw missing(path, "a file", "none");
  return std::make_unique<RemoteFile>(server_of(url), url, known.object->version,
                                      std::move(known.object->begin));
}

std::vector<std::string> RemoteFileSystem::list_directory(const std::string& path) const {
  const std::string url = url_of_path(path);
  const Folder entries = folder(url);
  if (entries->empty() && !is_root(url)) {
    const auto known =
        look_in_parent(url);  // there may be only a placeholder object, a key `<url>/`
    if (!known || !known->is_folder) throw missing(path, "a directory", "none");
  }
  std::vector<std::string> names;
  for (const Entry& entry : *entries) names.push_back(entry.name);
  return names;
}

std::string RemoteFileSystem::resolve_links(const std::string& path) const {
  if (!kind_of(path)) throw missing(path, "an object", "none");
  return url_of_path(path);
}

std::optional<NamedObject> RemoteFileSystem::find_name(const std::string& path) const {
  const Known known = look_at(url_of_path(path));
  if (known.is_folder) return NamedObject{NamedObject::Kind::folder, 0, "a directory"};
  if (!known.object) return std::nullopt;
  const ObjectVersion& version = known.object->version;
  return NamedObject{NamedObject::Kind::file, version.nbytes, version.in_words()};
}

}  // namespace tessera::object_store
