#pragma once

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
class S3Server;

/// The files behind URLs. A folder is listed once; sizes and versions are kept until `forget`, so
/// that all reads of a file are of one version. Thread-safe. Nothing on a server is a link.
class RemoteFileSystem final : public ReadOnlyFileSystem {
 public:
  /// Returns the files of the process. They live as long as it.
  static RemoteFileSystem& of_process();
  RemoteFileSystem();
  ~RemoteFileSystem() override;

  std::optional<FileKind> kind_of(const std::string& path) const override;
  std::unique_ptr<ReadableFile> open(const std::string& path) const override;
  std::vector<std::string> list_directory(const std::string& path) const override;
  std::string resolve_links(const std::string& path) const override;
  std::optional<NamedObject> find_name(const std::string& path) const;

  /// Returns the server of a URL `s3://…`. It lives as long as this.
  S3Server& s3(const std::string& url) const;
  /// Names another S3 than the environment does, such as `http://localhost:9000`.
  void set_endpoint(const std::string& url);
  /// Names the S3 of the bucket in a URL `s3://…`. Other buckets keep theirs. Forgets what is known
  /// of a bucket that moves. Throws: Error(invalid_argument) if the endpoint is no URL.
  void set_bucket_endpoint(const std::string& url, const std::string& endpoint);
  /// Adds a query, which may be a secret, to requests for a URL of a web server.
  void keep_query(const std::string& url, const std::string& query);
  /// Forgets what is known of a path, of all below it and of what is beside it.
  void forget(const std::string& path);

 private:
  using Folder = std::shared_ptr<const std::vector<Entry>>;
  /// A path: a folder, an object, or neither.
  struct Known {
    std::optional<FoundObject> object{};
    bool is_folder = false;
  };

  Server& server_of(const std::string& url) const;
  Folder known_folder(const std::string& url) const;
  Folder folder(const std::string& url) const;
  std::optional<FoundObject> object(const std::string& url) const;
  Known look_at(const std::string& url) const;
  std::optional<Known> look_in_parent(const std::string& url) const;
  void retire_s3_servers();

  mutable std::mutex mutex_;
  std::string endpoint_;                          // of buckets that have none of their own
  std::map<std::string, std::string> endpoints_;  // by bucket
  // By endpoint. Made at the first use: reads the user's settings.
  mutable std::map<std::string, std::unique_ptr<S3Server>> s3_;
  std::unique_ptr<HttpServer> http_;
  std::unique_ptr<Server> hub_;
  mutable std::map<std::string, Folder> folders_;  // also empty ones, which do not exist
  mutable std::map<std::string, std::optional<FoundObject>> objects_;
  mutable std::vector<std::unique_ptr<Server>> old_servers_;  // open files may use them
};

}  // namespace tessera::object_store
