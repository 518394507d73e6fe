#include "tessera/layout/region.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "base/checked_math.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

/// Maps an element's coordinates to its number in a region's own row-major order:
/// `base + sum(strides[d] * coordinates[d])`.
struct AffineIndex {
  std::int64_t base = 0;
  Shape strides;

  std::int64_t at(std::span<const std::int64_t> coordinates) const {
    std::int64_t value = base;
    for (std::size_t d = 0; d < coordinates.size(); ++d) value += strides[d] * coordinates[d];
    return value;
  }
};

AffineIndex affine_index(const Region& region, std::span<const std::int64_t> shape) {
  AffineIndex index;
  if (const auto* box = std::get_if<Box>(&region)) {
    index.strides = row_major_strides(box->sizes);
    for (std::size_t d = 0; d < index.strides.size(); ++d) {
      index.base -= box->offsets[d] * index.strides[d];
    }
  } else {
    index.strides = row_major_strides(shape);
    index.base = -std::get<FlatRange>(region).begin;
  }
  return index;
}

/// Appends the boxes of elements `[begin, end)` of the sub-tensor that the coordinates in `prefix`
/// select. Requires: `begin < end`.
void append_flat_boxes(std::span<const std::int64_t> shape, const Shape& prefix, std::int64_t begin,
                       std::int64_t end, std::vector<Box>& out) {
  const std::size_t d = prefix.size();
  Box box{prefix, Shape(d, 1)};
  if (d == shape.size()) {
    out.push_back(std::move(box));
    return;
  }
  const std::int64_t row_numel = numel_of(shape.subspan(d + 1));
  const auto append_within_row = [&](std::int64_t row, std::int64_t row_begin,
                                     std::int64_t row_end) {
    Shape deeper = prefix;
    deeper.push_back(row);
    append_flat_boxes(shape, deeper, row_begin, row_end, out);
  };
  const std::int64_t first_row = begin / row_numel;
  const std::int64_t last_row = (end - 1) / row_numel;
  const bool head_is_partial = begin % row_numel != 0;
  const bool tail_is_partial = end % row_numel != 0;
  if (first_row == last_row && (head_is_partial || tail_is_partial)) {
    append_within_row(first_row, begin - first_row * row_numel, end - first_row * row_numel);
    return;
  }
  const std::int64_t whole_begin = first_row + (head_is_partial ? 1 : 0);
  const std::int64_t whole_end = last_row + (tail_is_partial ? 0 : 1);
  if (head_is_partial) append_within_row(first_row, begin - first_row * row_numel, row_numel);
  if (whole_begin < whole_end) {
    box.offsets.push_back(whole_begin);
    box.sizes.push_back(whole_end - whole_begin);
    for (std::int64_t size : shape.subspan(d + 1)) {
      box.offsets.push_back(0);
      box.sizes.push_back(size);
    }
    out.push_back(std::move(box));
  }
  if (tail_is_partial) append_within_row(last_row, 0, end - last_row * row_numel);
}

}  // namespace

std::int64_t numel_of(const Region& region) {
  return std::visit([](const auto& r) { return r.numel(); }, region);
}

std::uint64_t nbytes_of(const Region& region, DType dtype) {
  return static_cast<std::uint64_t>(numel_of(region)) * itemsize(dtype);
}

std::string region_to_string(const Region& region) {
  if (const auto* range = std::get_if<FlatRange>(&region)) {
    return "flat[" + std::to_string(range->begin) + ":" + std::to_string(range->end) + "]";
  }
  const auto& box = std::get<Box>(region);
  std::string text = "[";
  for (std::size_t d = 0; d < box.sizes.size(); ++d) {
    if (d != 0) text += ", ";
    text += std::to_string(box.offsets[d]) + ":" + std::to_string(box.offsets[d] + box.sizes[d]);
  }
  return text + "]";
}

Box whole_box(std::span<const std::int64_t> shape) {
  return Box{Shape(shape.size(), 0), Shape(shape.begin(), shape.end())};
}

