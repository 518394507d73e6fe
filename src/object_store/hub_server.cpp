// Hugging Face's hub: https://huggingface.co/docs/hub/api
#include <algorithm>
#include <cstdlib>
#include <utility>

#include "base/json.h"
#include "object_store/bucket_listing.h"
#include "object_store/credentials.h"
#include "object_store/http_server.h"
#include "object_store/url.h"
#include "tessera/base/file_system.h"

namespace tessera::object_store {
namespace {

constexpr std::uint64_t kMaxAnswerNbytes = std::uint64_t{64} << 20;
constexpr std::uint64_t kMaxTokenNbytes = 4096;
constexpr std::size_t kMaxHubPages = 1000;
constexpr const char* kHub = "https://huggingface.co";
constexpr const char* kApi = "tessera-api";  // marks an API request in a Query; never sent

std::string hub() {
  std::string origin = environment_of_process()("HF_ENDPOINT").value_or(kHub);
  while (origin.ends_with('/')) origin.pop_back();
  return origin;
}

std::string token() {
  const Environment environment = environment_of_process();
  if (auto found = environment("HF_TOKEN")) return *found;
  const auto home = environment("HF_HOME");
  const std::string folder =
      home ? *home : environment("HOME").value_or("") + "/.cache/huggingface";
  const auto text = read_begin(FileSystem::posix(), folder + "/token", kMaxTokenNbytes);
  return text ? text->substr(0, text->find_first_of("\r\n")) : "";
}

const std::string* text_in(const Value& object, std::string_view key) {
  const Value* found = object.find(key);
  return found == nullptr ? nullptr : found->get_if<std::string>();
}

/// Returns the URL in `Link: <https://…>; rel="next"`, also if it is written without blanks or
/// quotes; an empty text on the last page.
std::string next_page(const HttpResponse& response) {
  const std::string link = response.header("link");
  for (std::size_t begin = link.find('<'); begin != std::string::npos;) {
    const std::size_t end = std::min(link.find('>', begin), link.size());
    const std::size_t next = link.find('<', end);
    std::string parameters = link.substr(end, next == std::string::npos ? next : next - end);
    std::erase_if(parameters, [](char c) { return c == ' ' || c == '\t' || c == '"'; });
    if (parameters.find(";rel=next") != std::string::npos) {
      return link.substr(begin + 1, end - begin - 1);
    }
    begin = next;
  }
  return {};
}

/// Returns the ETag of all files of a commit.
std::string etag_of_commit(const std::string& commit) {
  return '"' + commit + '"';
}

Entry entry_of(const Value& item, std::size_t folder_nbytes, const std::string& commit,
               const std::string& url) {
  const std::string* type = text_in(item, "type");
  const std::string* path = text_in(item, "path");
  const Value* size = item.find("size");
  const auto* nbytes = size == nullptr ? nullptr : size->get_if<std::int64_t>();
  const bool is_folder = type != nullptr && *type == "directory";
  if (path == nullptr || path->size() <= folder_nbytes ||
      (!is_folder && (nbytes == nullptr || *nbytes < 0))) {
    throw Error::expected(ErrorKind::corruption, {.path = url}, "file list of the hub",
                          "a path and a size of each file", "an entry without them",
                          "is HF_ENDPOINT a Hugging Face hub?");
  }
  std::string name = path->substr(folder_nbytes);
  if (!is_entry_name(name)) {
    throw Error::expected(ErrorKind::corruption, {.path = url}, "file list of the hub",
                          "names of files in this folder", "'" + printable(name) + "'",
                          "is HF_ENDPOINT a Hugging Face hub?");
  }
  if (is_folder) return {.name = std::move(name), .is_folder = true};
  return {.name = std::move(name),
          .nbytes = static_cast<std::uint64_t>(*nbytes),
          .etag = etag_of_commit(commit)};
}

}  // namespace

bool HubServer::serves(const std::string& url) {
  if (url.starts_with("hf://")) return true;
  const std::string origin = hub() + "/";
  return url.starts_with(origin) && url.find("/resolve/", origin.size()) != std::string::npos;
}

HubServer::Place HubServer::place_of(const std::string& url) {
  const auto refuse = [&](std::string_view found) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = url}, "model",
                          "hf://OWNER/NAME[@REVISION][/PATH]", found);
  };
  Place place;
  std::string rest;
  if (url.starts_with("hf://")) {
    rest = url.substr(5);
    const std::size_t owner_end = rest.find('/');
    if (owner_end == std::string::npos) refuse("no name after the owner");
    const std::size_t end = std::min(rest.find('/', owner_end + 1), rest.size());
    place.model = rest.substr(0, end);
    place.path = rest.substr(std::min(end + 1, rest.size()));
    const std::size_t at = place.model.find('@');
    place.revision = at == std::string::npos ? "main" : place.model.substr(at + 1);
    place.model.resize(std::min(at, place.model.size()));
  } else {
    rest = url.substr(hub().size() + 1);
    const std::size_t resolve = rest.find("/resolve/");
    const std::size_t begin = resolve + 9;
    const std::size_t end = std::min(rest.find('/', begin), rest.size());
    place = {rest.substr(0, resolve), rest.substr(begin, end - begin),
             rest.substr(std::min(end + 1, rest.size()))};
    place.path = place.path.substr(0, place.path.find('?'));
  }
  if (place.model.ends_with('/') || place.revision.empty()) refuse("an empty part");
  return place;
}

