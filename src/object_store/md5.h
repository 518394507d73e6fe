#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace tessera::object_store {

/// An MD5 digest: the ETag of an object that was uploaded in one request, and the value of the
/// header Content-MD5. Detects accidental damage, but does not protect against forgery.
struct Md5 {
  std::array<std::uint8_t, 16> bytes{};

  static Md5 of(std::span<const std::byte> data);
  std::string hex() const;     // 32 lower-case digits
  std::string base64() const;  // as in Content-MD5
  friend bool operator==(const Md5&, const Md5&) = default;
};

}  // namespace tessera::object_store
