#include "object_store/server.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/lock_while_forking.h"
#include "base/text_parts.h"
#include "object_store/curl_library.h"
#include "object_store/retries.h"
#include "object_store/url.h"

namespace tessera::object_store {
namespace {

/// The first request for an object also reads this many bytes, which are enough for the header of
/// most files.
constexpr std::uint64_t kBeginNbytes = std::uint64_t{64} << 10;

/// The header `Content-Range: bytes <begin>-<end - 1>/<total>`.
struct ContentRange {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t total = 0;
};

std::optional<std::uint64_t> take_number(std::string_view& text) {
  std::uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc()) return std::nullopt;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

std::optional<ContentRange> parse_content_range(std::string_view text) {
  if (!tessera::detail::take_prefix(text, "bytes ")) return std::nullopt;
  if (tessera::detail::take_prefix(text, "*/")) {
    const auto total = take_number(text);
    return total ? std::optional(ContentRange{0, 0, *total}) : std::nullopt;
  }
  const auto first = take_number(text);
  if (!first || !tessera::detail::take_prefix(text, "-")) return std::nullopt;
  const auto last = take_number(text);
  if (!last || *last < *first || !tessera::detail::take_prefix(text, "/")) return std::nullopt;
  const auto total = take_number(text);
  if (!total || *last >= *total) return std::nullopt;
  return ContentRange{*first, *last + 1, *total};
}

std::string range_header(std::uint64_t begin, std::uint64_t end) {
  return "Range: bytes=" + std::to_string(begin) + "-" + std::to_string(end - 1);
}

/// Returns an ETag with quotes: some servers leave them out in lists, and send them in headers.
std::string quoted(const std::string& etag) {
  if (etag.empty() || etag.starts_with('"') || etag.starts_with("W/")) return etag;
  return '"' + etag + '"';
}

ObjectVersion version_in(const HttpResponse& response, std::uint64_t nbytes) {
  ObjectVersion version{.nbytes = nbytes, .etag = response.header("etag")};
  if (version.etag.empty()) version.last_modified = response.header("last-modified");
  return version;
}

std::optional<std::uint64_t> content_length(const HttpResponse& response) {
  const std::string length = response.header("content-length");
  std::string_view text = length;
  return take_number(text);
}

HttpResponse cut_short(HttpResponse response) {
  response.curl_code = curl::kPartialFile;
  response.curl_message = "the body ended early";
  return response;
}

}  // namespace

std::string ObjectVersion::in_words() const {
  std::string words = std::to_string(nbytes) + " bytes";
  if (!etag.empty()) words += ", ETag " + printable(etag);
  if (!last_modified.empty()) words += ", changed at " + printable(last_modified);
  return words;
}

Error plain_error(const std::string& url, const HttpResponse& response) {
  const bool is_missing = response.status == 404 || response.status == 410;
  return Error::expected(is_missing ? ErrorKind::not_found : ErrorKind::io, {.path = url},
                         "request", "an answer with the bytes", response.failure_in_words());
}

/// One read of a range. It may need several requests, if connections break.
class Server::RangeRead {
 public:
  RangeRead(Server& server, const std::string& url, const ObjectVersion& version,
            std::uint64_t offset, std::span<std::byte> out)
      : server_(server), url_(url), version_(version), offset_(offset), out_(out) {}

  void run() {
    int num_lessons = 0;
    while (nbytes_done_ < out_.size()) {
      const std::size_t before = nbytes_done_;
      HttpResponse response = attempt();
      if (nbytes_done_ == out_.size() && !is_other_version_) return;
      if (is_other_version_ || response.status == 412 || response.status == 416) refuse_change();
      if (ignores_ranges_) refuse_whole_body(response);
      if (nbytes_done_ > before) retries_.note_progress();
      if (num_lessons++ < kMaxLessons && server_.learns_from(url_, response)) continue;
      if (response.is_success() && response.curl_code == curl::kOk) {
        response = cut_short(std::move(response));
      }
      if (!retries_.wait_after(response)) throw server_.error_for(url_, response);
    }
  }

