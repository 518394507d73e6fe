#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"

namespace tessera::formats::native {

static_assert(std::endian::native == std::endian::little, "stored numbers are little-endian");

/// Builds encodings of docs/formats/native.md (`uint`: LEB128; `sint`: zigzag). Not thread-safe.
class ByteWriter {
 public:
  void u8(std::uint8_t value) { bytes_.push_back(static_cast<std::byte>(value)); }
  void u32(std::uint32_t value) { fixed(value); }
  void u64(std::uint64_t value) { fixed(value); }
  void uint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) u8(static_cast<std::uint8_t>(value | 0x80));
    u8(static_cast<std::uint8_t>(value));
  }
  /// Requires: `value >= 0`, as sizes, offsets and counts are.
  void uint(std::int64_t value) { uint(static_cast<std::uint64_t>(value)); }
  void sint(std::int64_t value) {
    uint((static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63));
  }
  void str(std::string_view text) {
    uint(std::uint64_t{text.size()});
    append(std::as_bytes(std::span(text)));
  }

  std::span<const std::byte> bytes() const { return bytes_; }
  void clear() { bytes_.clear(); }

 private:
  template <class T>
  void fixed(T value) {
    append(std::as_bytes(std::span(&value, 1)));
  }
  void append(std::span<const std::byte> bytes) {
    bytes_.insert(bytes_.end(), bytes.begin(), bytes.end());
  }

  std::vector<std::byte> bytes_;
};

/// Reads what ByteWriter writes. The bytes may be hostile: a read that goes past their end, or
/// finds an invalid number, throws Error(corruption) with the path and the position. Keeps views of
/// the bytes and of the path; texts that it returns are views of the bytes. Not thread-safe.
class ByteReader {
 public:
  /// `file_offset` is where `bytes` begins in the file at `path`.
  ByteReader(std::span<const std::byte> bytes, const std::string& path, std::uint64_t file_offset)
      : bytes_(bytes), path_(path), file_offset_(file_offset) {}

  std::uint8_t u8() { return fixed<std::uint8_t>(); }
  std::uint32_t u32() { return fixed<std::uint32_t>(); }
  std::uint64_t u64() { return fixed<std::uint64_t>(); }

  std::uint64_t uint() {
    if (position_ < bytes_.size() && std::to_integer<std::uint8_t>(bytes_[position_]) < 0x80) {
      return std::to_integer<std::uint8_t>(bytes_[position_++]);  // most numbers fit into one byte
    }
    std::uint64_t value = 0;
    for (unsigned shift = 0; shift < 64; shift += 7) {
      const std::uint8_t byte = u8();
      const std::uint64_t bits = byte & 0x7F;
      if (shift == 63 && bits > 1) break;
      value |= bits << shift;
      if (byte < 0x80) return value;
    }
    fail("number", "at most 64 bits", "more");
  }

  /// Returns a number that fits into int64_t and is not negative.
  std::int64_t non_negative() {
    const std::uint64_t value = uint();
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      fail("number", "less than 2^63", std::to_string(value));
    }
    return static_cast<std::int64_t>(value);
  }

  std::int64_t sint() {
    const std::uint64_t value = uint();
    return static_cast<std::int64_t>((value >> 1) ^ (~(value & 1) + 1));
  }

  std::string_view str() {
    const std::uint64_t nbytes = uint();
    return {reinterpret_cast<const char*>(take(nbytes).data()), static_cast<std::size_t>(nbytes)};
  }

  /// Reads and returns the number of items of a list. An item has at least `min_nbytes`. Throws if
  /// the items cannot fit into the remaining bytes, so the caller may allocate memory for them.
  std::size_t count(std::size_t min_nbytes) {
    const std::uint64_t number = uint();
    if (number > (bytes_.size() - position_) / min_nbytes) {
      fail("count", "what fits into " + std::to_string(bytes_.size() - position_) + " bytes",
           std::to_string(number));
    }
    return static_cast<std::size_t>(number);
  }

  bool at_end() const { return position_ == bytes_.size(); }
  const std::string& path() const { return path_; }

  [[noreturn, gnu::cold]] void fail(std::string_view rule, std::string_view expected,
                                    std::string_view found) {
    const std::uint64_t at = file_offset_ + position_;
    throw Error::expected(ErrorKind::corruption,
                          {.path = path_, .fqn = {}, .byte_range = ByteRange{at, at}},
                          "index: " + std::string(rule), expected, found);
  }

 private:
  std::span<const std::byte> take(std::uint64_t nbytes) {
    if (nbytes > bytes_.size() - position_) fail_short(nbytes);
    const auto bytes = bytes_.subspan(position_, static_cast<std::size_t>(nbytes));
    position_ += bytes.size();
    return bytes;
  }

  [[noreturn, gnu::cold]] void fail_short(std::uint64_t nbytes) {
    fail("length", std::to_string(nbytes) + " bytes",
         std::to_string(bytes_.size() - position_) + " bytes");
  }

  template <class T>
  T fixed() {
    T value;
    std::memcpy(&value, take(sizeof value).data(), sizeof value);
    return value;
  }

  std::span<const std::byte> bytes_;
  const std::string& path_;
  std::uint64_t file_offset_;
  std::size_t position_ = 0;
};

}  // namespace tessera::formats::native
