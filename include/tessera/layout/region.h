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

/// A hyper-rectangle of a tensor: what DTensor, DCP chunks and sharded tables hold.
/// Units: elements. Both members have as many entries as the tensor has dimensions.
struct Box {
  Shape offsets;
  Shape sizes;

  std::int64_t numel() const { return numel_of(sizes); }
  friend bool operator==(const Box&, const Box&) = default;
  friend auto operator<=>(const Box&, const Box&) = default;
};

/// A range `[begin, end)` of a tensor's elements in row-major order: what a FlatParameter's shard
/// cuts out of a parameter. Units: elements.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t numel() const { return end - begin; }
  friend bool operator==(const FlatRange&, const FlatRange&) = default;
  friend auto operator<=>(const FlatRange&, const FlatRange&) = default;
};

/// A part of a logical tensor. A region has its own row-major order: element i of a Box is the
/// i-th of the box alone, element i of a FlatRange is tensor element `begin + i`.
using Region = std::variant<Box, FlatRange>;

/// Returns the number of elements in a region.
std::int64_t numel_of(const Region& region);
/// Returns how many bytes the elements of a region take.
std::uint64_t nbytes_of(const Region& region, DType dtype);
std::string region_to_string(const Region& region);  // `[0:4, 8:16]` or `flat[12:40]`

/// Returns the box that is all of a tensor.
Box whole_box(std::span<const std::int64_t> shape);

/// Returns nothing where the region lies within `shape` and has its dimensions, else the broken
/// rule in words. Every reader calls this on every region from disk.
std::optional<std::string> region_error(const Region& region, std::span<const std::int64_t> shape);

/// Says whether the region's elements are one range in the tensor's row-major order, and which.
/// An empty region is `[0, 0)`.
std::optional<FlatRange> as_flat_range(const Region& region, std::span<const std::int64_t> shape);

/// Returns the boxes that make up a region, in row-major order: the box itself, or for a range of
/// an n-d tensor at most 2n-1 boxes. No empty boxes; none at all for an empty region. A 0-d
/// tensor's one element is the box with no dimensions.
std::vector<Box> boxes_of(const Region& region, std::span<const std::int64_t> shape);

/// Returns the common part, or nothing where it is empty.
std::optional<Box> intersect(const Box& a, const Box& b);

/// Enumerates the maximal runs that are contiguous in both of two regions of one tensor, so that a
/// copy between them is a walk over the runs. [Note: Runs] Both regions number their elements in
/// row-major order, so the runs are increasing in both, and any window of the destination is found
/// by bisection without walking what lies before it.
/// Immutable after construction; safe to share between threads.
class CopyRuns {
 public:
  /// Elements that lie in one piece in both regions.
  struct Run {
    std::int64_t source_begin;       // in the source region's own order
    std::int64_t destination_begin;  // in the destination region's own order
    std::int64_t numel;
    friend bool operator==(const Run&, const Run&) = default;
  };

  CopyRuns(std::span<const std::int64_t> shape, const Region& source, const Region& destination);

  std::int64_t num_runs() const { return num_runs_; }
  std::int64_t numel() const { return numel_; }  // elements that the two regions share

  /// Calls `visit` for every run, cut to the destination window `[begin, end)`, in order.
  void for_each_in(FlatRange destination_window,
                   const std::function<void(const Run&)>& visit) const;

 private:
  // One box of the intersection, with runs of equal length in it.
  struct Part {
    Shape outer_sizes;     // run k is at the k-th position of these, row-major
    Shape source_strides;  // per dimension, in elements of the source region
    Shape destination_strides;
    std::int64_t source_base = 0;
    std::int64_t destination_base = 0;
    std::int64_t run_numel = 0;
    std::int64_t num_runs = 0;
  };
  void add(Part part);
  static Run run_at(const Part& part, std::int64_t index);

  std::vector<Part> parts_;
  std::int64_t num_runs_ = 0;
  std::int64_t numel_ = 0;
};

/// What is wrong with a set of regions as a cover of a tensor.
struct CoverageProblem {
  /// `hole`: elements that no region has; `overlap`: elements that several have.
  enum class Kind { hole, overlap } kind;
  std::string detail;  // which regions, or how many elements are missing
};

/// Checks that the regions cover a tensor of `shape` exactly once. Equal regions count once
/// (replicas). Empty regions are ignored. Cost: a sweep, O(n log n) for the layouts met in
/// practice. Requires: `region_error` found nothing in any of them.
std::vector<CoverageProblem> check_coverage(std::span<const Region> regions,
                                            std::span<const std::int64_t> shape);

}  // namespace tessera