 private:
  HttpResponse attempt() {
    const std::uint64_t begin = offset_ + nbytes_done_;
    std::vector<std::string> headers{range_header(begin, offset_ + out_.size())};
    const bool has_strong_etag = version_.etag.starts_with('"');
    if (has_strong_etag && server_.sends_if_match())
      headers.push_back("If-Match: " + version_.etag);
    return perform(server_.request_for(url_, {}, std::move(headers)),
                   [&](const HttpResponse& response) { return begin_body(response, begin); });
  }

  TakeBytes begin_body(const HttpResponse& response, std::uint64_t begin) {
    const TakeBytes refuse = [](std::span<const std::byte>) { return false; };
    if (response.status == 206) {
      const auto range = parse_content_range(response.header("content-range"));
      if (!range || range->begin != begin) return ignores_ranges_ = true, refuse;
      if (range->total != version_.nbytes) return is_other_version_ = true, refuse;
    } else if (begin != 0 || out_.size() != version_.nbytes) {
      return ignores_ranges_ = true, refuse;
    } else if (const auto nbytes = content_length(response); nbytes && nbytes != version_.nbytes) {
      return is_other_version_ = true, refuse;
    }
    const ObjectVersion found = version_in(response, version_.nbytes);
    const bool is_known = !version_.etag.empty() || !version_.last_modified.empty();
    const bool has_strong_etag = quoted(version_.etag).starts_with('"');
    // An answer without an ETag may have any bytes, if the file had one when it was opened.
    if (server_.sends_if_match() && is_known && (has_strong_etag || !found.etag.empty()) &&
        quoted(found.etag) != quoted(version_.etag)) {
      return is_other_version_ = true, refuse;
    }
    if (!version_.last_modified.empty() && found.last_modified != version_.last_modified) {
      return is_other_version_ = true, refuse;
    }
    return [this, is_whole_file = response.status != 206](std::span<const std::byte> bytes) {
      const std::size_t nbytes = std::min(bytes.size(), out_.size() - nbytes_done_);
      std::memcpy(out_.data() + nbytes_done_, bytes.data(), nbytes);
      nbytes_done_ += nbytes;
      if (nbytes == bytes.size()) return true;
      if (is_whole_file) is_other_version_ = true;  // the file had fewer bytes
      return false;
    };
  }

  [[noreturn]] void refuse_change() const {
    const auto now = server_.find(url_);
    throw Error::expected(ErrorKind::mismatch, {.path = url_}, "object",
                          "the version that was opened: " + version_.in_words(),
                          now ? now->version.in_words() : "none",
                          "did another program write it? read a checkpoint that is complete");
  }

  [[noreturn]] void refuse_whole_body(const HttpResponse& response) const {
    throw Error::expected(ErrorKind::unsupported, {.path = url_}, "range of bytes",
                          range_header(offset_ + nbytes_done_, offset_ + out_.size()),
                          "status " + std::to_string(response.status) + " with other bytes",
                          "the server does not send ranges; download the file");
  }

