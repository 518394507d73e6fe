#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "object_store/server.h"

namespace tessera::object_store {

/// Single files on an ordinary web server, which cannot list folders.
class HttpServer final : public Server {
 public:
  std::optional<std::vector<Entry>> list(const std::string& url) override;
  /// From now on, requests for `url` ask for `<url>?<query>`. Replaces an earlier query for it.
  void keep_query(const std::string& url, const std::string& query);

 private:
  HttpRequest request_for(const std::string& url, const Query& query,
                          std::vector<std::string> headers) override;
  Error error_for(const std::string& url, const HttpResponse& response) override;

  std::map<std::string, std::string> queries_;  // key: URL; queries may be secrets
};

/// Models on Hugging Face's hub, each as a folder: `hf://OWNER/NAME[@REVISION]`, or
/// `https://huggingface.co/OWNER/NAME/resolve/REVISION`. A branch or tag is resolved to a commit
/// once, so that all reads are of the same commit. HF_ENDPOINT sets another hub. Private models
/// need a token, in HF_TOKEN or in the file `token` of HF_HOME (default: ~/.cache/huggingface).
class HubServer final : public Server {
 public:
  /// Whether the hub serves a URL.
  static bool serves(const std::string& url);

  std::optional<std::vector<Entry>> list(const std::string& url) override;
  /// Returns a server that knows the same commits, but asks again for that of `url`. This server
  /// keeps its commits, so that files that are open stay files of one commit.
  std::unique_ptr<HubServer> asking_again_for(const std::string& url);

 private:
  struct Place {
    std::string model;     // `OWNER/NAME`
    std::string revision;  // as the user gives it
    std::string path;      // in the model; empty for its root
  };

  static Place place_of(const std::string& url);
  std::string commit_of(const std::string& url, const Place& place);
  HttpRequest request_for(const std::string& url, const Query& query,
                          std::vector<std::string> headers) override;
  Error error_for(const std::string& url, const HttpResponse& response) override;
  /// Returns the commit, because every file of a commit keeps its bytes. The servers to which the
  /// hub redirects have ETags of their own.
  std::optional<std::string> own_etag(const std::string& url) override;
  bool sends_if_match() const override { return false; }  // a commit does not change

  std::map<std::string, std::string> commits_;  // key: `OWNER/NAME@REVISION`
};

}  // namespace tessera::object_store