std::optional<std::string> region_error(const Region& region, std::span<const std::int64_t> shape) {
  if (const auto* range = std::get_if<FlatRange>(&region)) {
    const std::int64_t numel = numel_of(shape);
    if (range->begin < 0 || range->end < range->begin || range->end > numel) {
      return "expected a range within [0, " + std::to_string(numel) + "), found [" +
             std::to_string(range->begin) + ", " + std::to_string(range->end) + ")";
    }
    return std::nullopt;
  }
  const auto& box = std::get<Box>(region);
  if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) {
    return "expected " + std::to_string(shape.size()) + " dimensions, found " +
           std::to_string(box.offsets.size()) + " offsets and " + std::to_string(box.sizes.size()) +
           " sizes";
  }
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const auto end = checked_add(box.offsets[d], box.sizes[d]);
    if (box.offsets[d] < 0 || box.sizes[d] < 0 || !end || *end > shape[d]) {
      return "expected dimension " + std::to_string(d) + " within [0, " + std::to_string(shape[d]) +
             "), found offset " + std::to_string(box.offsets[d]) + " and size " +
             std::to_string(box.sizes[d]);
    }
  }
  return std::nullopt;
}

std::optional<FlatRange> as_flat_range(const Region& region, std::span<const std::int64_t> shape) {
  const std::int64_t numel = numel_of(region);
  if (numel == 0) return FlatRange{};
  if (const auto* range = std::get_if<FlatRange>(&region)) return *range;
  const auto& box = std::get<Box>(region);
  // The box is contiguous if, after the first dimension in which its size is not 1, it spans every
  // dimension.
  std::size_t cut = 0;
  while (cut < shape.size() && box.sizes[cut] == 1) ++cut;
  for (std::size_t d = cut + 1; d < shape.size(); ++d) {
    if (box.sizes[d] != shape[d]) return std::nullopt;
  }
  const std::int64_t begin = AffineIndex{0, row_major_strides(shape)}.at(box.offsets);
  return FlatRange{begin, begin + numel};
}

std::vector<Box> boxes_of(const Region& region, std::span<const std::int64_t> shape) {
  if (numel_of(region) == 0) return {};
  if (const auto* box = std::get_if<Box>(&region)) return {*box};
  const auto& range = std::get<FlatRange>(region);
  std::vector<Box> boxes;
  append_flat_boxes(shape, {}, range.begin, range.end, boxes);
  return boxes;
}

std::optional<Box> intersect(const Box& a, const Box& b) {
  TESSERA_CHECK(a.sizes.size() == b.sizes.size());
  Box common{Shape(a.sizes.size()), Shape(a.sizes.size())};
  for (std::size_t d = 0; d < a.sizes.size(); ++d) {
    const std::int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const std::int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    common.offsets[d] = begin;
    common.sizes[d] = end - begin;
  }
  return common;
}

CopyRuns::CopyRuns(std::span<const std::int64_t> shape, const Region& source,
                   const Region& destination) {
  // Two ranges in the tensor's row-major order overlap in at most one run, for any shape.
  const auto source_range = as_flat_range(source, shape);
  const auto destination_range = as_flat_range(destination, shape);
  if (source_range && destination_range) {
    const std::int64_t begin = std::max(source_range->begin, destination_range->begin);
    const std::int64_t end = std::min(source_range->end, destination_range->end);
    if (begin >= end) return;
    RunGroup group;
    group.source_base = begin - source_range->begin;
    group.destination_base = begin - destination_range->begin;
    group.run_numel = end - begin;
    group.num_runs = 1;
    add(std::move(group));
    return;
  }

  const AffineIndex source_index = affine_index(source, shape);
  const AffineIndex destination_index = affine_index(destination, shape);
  const std::vector<Box> source_boxes = boxes_of(source, shape);
  for (const Box& destination_box : boxes_of(destination, shape)) {
    for (const Box& source_box : source_boxes) {
      const auto common = intersect(source_box, destination_box);
      if (!common) continue;
      RunGroup group;
      group.source_base = source_index.at(common->offsets);
      group.destination_base = destination_index.at(common->offsets);
      // A run grows from the innermost dimension outwards, as long as both regions are contiguous.
      std::size_t num_outer = common->sizes.size();
      group.run_numel = 1;
      while (num_outer > 0) {
        const std::size_t d = num_outer - 1;
        const bool is_dense =
            common->sizes[d] == 1 || (source_index.strides[d] == group.run_numel &&
                                      destination_index.strides[d] == group.run_numel);
        if (!is_dense) break;
        group.run_numel *= common->sizes[d];
        num_outer = d;
      }
      group.outer_sizes.assign(common->sizes.begin(),
                               common->sizes.begin() + static_cast<std::ptrdiff_t>(num_outer));
      group.source_strides = source_index.strides;
      group.destination_strides = destination_index.strides;
      group.num_runs = numel_of(group.outer_sizes);
      add(std::move(group));
    }
  }
}

