#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera {

/// Returns the XXH3-64 checksum (seed 0): fast protection against accidental damage.
std::uint64_t xxh3_64(std::span<const std::byte> bytes);

/// An XXH3-64 checksum of bytes that arrive in blocks. Not thread-safe.
class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  Xxh3(Xxh3&&) noexcept;
  Xxh3& operator=(Xxh3&&) noexcept;
  /// Adds the next bytes to the digest.
  void update(std::span<const std::byte> bytes);
  /// Returns the digest of all bytes so far; more may follow.
  std::uint64_t digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// An XXH3-128 digest (seed 0) of bytes that arrive in blocks. Distinguishes contents, but does not
/// protect against forgery. Not thread-safe.
class Xxh3Wide {
 public:
  Xxh3Wide();
  ~Xxh3Wide();
  Xxh3Wide(Xxh3Wide&&) noexcept;
  Xxh3Wide& operator=(Xxh3Wide&&) noexcept;
  /// Adds the next bytes to the digest.
  void update(std::span<const std::byte> bytes);
  /// Returns the 32 lower-case hex digits that `xxh128sum` prints.
  std::string hex_digest() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// A SHA-256 digest of bytes that arrive in blocks. Not thread-safe.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(Sha256&&) noexcept;
  Sha256& operator=(Sha256&&) noexcept;
  /// Adds the next bytes to the digest.
  void update(std::span<const std::byte> bytes);
  /// Returns the digest of all bytes so far as 64 lower-case hex digits, and starts a new digest.
  std::string hex_digest();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Returns the CRC-32 (as in zip and gzip) of `bytes`, continuing from `crc` (0 at the start).
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> bytes);

/// Returns the CRC-32 of A followed by B from the CRCs of A and B. B has `nbytes_b` bytes.
/// Cost: O(log nbytes_b).
std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b);

}  // namespace tessera
