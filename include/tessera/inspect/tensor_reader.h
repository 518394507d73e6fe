#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <stop_token>
#include <vector>

#include "tessera/base/parallel.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::inspect {

/// Reads a tensor's elements in row-major order, however the checkpoint cuts it into pieces. Of
/// several pieces with the same region (replicas), reads only the first. Keeps a reference to
/// `reader`, which must outlive the TensorReader. Immutable after construction; thread-safe.
class TensorReader {
 public:
  /// Throws: Error(corruption) if the pieces do not cover the tensor exactly once.
  TensorReader(const formats::CheckpointReader& reader, std::size_t tensor_index);

  const TensorMeta& meta() const { return meta_; }
  /// Whether both read one tensor of one checkpoint.
  bool reads_same_tensor(const TensorReader& other) const {
    return &reader_ == &other.reader_ && tensor_index_ == other.tensor_index_;
  }

  /// Fills `out` with elements `[window.begin, window.end)` of the tensor, little-endian.
  /// Requires: a window within the tensor; `out.size() == window.numel() * itemsize`.
  /// Throws: Error(corruption), Error(io) as `CheckpointReader::read_piece`.
  /// Cost: a buffer that is at most as large as `out`.
  void read(FlatRange window, std::span<std::byte> out) const;

  /// Fills `out` with elements `[window.begin, window.end)` of a box of the tensor, little-endian.
  /// The window counts in the box's own row-major order. Requires: a box within the tensor, and a
  /// window within the box; `out.size() == window.numel() * itemsize`.
  /// Throws: as the `read` above.
  /// Cost: reads from each piece the elements that are needed, and gaps of up to 64 KiB between
  /// them; a buffer of at most 4 MiB.
  void read(const Box& box, FlatRange window, std::span<std::byte> out) const;

  /// Returns a good end for a window that begins at `begin`: at most `max_numel` elements after
  /// `begin` (but at least one), and if possible within the contiguous piece that holds `begin`.
  std::int64_t window_end(std::int64_t begin, std::int64_t max_numel) const;

 private:
  struct Source {
    std::uint32_t piece_index;
    FlatRange extent;  // from the piece's first element to its last, in the tensor's order
    bool is_dense;     // the piece has every element of the extent
    CopyRuns runs;     // from the piece into the tensor
  };

  const formats::CheckpointReader& reader_;
  std::size_t tensor_index_;
  const TensorMeta& meta_;
  std::vector<Source> sources_;        // sorted by extent.begin
  std::vector<std::int64_t> reached_;  // the largest extent.end of this and all earlier sources
  std::vector<std::uint32_t> pieces_;  // the piece numbers of the sources
};

/// Receives the elements `window` of a tensor, row-major. `bytes` are valid during the call only.
using BlockVisitor = std::function<void(FlatRange window, std::span<const std::byte> bytes)>;

/// Calls `visit` for consecutive blocks (in row-major order) that cover the whole tensor. A block
/// has at most `block_nbytes`, but at least one element. Throws: what `read` and `visit` throw.
void for_each_block(const TensorReader& tensor, std::uint64_t block_nbytes,
                    const BlockVisitor& visit);

/// How to read tensors' bytes. Does not change the results.
struct ScanOptions {
  int num_threads = 1;                                 // at least 1
  std::uint64_t memory_nbytes = kDefaultMemoryNbytes;  // for elements; all threads together
  std::stop_token stop{};                              // a stop request throws Error(interrupted)
  formats::ProgressSink progress{};  // gets the number of element bytes read; may be empty
};

}  // namespace tessera::inspect
