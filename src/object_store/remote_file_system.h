#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/read_only_file_system.h"
#include "object_store/named_object.h"
#include "object_store/server.h"

namespace tessera::object_store {

class HttpServer;
class HubServer;
class S3Server;

/// The files at URLs, as a read-only file system without links. Lists each folder once. Keeps sizes
/// and versions until `forget` is called, so that all reads of a file are of one version.
/// Thread-safe.
class RemoteFileSystem final : public ReadOnlyFileSystem {
 public:
  /// Returns the file system that all code shares. It lives as long as the process.
  static RemoteFileSystem& of_process();
  RemoteFileSystem();
  ~RemoteFileSystem() override;

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override;
  std::optional<NamedObject> find_name(const std::string& path) const;  // as in files.h

  /// Returns the server for a URL `s3://…`. It lives as long as this object.
  S3Server& s3(const std::string& url) const;
  /// Sets the server for `s3://` URLs to `url`, such as `http://localhost:9000`. Overrides the
  /// user's AWS settings. Buckets with a server of their own (set_bucket_endpoint) keep it.
  void set_endpoint(const std::string& url);
  /// Sets the server for the bucket of a URL `s3://BUCKET/…`. Other buckets keep theirs. Forgets
  /// what is known about the bucket if its server changes. Throws: Error(invalid_argument) if
  /// `endpoint` is not a URL.
  void set_bucket_endpoint(const std::string& url, const std::string& endpoint);
  /// Adds `query`, which may be a secret, to all later requests for a URL of a web server.
  void keep_query(const std::string& url, const std::string& query);
  /// Forgets what is known about a path, the paths below it, the folder that contains it, and the
  /// other entries of this folder. Makes new servers, which read the user's settings again.
  void forget(const std::string& path);

 private:
  using Folder = std::shared_ptr<const std::vector<Entry>>;
  /// What is known about a path: it is a folder, an object, or neither.
  struct Known {
    std::optional<FoundObject> object{};
    bool is_folder = false;
  };

  static std::mutex& mutex_of_process() { return of_process().mutex_; }
  Server& server_of(const std::string& url) const;
  Folder known_folder(const std::string& url) const;
  Folder folder(const std::string& url) const;
  std::optional<FoundObject> object(const std::string& url) const;
  Known look_at(const std::string& url) const;
  std::optional<Known> look_in_parent(const std::string& url) const;
  void retire_s3_servers();

  mutable std::mutex mutex_;
  std::string endpoint_;                          // of buckets without an entry in endpoints_
  std::map<std::string, std::string> endpoints_;  // by bucket
  // By endpoint. Made at the first use, because that reads the user's settings.
  mutable std::map<std::string, std::unique_ptr<S3Server>> s3_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<HubServer> hub_;
  mutable std::map<std::string, Folder> folders_;  // empty list: no such folder
  mutable std::map<std::string, std::optional<FoundObject>> objects_;
  // How often something was forgotten. An answer is not kept if this changed after its request was
  // sent: the server may have answered before the change that `forget` was called for.
  std::atomic<std::uint64_t> num_forgets_ = 0;
  mutable std::vector<std::unique_ptr<Server>> old_servers_;  // open files may use them
};

}  // namespace tessera::object_store