std::unique_ptr<HubServer> HubServer::asking_again_for(const std::string& url) {
  auto server = std::make_unique<HubServer>();
  const Place place = place_of(url);
  const std::scoped_lock lock(memory_mutex());
  server->commits_ = commits_;
  server->commits_.erase(place.model + "@" + place.revision);
  return server;
}

std::optional<std::string> HubServer::own_etag(const std::string& url) {
  return etag_of_commit(commit_of(url, place_of(url)));
}

/// Returns the commit that a branch or a tag names. Asks the hub only once for each.
std::string HubServer::commit_of(const std::string& url, const Place& place) {
  const std::string key = place.model + "@" + place.revision;
  {
    const std::scoped_lock lock(memory_mutex());
    const auto found = commits_.find(key);
    if (found != commits_.end()) return found->second;
  }
  const auto [response, body] = ask(
      url, {{kApi, "/api/models/" + place.model + "/revision/" + percent_encode(place.revision)}},
      kMaxAnswerNbytes);
  if (!response.is_success()) throw error_for(url, response);
  const Value answer = parse_json(body, url);
  const std::string* commit = text_in(answer, "sha");
  if (commit == nullptr || commit->empty()) {
    throw Error::expected(ErrorKind::corruption, {.path = url}, "answer of the hub", "a commit",
                          "none");
  }
  const std::scoped_lock lock(memory_mutex());
  return commits_.emplace(key, *commit).first->second;
}

HttpRequest HubServer::request_for(const std::string& url, const Query& query,
                                   std::vector<std::string> headers) {
  std::string request_url;
  if (!query.empty()) {
    request_url = query.front().second;
    if (!request_url.starts_with("http")) request_url = hub() + request_url;
  } else {
    const Place place = place_of(url);
    request_url = hub() + "/" + place.model + "/resolve/" + percent_encode(commit_of(url, place)) +
                  "/" + percent_encode(place.path, "/");
  }
  const std::string secret = token();
  const bool is_to_hub = request_url.starts_with(hub() + "/");
  if (!secret.empty() && is_to_hub) headers.push_back("Authorization: Bearer " + secret);
  return {.url = std::move(request_url), .headers = std::move(headers), .follows_redirects = true};
}

std::optional<std::vector<Entry>> HubServer::list(const std::string& url) {
  const Place place = place_of(url);
  std::string folder = place.path;
  while (folder.ends_with('/')) folder.pop_back();
  const std::string commit = commit_of(url, place);
  std::string page_url = hub() + "/api/models/" + place.model + "/tree/" + percent_encode(commit) +
                         (folder.empty() ? "" : "/" + percent_encode(folder, "/"));
  const std::size_t folder_nbytes = folder.empty() ? 0 : folder.size() + 1;
  std::vector<Entry> entries;
  for (std::size_t page = 0; !page_url.empty(); ++page) {
    if (page == kMaxHubPages) {
      throw Error::expected(ErrorKind::unsupported, {.path = url}, "list of the hub",
                            "at most " + std::to_string(kMaxHubPages) + " pages", "more");
    }
    const auto [response, body] = ask(url, {{kApi, page_url}}, kMaxAnswerNbytes);
    if (response.status == 404 && page == 0) return entries;
    if (response.status == 404) throw error_for(url, response);
    const Value answer = parse_json(body, url);
    const auto* items = answer.get_if<Value::List>();
    if (items == nullptr) {
      throw Error::expected(ErrorKind::corruption, {.path = url}, "list of the hub", "a list",
                            "another JSON value");
    }
    for (const Value& item : *items) entries.push_back(entry_of(item, folder_nbytes, commit, url));
    page_url = next_page(response);
  }
  std::ranges::sort(entries, {}, &Entry::name);
  return entries;
}

Error HubServer::error_for(const std::string& url, const HttpResponse& response) {
  if (response.status != 401 && response.status != 403 && response.status != 404) {
    return plain_error(url, response);
  }
  const bool is_missing = response.status == 404;
  return Error::expected(is_missing ? ErrorKind::not_found : ErrorKind::io, {.path = url}, "model",
                         "a model that can be read", response.failure_in_words(),
                         token().empty()
                             ? "check the name; for a private or gated model, set HF_TOKEN"
                             : "check the name; does the token (HF_TOKEN) give access to it?");
}

}  // namespace tessera::object_store