  Server& server_;
  const std::string& url_;
  const ObjectVersion& version_;
  std::uint64_t offset_;
  std::span<std::byte> out_;
  std::size_t nbytes_done_ = 0;
  bool is_other_version_ = false;
  bool ignores_ranges_ = false;
  Retries retries_{RetryPolicy::of_process()};
};

void Server::read(const std::string& url, const ObjectVersion& version, std::uint64_t offset,
                  std::span<std::byte> out) {
  RangeRead(*this, url, version, offset, out).run();
}

std::mutex& Server::memory_mutex() {
  static std::mutex& mutex = []() -> std::mutex& {
    tessera::detail::lock_while_forking<memory_mutex>();
    return *new std::mutex;  // never destroyed: threads may use it until the end
  }();
  return mutex;
}

bool Server::is_missing(const std::string& url, const HttpResponse& response) const {
  if (response.status == 404 || response.status == 410) return true;
  if (response.status != 403 || parse_s3_error(response.error_body).code != "AccessDenied") {
    return false;
  }
  const std::scoped_lock lock(memory_mutex());
  return hosts_with_objects_.contains(parse_url(url).host);
}

std::optional<FoundObject> Server::find(const std::string& url) {
  Retries retries(RetryPolicy::of_process());
  std::vector<std::string> headers{range_header(0, kBeginNbytes)};
  const auto version_of = [&](const HttpResponse& response, std::uint64_t nbytes) {
    auto own = own_etag(url);
    return own ? ObjectVersion{.nbytes = nbytes, .etag = *std::move(own)}
               : version_in(response, nbytes);
  };
  for (int num_lessons = 0;;) {
    FoundObject found;
    bool is_cut_off = false;
    const HttpResponse response =
        perform(request_for(url, {}, headers), [&](const auto&) -> TakeBytes {
          return [&](std::span<const std::byte> bytes) {
            // A server that ignores the range sends the whole file. End the transfer here.
            is_cut_off = found.begin.size() + bytes.size() > kBeginNbytes;
            if (is_cut_off) return false;
            found.begin.insert(found.begin.end(), bytes.begin(), bytes.end());
            return true;
          };
        });
    if (num_lessons++ < kMaxLessons && learns_from(url, response)) continue;
    if (is_missing(url, response)) return std::nullopt;
    const auto range = parse_content_range(response.header("content-range"));
    if (response.status == 416 && !headers.empty()) {
      headers.clear();  // an empty object has no first byte, and this answer no ETag
      continue;
    }
    if (response.status == 416) {
      found.version = version_of(response, range ? range->total : 0);
      return found;
    }
    std::optional<std::uint64_t> nbytes;
    if (response.status == 206 && range && range->begin == 0) nbytes = range->total;
    if (response.status == 200) {
      nbytes = content_length(response);
      if (!nbytes && response.curl_code == curl::kOk) nbytes = found.begin.size();
    }
    if (nbytes) {
      {
        const std::scoped_lock lock(memory_mutex());
        hosts_with_objects_.insert(parse_url(url).host);
      }
      found.version = version_of(response, *nbytes);
      if (found.begin.size() > *nbytes) found.begin.clear();
      return found;
    }
    // Sizes are needed before bytes are read, so a repeated request would not help.
    if (response.is_success() && (response.status == 206 || is_cut_off)) {
      throw Error::expected(
          ErrorKind::unsupported, {.path = url}, "size of the file",
          "the header Content-Range or Content-Length",
          response.status == 206
              ? "Content-Range '" + printable(response.header("content-range")) + "'"
              : "status 200 without either",
          "the server does not send ranges; download the file");
    }
    if (!retries.wait_after(response)) throw error_for(url, response);
  }
}

std::pair<HttpResponse, std::string> Server::ask(const std::string& url, const Query& query,
                                                 std::uint64_t max_nbytes,
                                                 const std::vector<std::string>& headers) {
  Retries retries(RetryPolicy::of_process());
  for (int num_lessons = 0;;) {
    std::string body;
    bool is_too_large = false;
    HttpResponse response =
        perform(request_for(url, query, headers), [&](const auto&) -> TakeBytes {
          return [&](std::span<const std::byte> bytes) {
            is_too_large = body.size() + bytes.size() > max_nbytes;
            if (is_too_large) return false;
            body.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
            return true;
          };
        });
    if (is_too_large) {
      throw Error::expected(ErrorKind::corruption, {.path = url}, "list",
                            "at most " + std::to_string(max_nbytes) + " bytes", "more");
    }
    if (num_lessons++ < kMaxLessons && learns_from(url, response)) continue;
    if (response.curl_code == curl::kOk && (response.is_success() || response.status == 404)) {
      return {std::move(response), std::move(body)};
    }
    if (!retries.wait_after(response)) throw error_for(url, response);
  }
}

}  // namespace tessera::object_store
