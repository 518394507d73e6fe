#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "formats/native/index.h"
#include "tessera/base/dtype.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::native {

// [Note: Packed pieces] HDF5 takes tens of microseconds for each dataset. A checkpoint with many
// small pieces therefore has version 2: each rank file packs its small pieces into one dataset per
// dtype, without gaps, in the order of the file's index. The index of a piece's first element there
// is the number of elements in all packed pieces of its dtype before it. Each larger piece still
// has a dataset of its own. See docs/formats/native.md.

/// A checkpoint without linked files packs its small pieces if it has at least this many of them.
inline constexpr std::int64_t kMinPackedPieces = 1000;

/// Returns the format version that a checkpoint with these contents and without linked files gets.
std::uint32_t format_version_for(const CheckpointContents& contents);

/// Whether a piece of a checkpoint of this version is packed. A packed piece has one block.
inline bool is_packed(std::uint32_t format_version, std::uint64_t piece_nbytes) {
  return format_version >= kPackedVersion && piece_nbytes > 0 && piece_nbytes < kPlainBlockNbytes;
}

/// Returns the name of the dataset of packed pieces in the group of Tessera's own datasets:
/// `packed_float32`.
std::string packed_dataset_name(DType dtype);

/// Counts the elements of one rank's packed pieces.
class PackedNumels {
 public:
  /// Adds a piece. Returns the place of its first element in the dataset of its dtype.
  std::int64_t add(DType dtype, std::int64_t numel) {
    std::int64_t& count = numels_[static_cast<std::size_t>(dtype)];
    const std::int64_t begin = count;
    count += numel;
    return begin;
  }
  std::int64_t of(DType dtype) const { return numels_[static_cast<std::size_t>(dtype)]; }

 private:
  std::array<std::int64_t, kNumDTypes> numels_{};  // indexed by dtype
};

}  // namespace tessera::formats::native
