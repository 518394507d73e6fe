#include "object_store/s3_server.h"

#include <algorithm>
#include <ctime>
#include <utility>

#include "base/digest.h"
#include "object_store/retries.h"
#include "object_store/sigv4.h"
#include "object_store/url.h"

namespace tessera::object_store {
namespace {

constexpr std::uint64_t kMaxPageNbytes = std::uint64_t{16} << 20;
constexpr std::size_t kMaxEntries = 2'000'000;
constexpr std::size_t kMaxListPages = 20'000;  // of a list; S3's have up to 1000 entries
/// An answer to a request that was signed with the old keys comes at most this long after new ones
/// were read.
constexpr std::chrono::minutes kRenewalTime{5};
constexpr const char* kDefaultRegion = "us-east-1";
constexpr std::string_view kPermissionToRead = "to list and read (s3:ListBucket, s3:GetObject)";
/// The signature has this text in place of the body's SHA-256. HTTPS and a checksum protect the
/// body.
constexpr std::string_view kUnsignedBody = "UNSIGNED-PAYLOAD";

/// Returns a host without the port that its scheme implies: HTTP clients leave it out of the header
/// Host, which is signed.
std::string without_default_port(const Url& url) {
  const std::string_view port = url.scheme == "https" ? ":443" : ":80";
  if (!url.host.ends_with(port)) return url.host;
  return url.host.substr(0, url.host.size() - port.size());
}

/// Whether a bucket's name can be the first part of a host name (`BUCKET.s3.amazonaws.com`) with a
/// valid certificate.
bool is_host_label(const std::string& bucket) {
  return std::ranges::all_of(
      bucket, [](char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-'; });
}

std::string without_scheme(const std::string& origin) {
  return origin.substr(origin.find("://") + 3);
}

}  // namespace

std::string S3Server::region_of(const std::string& bucket) const {
  const std::scoped_lock lock(memory_mutex());
  const auto told = regions_.find(bucket);
  if (told != regions_.end()) return told->second;
  return settings_.region.empty() ? kDefaultRegion : settings_.region;
}

S3Server::Address S3Server::address_of(const std::string& bucket, const std::string& key,
                                       const std::string& region) const {
  const std::string key_path = "/" + percent_encode(key, "/");
  if (!settings_.endpoint.empty()) {
    const Url endpoint = parse_url(settings_.endpoint);
    std::string base = endpoint.path.empty() ? "" : "/" + endpoint.path;
    while (base.ends_with('/')) base.pop_back();
    return {endpoint.scheme + "://" + without_default_port(endpoint),
            base + "/" + percent_encode(bucket) + (key.empty() ? "" : key_path)};
  }
  const std::string domain =
      "s3." + region + (region.starts_with("cn-") ? ".amazonaws.com.cn" : ".amazonaws.com");
  if (is_host_label(bucket)) return {"https://" + bucket + "." + domain, key_path};
  return {"https://" + domain, "/" + percent_encode(bucket) + key_path};
}

HttpRequest S3Server::request_for(const std::string& url, const Query& query,
                                  std::vector<std::string> headers) {
  const Call call{.method = "GET",
                  .query = query,
                  .about = query.empty() ? Call::About::object : Call::About::bucket};
  HttpRequest request = signed_request(url, call);
  request.headers.insert(request.headers.begin(), headers.begin(), headers.end());
  return request;
}

HttpRequest S3Server::signed_request(const std::string& url, const Call& call) const {
  const Url parts = parse_url(url);
  const std::string region = region_of(parts.host);
  const std::string& key = call.about == Call::About::object ? parts.path : "";
  const Address address = address_of(parts.host, key, region);
  HttpRequest request{.url = address.origin + address.path,
                      .method = call.method,
                      .body = call.body,
                      .max_stall = call.max_stall};
  if (!call.query.empty()) request.url += "?" + canonical_query(call.query);
  std::map<std::string, std::string> headers = call.headers;
  const std::optional<Credentials> credentials = settings().credentials;
  if (credentials) {
    const std::time_t now = std::time(nullptr);
    std::string sha256(kEmptySha256);
    if (!call.body.empty() && address.origin.starts_with("https://")) {
      sha256 = kUnsignedBody;
    } else if (!call.body.empty()) {
      Sha256 digest;
      digest.update(call.body);
      sha256 = digest.hex_digest();
    }
    headers["x-amz-content-sha256"] = sha256;
    headers["x-amz-date"] = amz_date(now);
    if (!credentials->session_token.empty()) {
      headers["x-amz-security-token"] = credentials->session_token;
    }
    RequestToSign to_sign{call.method, address.path, call.query, headers};
    to_sign.headers["host"] = without_scheme(address.origin);
    headers["Authorization"] = authorization(to_sign, *credentials, {region, "s3", now}, sha256);
  }
  for (const auto& [name, value] : headers) request.headers.push_back(name + ": " + value);
  return request;
}

std::string S3Server::Answer::error_code() const {
  return parse_s3_error(response.error_body).code;
}

void S3Server::note_crc32_support(Crc32Support shown) {
  Crc32Support known = crc32_support_;
  while (known != Crc32Support::no && !crc32_support_.compare_exchange_weak(known, shown)) {
  }
}

S3Server::Answer S3Server::send(const std::string& url, const Call& call) {
  Retries retries(RetryPolicy::of_process());
  for (int num_lessons = 0;;) {
    Answer answer;
    answer.num_attempts = retries.num_attempts() + 1;
    HttpResponse& response = answer.response;
    response = perform(signed_request(url, call), [&](const auto&) -> TakeBytes {
      return [&](std::span<const std::byte> bytes) {
        answer.body.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        return answer.body.size() <= kMaxPageNbytes;
      };
    });
    // S3 can send status 200 for a long request before it knows the result. An error is then in the
    // body.
    if (answer.is_success() && !parse_s3_error(answer.body).code.empty()) {
      response.status = 500;
      response.error_body = std::exchange(answer.body, {});
    }
    if (num_lessons++ < kMaxLessons && learns_from(url, response)) continue;
    if (answer.is_success()) return answer;
    const std::string code = answer.error_code();
    // Another request changed the same object, or the body was damaged in transfer. Treated as 503,
    // so that the request is repeated.
    // MinIO has a code of its own for other checksums than MD5.
    if (code == "ConditionalRequestConflict" || code == "OperationAborted" || code == "BadDigest" ||
        code == "XAmzContentChecksumMismatch") {
      response.status = 503;
    }
    if (!retries.wait_after(response)) return answer;
  }
}

Error S3Server::error_of(const std::string& url, const Answer& answer,
                         std::string_view permission) const {
  return s3_error(url, answer.response, settings(), region_of(parse_url(url).host), permission);
}

S3Settings S3Server::settings() const {
  const std::scoped_lock lock(memory_mutex());
  return settings_;
}

bool S3Server::renew_credentials() {
  const auto now = std::chrono::steady_clock::now();
  S3Settings found;
  try {
    found = read_s3_settings(environment_of_process());
  } catch (const Error&) {
    // Ignored: the server's answer says more than that the settings cannot be read now.
  }
  const std::scoped_lock lock(memory_mutex());
  if (found.credentials && found.credentials != settings_.credentials) {
    settings_.credentials = std::move(found.credentials);
    settings_.credentials_source = std::move(found.credentials_source);
    renewed_ = now;
  }
  // The request may have been signed before another thread has read the new keys.
  return renewed_ && now - *renewed_ < kRenewalTime;
}

bool S3Server::learns_from(const std::string& url, const HttpResponse& response) {
  if (response.status >= 400 && response.status <= 403 &&
      is_outdated_token(parse_s3_error(response.error_body).code)) {
    return renew_credentials();
  }
  if (response.status != 301 && response.status != 307 && response.status != 400 &&
      response.status != 403) {
    return false;
  }
  std::string region = response.header("x-amz-bucket-region");
  if (region.empty()) region = parse_s3_error(response.error_body).region;
  const bool is_region = !region.empty() && region.size() <= 64 && is_host_label(region);
  const std::string bucket = parse_url(url).host;
  if (!is_region || region == region_of(bucket)) return false;
  const std::scoped_lock lock(memory_mutex());
  regions_[bucket] = region;
  return true;
}

Error S3Server::error_for(const std::string& url, const HttpResponse& response) {
  return s3_error(url, response, settings(), region_of(parse_url(url).host), kPermissionToRead);
}

std::optional<std::vector<Entry>> S3Server::list(const std::string& url) {
  const Url parts = parse_url(url);
  std::string prefix = parts.path;
  if (!prefix.empty() && !prefix.ends_with('/')) prefix += '/';
  Query query{{"delimiter", "/"}, {"encoding-type", "url"}, {"list-type", "2"}, {"prefix", prefix}};
  std::vector<Entry> entries;
  std::size_t num_pages = 0;
  std::string token;
  for (;;) {
    const auto [response, body] = ask(url, query, kMaxPageNbytes);
    if (!response.is_success()) throw error_for(url, response);
    BucketPage page = parse_bucket_page(body, prefix, url);
    std::ranges::move(page.entries, std::back_inserter(entries));
    if (entries.size() > kMaxEntries) {
      throw Error::expected(ErrorKind::unsupported, {.path = url}, "folder",
                            "at most " + std::to_string(kMaxEntries) + " entries", "more",
                            "give the URL of one checkpoint");
    }
    if (page.continuation_token.empty()) break;
    if (page.continuation_token == token) {
      throw Error::expected(ErrorKind::corruption, {.path = url}, "list of the bucket",
                            "another token for each page (NextContinuationToken)",
                            "'" + printable(token) + "' twice");
    }
    token = page.continuation_token;
    if (++num_pages == kMaxListPages) {
      throw Error::expected(ErrorKind::corruption, {.path = url}, "list of the bucket",
                            "at most " + std::to_string(kMaxListPages) + " pages", "more");
    }
    std::erase_if(query, [](const auto& entry) { return entry.first == "continuation-token"; });
    query.emplace_back("continuation-token", token);
  }
  std::ranges::stable_sort(entries, {}, &Entry::name);
  const auto repeated = std::ranges::unique(entries, [](const Entry& one, const Entry& other) {
    return one.name == other.name && one.is_folder == other.is_folder;
  });
  entries.erase(repeated.begin(), repeated.end());
  // If there is an object `a` and objects `a/…`, show only the folder `a`.
  const auto is_shadowed = [&](const Entry& entry) {
    if (entry.is_folder) return false;
    const auto [first, last] = std::ranges::equal_range(entries, entry.name, {}, &Entry::name);
    return std::any_of(first, last, [](const Entry& other) { return other.is_folder; });
  };
  std::vector<Entry> kept;
  std::ranges::copy_if(entries, std::back_inserter(kept),
                       [&](const Entry& entry) { return !is_shadowed(entry); });
  return kept;
}

}  // namespace tessera::object_store
