#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"

namespace tessera {

/// A hyper-rectangle of a tensor, such as a DTensor's shard, a DCP chunk or an embedding table's
/// shard. Units: elements. Both members have as many entries as the tensor has dimensions.
struct Box {
  Shape offsets;
  Shape sizes;

  std::int64_t numel() const { return numel_of(sizes); }
  friend bool operator==(const Box&, const Box&) = default;
  friend auto operator<=>(const Box&, const Box&) = default;
};

/// A range `[begin, end)` of a tensor's elements in row-major order. Example: the part of a
/// parameter that one rank's shard of a FlatParameter holds. Units: elements.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t numel() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
  friend auto operator<=>(const FlatRange&, const FlatRange&) = default;
};

/// Some elements of a tensor. A region numbers its elements from 0, in row-major order: a Box as a
/// tensor of shape `sizes` does; element i of a FlatRange is element `begin + i` of the tensor.
using Region = std::variant<Box, FlatRange>;

/// Returns the number of elements in a region.
std::int64_t numel_of(const Region& region);
/// Returns the bytes of all elements in a region.
std::uint64_t nbytes_of(const Region& region, DType dtype);
std::string region_to_string(const Region& region);  // `[0:4, 8:16]` or `flat[12:40]`

/// Returns the box that holds all elements of a tensor.
Box whole_box(std::span<const std::int64_t> shape);

/// Returns nothing if the region is within a tensor of `shape`; otherwise says in words what is
/// wrong. Every reader checks every region from disk with this function.
std::optional<std::string> region_error(const Region& region, std::span<const std::int64_t> shape);

/// Returns the region as one range of the tensor's row-major order; nothing if its elements are not
/// contiguous in that order. For an empty region, returns `[0, 0)`.
std::optional<FlatRange> as_flat_range(const Region& region, std::span<const std::int64_t> shape);

/// Returns the non-empty boxes that make up a region, in row-major order: one for a Box, at most
/// 2n-1 for a FlatRange of an n-d tensor, none for an empty region. The element of a 0-d tensor is
/// one box without dimensions.
std::vector<Box> boxes_of(const Region& region, std::span<const std::int64_t> shape);

/// Returns the box that two boxes of one tensor share; nothing if they share no element.
std::optional<Box> intersect(const Box& a, const Box& b);

/// The elements that two regions of one tensor share, as runs: ranges that are contiguous in both
/// regions. To copy from one region to the other, copy run by run. Runs are in row-major order, so
/// their starts increase in both regions, and a binary search finds the runs of a range of the
/// destination. Immutable after construction; safe to share between threads.
class CopyRuns {
 public:
  /// Elements that are contiguous in both regions.
  struct Run {
    std::int64_t source_begin;       // in the source region's row-major order
    std::int64_t destination_begin;  // in the destination region's row-major order
    std::int64_t numel;
    friend bool operator==(const Run&, const Run&) = default;
  };

  CopyRuns(std::span<const std::int64_t> shape, const Region& source, const Region& destination);

  std::int64_t num_runs() const { return num_runs_; }
  std::int64_t numel() const { return numel_; }  // elements that the two regions share

  /// Calls `visit`, in order, for each run that overlaps the window; cuts off what lies outside it.
  /// The window counts elements of the destination region, in that region's own row-major order.
  void for_each_in(FlatRange destination_window,
                   const std::function<void(const Run&)>& visit) const;

 private:
  // A box of the intersection; all its runs have the same length.
  struct RunGroup {
    Shape outer_sizes;     // run k is at the k-th position of these sizes, row-major
    Shape source_strides;  // per dimension, in elements of the source region
    Shape destination_strides;
    std::int64_t source_base = 0;
    std::int64_t destination_base = 0;
    std::int64_t run_numel = 0;
    std::int64_t num_runs = 0;
  };
  void add(RunGroup group);
  static Run run_at(const RunGroup& group, std::int64_t index);

  std::vector<RunGroup> groups_;
  std::int64_t num_runs_ = 0;
  std::int64_t numel_ = 0;
};

/// Why a set of regions does not cover a tensor exactly once.
struct CoverageProblem {
  /// `hole`: elements in no region; `overlap`: elements in several regions.
  enum class Kind { hole, overlap } kind;
  std::string detail;  // in words: which regions overlap, or which or how many elements are missing
};

/// Returns nothing if the regions cover a tensor of `shape` exactly once; otherwise one problem or
/// more, not always all. Equal regions (replicas) count once; empty regions do not count.
/// Requires: `region_error` returns nothing for each region. Cost: O(n log n) for common layouts.
std::vector<CoverageProblem> check_coverage(std::span<const Region> regions,
                                            std::span<const std::int64_t> shape);

}  // namespace tessera
