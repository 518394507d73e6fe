#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::inspect {

/// Reads a logical tensor's elements in row-major order, whatever pieces the checkpoint holds it
/// in. Of replicas the first is read. Keeps a view of the reader, which must outlive it.
/// Immutable after construction; thread-safe.
class TensorReader {
 public:
  /// Throws: Error(corruption) where the pieces do not cover the tensor exactly once.
  TensorReader(const formats::CheckpointReader& reader, std::size_t tensor_index);

  const TensorMeta& meta() const { return meta_; }

  /// Fills `out` with elements `[window.begin, window.end)` of the tensor, little-endian.
  /// Requires: a window within the tensor; `out.size() == window.numel() * itemsize`.
  /// Throws: Error(corruption), Error(io) as `CheckpointReader::read_piece`.
  /// Cost: besides `out` at most as many bytes again.
  void read(FlatRange window, std::span<std::byte> out) const;

  /// Fills `out` with elements `window` of a box of the tensor, in the box's own row-major order.
  /// Requires: a box within the tensor, a window within the box;
  /// `out.size() == window.numel() * itemsize`.
  /// Throws: as the other.
  /// Cost: reads what the box has of each piece, and gaps of up to 64 KiB in between; besides `out`
  /// at most 4 MiB.
  void read(const Box& box, FlatRange window, std::span<std::byte> out) const;

  /// Returns the next place at or behind `begin + 1` where a read should end: at most
  /// `max_numel` on, and at the end of a piece where that lies before, so that blocks which start
  /// where this ended do not read a stored chunk twice.
  std::int64_t window_end(std::int64_t begin, std::int64_t max_numel) const;

 private:
  struct Source {
    std::uint32_t piece_index;
    FlatRange extent;  // from its first to behind its last element, in the tensor's order
    bool is_dense;     // all of the extent is its own
    CopyRuns runs;     // from the piece into the tensor
  };

  const formats::CheckpointReader& reader_;
  std::size_t tensor_index_;
  const TensorMeta& meta_;
  std::vector<Source> sources_;        // by extent.begin
  std::vector<std::int64_t> reached_;  // the largest extent.end up to each source
  std::vector<std::uint32_t> pieces_;  // of the sources
};

/// Takes the elements `window` of a tensor, row-major. `bytes` live as long as the call.
using BlockVisitor = std::function<void(FlatRange window, std::span<const std::byte> bytes)>;

/// Calls `visit` for consecutive blocks that make up the whole tensor, of at most `block_nbytes`
/// (at least one element).
void for_each_block(const TensorReader& tensor, std::uint64_t block_nbytes,
                    const BlockVisitor& visit);

}  // namespace tessera::inspect
