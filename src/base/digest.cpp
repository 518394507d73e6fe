#include "base/digest.h"

#include <libdeflate.h>
#include <nettle/sha2.h>
#include <xxhash.h>
#include <zlib.h>

#include <new>

namespace tessera {
namespace {

const std::uint8_t* as_uint8(std::span<const std::byte> bytes) {
  return reinterpret_cast<const std::uint8_t*>(bytes.data());
}

std::string hex_of(std::span<const std::uint8_t> bytes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(2 * bytes.size());
  for (const std::uint8_t byte : bytes) {
    hex += kHex[byte >> 4];
    hex += kHex[byte & 0xF];
  }
  return hex;
}

}  // namespace

std::uint64_t xxh3_64(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

// Owns an XXH3 state. The caller resets it for 64 or 128 bits before use.
struct Xxh3State {
  XXH3_state_t* xxh = XXH3_createState();
  Xxh3State() {
    if (xxh == nullptr) throw std::bad_alloc();
  }
  ~Xxh3State() { XXH3_freeState(xxh); }
  Xxh3State(const Xxh3State&) = delete;
  Xxh3State& operator=(const Xxh3State&) = delete;
};

struct Xxh3::State : Xxh3State {
  State() { XXH3_64bits_reset(xxh); }
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) {}
Xxh3::~Xxh3() = default;
Xxh3::Xxh3(Xxh3&&) noexcept = default;
Xxh3& Xxh3::operator=(Xxh3&&) noexcept = default;

void Xxh3::update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(state_->xxh, bytes.data(), bytes.size());
}

std::uint64_t Xxh3::digest() const {
  return XXH3_64bits_digest(state_->xxh);
}

struct Xxh3Wide::State : Xxh3State {
  State() { XXH3_128bits_reset(xxh); }
};

Xxh3Wide::Xxh3Wide() : state_(std::make_unique<State>()) {}
Xxh3Wide::~Xxh3Wide() = default;
Xxh3Wide::Xxh3Wide(Xxh3Wide&&) noexcept = default;
Xxh3Wide& Xxh3Wide::operator=(Xxh3Wide&&) noexcept = default;

void Xxh3Wide::update(std::span<const std::byte> bytes) {
  XXH3_128bits_update(state_->xxh, bytes.data(), bytes.size());
}

std::string Xxh3Wide::hex_digest() const {
  XXH128_canonical_t digest{};
  XXH128_canonicalFromHash(&digest, XXH3_128bits_digest(state_->xxh));
  return hex_of(digest.digest);
}

struct Sha256::State {
  sha256_ctx sha{};
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  sha256_init(&state_->sha);
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(std::span<const std::byte> bytes) {
  sha256_update(&state_->sha, bytes.size(), as_uint8(bytes));
}

std::string Sha256::hex_digest() {
  std::array<std::uint8_t, SHA256_DIGEST_SIZE> digest{};
  sha256_digest(&state_->sha, digest.size(), digest.data());  // also resets
  return hex_of(digest);
}

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> bytes) {
  // A null pointer makes libdeflate start again, so it must never get an empty span.
  return bytes.empty() ? crc : libdeflate_crc32(crc, bytes.data(), bytes.size());
}

std::uint32_t crc32_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b) {
  return static_cast<std::uint32_t>(::crc32_combine(crc_a, crc_b, static_cast<z_off_t>(nbytes_b)));
}

}  // namespace tessera
