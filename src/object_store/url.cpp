#include "object_store/url.h"

#include <algorithm>
#include <array>

#include "tessera/base/error.h"

namespace tessera::object_store {
namespace {

constexpr std::array<std::string_view, 4> kSchemes = {"s3://", "hf://", "https://", "http://"};

bool is_unreserved(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' ||
         c == '.' || c == '_' || c == '~';
}

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

bool is_letter(char c) {
  return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
}

/// Returns `scheme` of a path `scheme:/…`; empty if the path does not begin so. A scheme has two
/// characters or more.
std::string_view scheme_of(std::string_view path) {
  const std::size_t nbytes = path.find(":/");
  if (nbytes == std::string_view::npos || nbytes < 2 || !is_letter(path.front())) return {};
  const std::string_view scheme = path.substr(0, nbytes);
  const auto fits = [](char c) {
    return is_letter(c) || (c >= '0' && c <= '9') || c == '+' || c == '.' || c == '-';
  };
  return std::ranges::all_of(scheme, fits) ? scheme : std::string_view();
}

[[noreturn]] void refuse_scheme(std::string_view path, std::string_view scheme) {
  const std::string begin = std::string(scheme) + ":/";
  const bool is_known = std::ranges::find(kSchemes, begin + "/") != kSchemes.end();
  const std::string advice = is_known
                                 ? "a URL has two slashes; in Python, pass it as a str, because "
                                   "pathlib removes one"
                                 : "schemes are in lower case; other stores are not supported";
  // The message must not show a password or a signature.
  const bool may_be_secret = path.find_first_of("@?") != std::string_view::npos;
  throw Error::expected(ErrorKind::invalid_argument,
                        {.path = may_be_secret ? begin + "…" : std::string(path)}, "path",
                        "a local path, or a URL that begins with s3://, hf://, https:// or http://",
                        "'" + begin + (is_known ? "'" : "…'"),
                        advice + "; a local path that begins so is written as ./" + begin + "…");
}

}  // namespace

bool is_url(std::string_view path) {
  if (std::ranges::any_of(kSchemes,
                          [&](std::string_view scheme) { return path.starts_with(scheme); })) {
    return true;
  }
  const std::string_view scheme = scheme_of(path);
  if (!scheme.empty()) refuse_scheme(path, scheme);
  return false;
}

Url parse_url(const std::string& url) {
  const std::size_t host_begin = url.find("://") + 3;
  const std::size_t slash = std::min(url.find('/', host_begin), url.size());
  Url parts{.scheme = url.substr(0, host_begin - 3),
            .host = url.substr(host_begin, slash - host_begin),
            .path = url.substr(std::min(slash + 1, url.size())),
            .query = {}};
  if (parts.host.find('@') != std::string::npos && parts.scheme != "hf") {
    // The message must not show the host, because it may contain a password.
    throw Error::expected(ErrorKind::invalid_argument, {.path = parts.scheme + "://…"}, "URL",
                          "a host without a user name and a password", "an '@' in it");
  }
  if (parts.host.empty()) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = url}, "URL",
                          parts.scheme == "s3" ? "a bucket: s3://BUCKET/PREFIX" : "a host", "none");
  }
  if (parts.scheme == "http" || parts.scheme == "https") {
    const std::size_t mark = parts.path.find('?');
    if (mark != std::string::npos) {
      parts.query = parts.path.substr(mark + 1);
      parts.path.resize(mark);
    }
  }
  return parts;
}

std::string percent_encode(std::string_view text, std::string_view kept) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  std::string encoded;
  for (const char c : text) {
    if (is_unreserved(c) || kept.find(c) != std::string_view::npos) {
      encoded += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      encoded += {'%', kHex[byte >> 4], kHex[byte & 0xF]};
    }
  }
  return encoded;
}

std::optional<std::string> form_decode(std::string_view text) {
  std::string decoded;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      decoded += text[i] == '+' ? ' ' : text[i];
      continue;
    }
    const int high = i + 1 < text.size() ? hex_digit(text[i + 1]) : -1;
    const int low = i + 2 < text.size() ? hex_digit(text[i + 2]) : -1;
    if (high < 0 || low < 0) return std::nullopt;
    decoded += static_cast<char>(high * 16 + low);
    i += 2;
  }
  return decoded;
}

}  // namespace tessera::object_store
