#include "object_store/md5.h"

#include <nettle/md5.h>

#include "base/base64.h"

namespace tessera::object_store {

Md5 Md5::of(std::span<const std::byte> data) {
  static_assert(MD5_DIGEST_SIZE == sizeof(bytes));
  md5_ctx state{};
  md5_init(&state);
  md5_update(&state, data.size(), reinterpret_cast<const std::uint8_t*>(data.data()));
  Md5 digest;
  md5_digest(&state, digest.bytes.size(), digest.bytes.data());
  return digest;
}

std::string Md5::hex() const {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (const std::uint8_t byte : bytes) text += {kHex[byte >> 4], kHex[byte & 0xF]};
  return text;
}

std::string Md5::base64() const {
  return tessera::detail::base64_encode(
      {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace tessera::object_store
