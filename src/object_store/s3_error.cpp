// Turns error answers of S3 into messages that say what the user can do.
#include <ctime>

#include "object_store/s3_server.h"
#include "object_store/url.h"

namespace tessera::object_store {
namespace {

std::string which_keys(const S3Settings& settings) {
  if (!settings.credentials) {
    return "the request was not signed; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or "
           "AWS_PROFILE";
  }
  return "signed with " + settings.credentials_source;
}

std::string status_and_code(const HttpResponse& response, const S3ErrorBody& body) {
  std::string text = response.failure_in_words();
  if (!body.code.empty()) text += " " + printable(body.code);
  return text;
}

Error missing(const std::string& url, const HttpResponse& response, const S3ErrorBody& body,
              const S3Settings& settings) {
  if (body.code == "NoSuchBucket") {
    const std::string where = settings.endpoint.empty() ? "AWS" : printable(settings.endpoint);
    return Error::expected(ErrorKind::not_found, {.path = url}, "bucket",
                           "a bucket '" + printable(parse_url(url).host) + "' at " + where, "none",
                           "check the name, and the endpoint (AWS_ENDPOINT_URL) if it is not AWS");
  }
  return Error::expected(ErrorKind::not_found, {.path = url}, "object", "an object",
                         status_and_code(response, body));
}

Error clock_error(const std::string& url, const HttpResponse& response) {
  const std::time_t now = std::time(nullptr);
  struct tm parts {};
  ::gmtime_r(&now, &parts);
  char text[64] = "";
  std::strftime(text, sizeof text, "%a, %d %b %Y %H:%M:%S GMT", &parts);
  const std::string of_server = response.header("date");
  return Error::expected(ErrorKind::io, {.path = url}, "clock of this machine",
                         of_server.empty() ? "the server's time" : printable(of_server), text,
                         "signatures are valid for 15 minutes; set the clock");
}

/// Returns the scheme and the host of the header Location, without the path, which may hold a
/// signature; empty if the answer is no redirect to a URL.
std::string redirect_origin(const HttpResponse& response) {
  const std::string location = response.header("location");
  if (response.status < 300 || response.status >= 400) return {};
  if (!location.starts_with("http://") && !location.starts_with("https://")) return {};
  return location.substr(0, location.find_first_of("/?#", location.find("://") + 3));
}

std::string region_advice(const HttpResponse& response, const S3ErrorBody& body,
                          const S3Settings& settings) {
  std::string region = response.header("x-amz-bucket-region");
  if (region.empty()) region = body.region;
  const std::string of_region = region.empty() ? "the bucket's region" : printable(region);
  if (settings.endpoint.empty()) return "set AWS_REGION to " + of_region;
  return "the endpoint (AWS_ENDPOINT_URL) is " + printable(settings.endpoint) +
         "; set it to that of " + of_region +
         (body.endpoint.empty() ? "" : ", " + printable(body.endpoint)) + ", and AWS_REGION too";
}

}  // namespace

bool is_outdated_token(std::string_view code) {
  return code == "ExpiredToken" || code == "TokenRefreshRequired" || code == "InvalidToken";
}

Error s3_error(const std::string& url, const HttpResponse& response, const S3Settings& settings,
               const std::string& region, std::string_view permission) {
  const S3ErrorBody body = parse_s3_error(response.error_body);
  const std::string found = status_and_code(response, body);
  const auto refused = [&](std::string_view expected, const std::string& advice) {
    return Error::expected(ErrorKind::io, {.path = url}, "access", expected, found, advice);
  };
  if (response.status == 404) return missing(url, response, body, settings);
  if (body.code == "RequestTimeTooSkewed") return clock_error(url, response);
  if (is_outdated_token(body.code)) {
    return refused("a session token that is valid",
                   which_keys(settings) + "; sign in again and export the new keys");
  }
  if (body.code == "InvalidAccessKeyId") {
    return refused("an access key that the server knows",
                   which_keys(settings) +
                       "; is the endpoint (AWS_ENDPOINT_URL) the one that the "
                       "key is for?");
  }
  if (body.code == "SignatureDoesNotMatch") {
    return refused("a signature that fits the access key",
                   which_keys(settings) + "; check the secret access key");
  }
  if (response.status == 401 || response.status == 403) {
    return refused("permission " + std::string(permission), which_keys(settings));
  }
  if (body.code.empty() && !redirect_origin(response).empty()) {
    return Error::expected(
        ErrorKind::io, {.path = url}, "endpoint", "the server itself",
        found + ", a redirect to " + printable(redirect_origin(response)),
        "signed requests follow no redirect; set AWS_ENDPOINT_URL to the server");
  }
  if (response.status == 301 || response.status == 307 || body.code == "PermanentRedirect" ||
      body.code == "AuthorizationHeaderMalformed") {
    return Error::expected(ErrorKind::io, {.path = url}, "region", "the bucket's region",
                           "'" + region + "', and " + found,
                           region_advice(response, body, settings));
  }
  if (response.curl_code != 0 || response.may_succeed_later()) return plain_error(url, response);
  return Error::expected(ErrorKind::io, {.path = url}, "request", "success",
                         body.message.empty() ? found : found + ": " + printable(body.message));
}

}  // namespace tessera::object_store
