#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "object_store/credentials.h"
#include "object_store/server.h"

namespace tessera::object_store {

/// Amazon S3, and servers with its interface: MinIO, R2, Google Cloud Storage, Ceph.
class S3Server final : public Server {
 public:
  explicit S3Server(S3Settings settings) : settings_(std::move(settings)) {}

  std::optional<std::vector<Entry>> list(const std::string& url) override;

 private:
  struct Address {
    std::string origin;  // `https://bucket.s3.eu-central-1.amazonaws.com`
    std::string path;    // encoded, begins with a slash
  };

  HttpRequest request_for(const std::string& url, const Query& query,
                          std::vector<std::string> headers) override;
  bool learns_from(const std::string& url, const HttpResponse& response) override;
  Error error_for(const std::string& url, const HttpResponse& response) override;

  Address address_of(const std::string& bucket, const std::string& key,
                     const std::string& region) const;
  std::string region_of(const std::string& bucket) const;

  S3Settings settings_;
  mutable std::mutex mutex_;
  std::map<std::string, std::string> regions_;  // that servers have told, by bucket
};

/// Returns the error for an answer of S3, with what the user can do.
Error s3_error(const std::string& url, const HttpResponse& response, const S3Settings& settings,
               const std::string& region);

}  // namespace tessera::object_store
