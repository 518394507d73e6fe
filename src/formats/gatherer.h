#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/byte_buffer.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::detail {

/// The most scratch memory that a Gatherer uses.
inline constexpr std::uint64_t kGatherNbytes = std::uint64_t{4} << 20;
/// If the gap between two runs has at most this many bytes, one call reads both runs and the gap,
/// because this is cheaper than two reads.
inline constexpr std::uint64_t kMaxGatherGapNbytes = std::uint64_t{64} << 10;

/// Whether one call reads two runs of a piece: elements up to `end`, and those from `next_begin`
/// on. False if the second run is not behind the first.
inline bool is_small_gap(std::int64_t end, std::int64_t next_begin, std::uint64_t element_nbytes) {
  return end <= next_begin &&
         static_cast<std::uint64_t>(next_begin - end) * element_nbytes <= kMaxGatherGapNbytes;
}

/// Reads elements of one tensor from several of its pieces, and puts them into the order of a
/// region. If ranges of a piece are close together, reads them in one call. `source` and `scratch`
/// must outlive the Gatherer. Not thread-safe.
class Gatherer {
 public:
  Gatherer(const TensorSource& source, std::size_t tensor_index,
           tessera::detail::ByteBuffer& scratch);

  /// Copies elements from `pieces` into `out`. `out` stands for the elements `window` of the region
  /// `destination`, numbered in the region's own row-major order. Elements of `out` that no piece
  /// has stay unchanged. Requires: regions within the tensor; `out.size() == window.numel() *
  /// itemsize`.
  void gather(std::span<const std::uint32_t> pieces, const Region& destination, FlatRange window,
              std::span<std::byte> out);

 private:
  std::uint64_t nbytes_of(std::int64_t numel) const {
    return static_cast<std::uint64_t>(numel) * itemsize_;
  }
  std::span<std::byte> destination_of(const CopyRuns::Run& run) const {
    return out_.subspan(nbytes_of(run.destination_begin - window_begin_), nbytes_of(run.numel));
  }
  void add(const CopyRuns::Run& run);
  void flush();

  const TensorSource& source_;
  const TensorEntry& tensor_;
  const std::size_t tensor_index_;
  const std::uint64_t itemsize_;
  tessera::detail::ByteBuffer& scratch_;
  std::uint32_t piece_ = 0;
  std::int64_t window_begin_ = 0;
  std::span<std::byte> out_;
  std::vector<CopyRuns::Run> pending_;
};

}  // namespace tessera::formats::detail
