#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/base/shape.h"

namespace tessera::formats::torch_zip {

/// A tensor that the file describes outside of its pickle, as tar archives do. Units: elements.
struct SavedTensor {
  std::size_t storage = 0;
  DType dtype{};
  std::int64_t storage_offset = 0;
  Shape shape{};
  Shape strides{};
  std::uint64_t stored_nbytes = 0;  // bytes from the storage's start to the end of its used part
};

/// Interface to the bytes of the storages of one saved object, for all forms of file. Each storage
/// has a number, which `find` returns. Immutable and thread-safe.
class Storages {
 public:
  virtual ~Storages() = default;

  /// Returns the number of the storage that the pickle calls `key`; nothing if the file does not
  /// hold this storage.
  virtual std::optional<std::size_t> find(std::string_view key) const = 0;
  /// Returns the tensor that the pickle calls `id`; null if the file has no such tensor.
  virtual const SavedTensor* saved_tensor(std::string_view /*id*/) const { return nullptr; }
  /// Returns the name of the storage `key` for messages: `archive/data/0`.
  virtual std::string name_of(std::string_view key) const = 0;
  /// Returns the name of a storage, by its number, for messages.
  virtual std::string name(std::size_t storage) const = 0;

  virtual std::uint64_t nbytes(std::size_t storage) const = 0;
  /// Returns whether the file stores the bytes of a storage uncompressed.
  virtual bool is_plain(std::size_t /*storage*/) const { return true; }
  /// Returns how many bytes the file stores uncompressed. May also count bytes that belong to no
  /// storage.
  virtual std::uint64_t plain_nbytes() const = 0;
  /// Returns the stored CRC-32 of the bytes, if there is one.
  virtual std::optional<std::uint32_t> crc32(std::size_t /*storage*/) const { return std::nullopt; }
  /// Returns where the bytes are in the file. Throws: Error(corruption).
  virtual ByteRange data_range(std::size_t storage) const = 0;
  /// Fills `out` with the bytes from `offset`. Requires: they are within the storage.
  virtual void read_at(std::size_t storage, std::uint64_t offset,
                       std::span<std::byte> out) const = 0;
};

}  // namespace tessera::formats::torch_zip
