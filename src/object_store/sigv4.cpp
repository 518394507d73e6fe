// AWS Signature Version 4:
// https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
#include "object_store/sigv4.h"

#include <nettle/sha2.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "object_store/url.h"

namespace tessera::object_store {
namespace {

using Sha256Bytes = std::array<std::uint8_t, SHA256_DIGEST_SIZE>;

const std::uint8_t* bytes_of(std::string_view text) {
  return reinterpret_cast<const std::uint8_t*>(text.data());
}

Sha256Bytes sha256_of(std::initializer_list<std::string_view> texts) {
  sha256_ctx state{};
  sha256_init(&state);
  for (const std::string_view text : texts) sha256_update(&state, text.size(), bytes_of(text));
  Sha256Bytes digest{};
  sha256_digest(&state, digest.size(), digest.data());
  return digest;
}

std::string text_of(const Sha256Bytes& digest) {
  return {digest.begin(), digest.end()};
}

/// HMAC-SHA-256, RFC 2104.
std::string hmac_sha256(std::string key, std::string_view text) {
  if (key.size() > SHA256_BLOCK_SIZE) key = text_of(sha256_of({key}));
  key.resize(SHA256_BLOCK_SIZE, '\0');
  std::string inner = key;
  std::string outer = key;
  for (char& c : inner) c = static_cast<char>(c ^ 0x36);
  for (char& c : outer) c = static_cast<char>(c ^ 0x5c);
  return text_of(sha256_of({outer, text_of(sha256_of({inner, text}))}));
}

std::string hex(std::string_view bytes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    text += {kHex[byte >> 4], kHex[byte & 0xF]};
  }
  return text;
}

}  // namespace

std::string amz_date(std::time_t time) {
  struct tm parts {};
  ::gmtime_r(&time, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y%m%dT%H%M%SZ", &parts);
  return text.data();
}

std::string canonical_query(std::vector<std::pair<std::string, std::string>> query) {
  for (auto& [name, value] : query) {
    name = percent_encode(name);
    value = percent_encode(value);
  }
  std::ranges::sort(query);
  std::string text;
  for (const auto& [name, value] : query) {
    text += (text.empty() ? "" : "&") + name + "=" + value;
  }
  return text;
}

std::string authorization(const RequestToSign& request, const Credentials& credentials,
                          const SigningScope& scope, std::string_view payload_sha256) {
  std::string signed_names;
  std::string canonical_headers;
  for (const auto& [name, value] : request.headers) {
    signed_names += (signed_names.empty() ? "" : ";") + name;
    canonical_headers += name + ":" + value + "\n";
  }
  const std::string canonical_request = request.method + "\n" + request.path + "\n" +
                                        canonical_query(request.query) + "\n" + canonical_headers +
                                        "\n" + signed_names + "\n" + std::string(payload_sha256);
  const std::string time = amz_date(scope.time);
  const std::string date = time.substr(0, 8);
  const std::string place = date + "/" + scope.region + "/" + scope.service + "/aws4_request";
  const std::string to_sign = "AWS4-HMAC-SHA256\n" + time + "\n" + place + "\n" +
                              hex(text_of(sha256_of({canonical_request})));
  std::string key = hmac_sha256("AWS4" + credentials.secret_access_key, date);
  for (const std::string_view part :
       {std::string_view(scope.region), std::string_view(scope.service),
        std::string_view("aws4_request")}) {
    key = hmac_sha256(std::move(key), part);
  }
  return "AWS4-HMAC-SHA256 Credential=" + credentials.access_key_id + "/" + place +
         ", SignedHeaders=" + signed_names +
         ", Signature=" + hex(hmac_sha256(std::move(key), to_sign));
}

}  // namespace tessera::object_store
