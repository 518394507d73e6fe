#include "object_store/http_server.h"

#include "object_store/url.h"

namespace tessera::object_store {

std::optional<std::vector<Entry>> HttpServer::list(const std::string& /*url*/) {
  return std::nullopt;
}

void HttpServer::keep_query(const std::string& url, const std::string& query) {
  const std::scoped_lock lock(memory_mutex());
  queries_[url] = query;
}

HttpRequest HttpServer::request_for(const std::string& url, const Query& /*query*/,
                                    std::vector<std::string> headers) {
  const std::scoped_lock lock(memory_mutex());
  const auto query = queries_.find(url);
  return {.url = query == queries_.end() ? url : url + "?" + query->second,
          .headers = std::move(headers),
          .follows_redirects = true};
}

Error HttpServer::error_for(const std::string& url, const HttpResponse& response) {
  return plain_error(url, response);
}

}  // namespace tessera::object_store