void CopyRuns::add(RunGroup group) {
  num_runs_ += group.num_runs;
  numel_ += group.num_runs * group.run_numel;
  groups_.push_back(std::move(group));
}

CopyRuns::Run CopyRuns::run_at(const RunGroup& group, std::int64_t index) {
  Run run{group.source_base, group.destination_base, group.run_numel};
  for (std::size_t d = group.outer_sizes.size(); d-- > 0;) {
    const std::int64_t coordinate = index % group.outer_sizes[d];
    index /= group.outer_sizes[d];
    run.source_begin += coordinate * group.source_strides[d];
    run.destination_begin += coordinate * group.destination_strides[d];
  }
  return run;
}

void CopyRuns::for_each_in(FlatRange window, const std::function<void(const Run&)>& visit) const {
  for (const RunGroup& group : groups_) {
    if (group.destination_base >= window.end) break;
    // The first run that ends after the window's begin.
    std::int64_t first = 0;
    std::int64_t past = group.num_runs;
    while (first < past) {
      const std::int64_t middle = first + (past - first) / 2;
      if (run_at(group, middle).destination_begin + group.run_numel > window.begin) {
        past = middle;
      } else {
        first = middle + 1;
      }
    }
    for (std::int64_t i = first; i < group.num_runs; ++i) {
      Run run = run_at(group, i);
      if (run.destination_begin >= window.end) break;
      const std::int64_t cut = std::max<std::int64_t>(0, window.begin - run.destination_begin);
      run.source_begin += cut;
      run.destination_begin += cut;
      run.numel = std::min(run.numel - cut, window.end - run.destination_begin);
      visit(run);
    }
  }
}

