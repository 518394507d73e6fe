#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "formats/native/index.h"
#include "formats/part_of_check.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::native {

/// An open native checkpoint, with its checkpoint id and its index, which other formats do not
/// have.
class NativeCheckpoint : public DividedReader {
 public:
  virtual std::uint64_t checkpoint_id() const = 0;
  virtual const Index& index() const = 0;
  /// Reads a piece as `read_piece` does, but without its patch, if it has one.
  virtual void read_unpatched(PieceId id, FlatRange range, std::span<std::byte> out) const = 0;
};

/// Opens a native checkpoint as `open_native` does, and throws what that throws.
std::unique_ptr<NativeCheckpoint> open_native_checkpoint(const FileSystem& fs, std::string path);

}  // namespace tessera::formats::native