namespace {

using Problem = CoverageProblem;

/// Finds holes and overlaps of ranges in one pass. Requires: the ranges are sorted and distinct.
std::vector<Problem> check_ranges(const std::vector<FlatRange>& ranges, std::int64_t numel) {
  std::vector<Problem> problems;
  const auto report = [&](Problem::Kind kind, std::int64_t begin, std::int64_t end,
                          const char* what) {
    problems.push_back(
        {kind, "elements [" + std::to_string(begin) + ", " + std::to_string(end) + ") " + what});
  };
  std::int64_t reached = 0;
  for (const FlatRange& range : ranges) {
    if (range.begin < reached) {
      report(Problem::Kind::overlap, range.begin, std::min(reached, range.end),
             "in two overlapping pieces");
    } else if (range.begin > reached) {
      report(Problem::Kind::hole, reached, range.begin, "in no piece");
    }
    reached = std::max(reached, range.end);
  }
  if (reached < numel) report(Problem::Kind::hole, reached, numel, "in no piece");
  return problems;
}

/// Finds two boxes that overlap. Sweeps along the dimension with the most different offsets. Keeps
/// the boxes at the current position of the sweep sorted along the dimension with the second most
/// different offsets.
std::optional<std::pair<std::size_t, std::size_t>> find_overlap(const std::vector<Box>& boxes) {
  const std::size_t num_dims = boxes.front().sizes.size();  // at least 2: 1-d boxes are ranges
  std::vector<std::pair<std::size_t, std::size_t>> by_distinct_offsets;  // count, dimension
  for (std::size_t d = 0; d < num_dims; ++d) {
    std::set<std::int64_t> offsets;
    for (const Box& box : boxes) offsets.insert(box.offsets[d]);
    by_distinct_offsets.emplace_back(offsets.size(), d);
  }
  std::stable_sort(by_distinct_offsets.begin(), by_distinct_offsets.end(), std::greater<>());
  const std::size_t sweep = by_distinct_offsets[0].second;
  const std::size_t across = by_distinct_offsets[1].second;
  const auto end_of = [&](std::size_t i, std::size_t d) {
    return boxes[i].offsets[d] + boxes[i].sizes[d];
  };

  std::vector<std::size_t> by_begin(boxes.size());
  std::iota(by_begin.begin(), by_begin.end(), std::size_t{0});
  std::vector<std::size_t> by_end = by_begin;
  std::sort(by_begin.begin(), by_begin.end(), [&](std::size_t a, std::size_t b) {
    return boxes[a].offsets[sweep] < boxes[b].offsets[sweep];
  });
  std::sort(by_end.begin(), by_end.end(),
            [&](std::size_t a, std::size_t b) { return end_of(a, sweep) < end_of(b, sweep); });

  std::set<std::pair<std::int64_t, std::size_t>> active;  // offset along `across`, box
  std::int64_t longest = 0;  // the longest extent along `across` so far
  std::size_t num_left = 0;
  for (std::size_t entering : by_begin) {
    const std::int64_t begin = boxes[entering].offsets[sweep];
    for (; end_of(by_end[num_left], sweep) <= begin; ++num_left) {
      active.erase({boxes[by_end[num_left]].offsets[across], by_end[num_left]});
    }
    const std::int64_t low = boxes[entering].offsets[across];
    const std::int64_t high = end_of(entering, across);
    for (auto it = active.lower_bound({low - longest, 0}); it != active.end() && it->first < high;
         ++it) {
      if (intersect(boxes[entering], boxes[it->second])) return std::pair{it->second, entering};
    }
    active.emplace(low, entering);
    longest = std::max(longest, high - low);
  }
  return std::nullopt;
}

}  // namespace

std::vector<CoverageProblem> check_coverage(std::span<const Region> regions,
                                            std::span<const std::int64_t> shape) {
  const std::int64_t numel = numel_of(shape);
  if (numel == 0) return {};

  // If all regions are ranges in row-major order, sorting them is enough.
  std::vector<FlatRange> ranges;
  bool are_all_ranges = true;
  for (const Region& region : regions) {
    const auto range = as_flat_range(region, shape);
    if (!range) {
      are_all_ranges = false;
      break;
    }
    if (range->numel() != 0) ranges.push_back(*range);
  }
  if (are_all_ranges) {
    std::sort(ranges.begin(), ranges.end());
    ranges.erase(std::unique(ranges.begin(), ranges.end()), ranges.end());
    return check_ranges(ranges, numel);
  }

  std::vector<Region> distinct(regions.begin(), regions.end());
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  std::vector<Box> boxes;
  for (const Region& region : distinct) {
    for (Box& box : boxes_of(region, shape)) boxes.push_back(std::move(box));
  }
  if (const auto overlap = find_overlap(boxes)) {
    return {{Problem::Kind::overlap, region_to_string(boxes[overlap->first]) + " and " +
                                         region_to_string(boxes[overlap->second]) +
                                         ", which overlap"}};
  }
  std::int64_t covered = 0;  // cannot overflow, as there are no overlaps
  for (const Box& box : boxes) covered += box.numel();
  if (covered != numel) {
    return {{Problem::Kind::hole, std::to_string(numel - covered) + " of " + std::to_string(numel) +
                                      " elements in no piece"}};
  }
  return {};
}

}  // namespace tessera
