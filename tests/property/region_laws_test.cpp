#include <algorithm>
#include <map>
#include <set>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include "property/generators.h"
#include "tessera/layout/region.h"

namespace tessera {
namespace {

using test::arbitrary_region;
using test::arbitrary_shape;
using test::pick;
using test::pick_range;

/// Returns the tensor elements of a region in its own order, by coordinates, without CopyRuns.
std::vector<std::int64_t> elements_of(const Region& region, const Shape& shape) {
  std::vector<std::int64_t> elements;
  if (const auto* range = std::get_if<FlatRange>(&region)) {
    for (std::int64_t i = range->begin; i < range->end; ++i) elements.push_back(i);
    return elements;
  }
  const auto& box = std::get<Box>(region);
  const Shape strides = row_major_strides(shape);
  for (std::int64_t i = 0; i < box.numel(); ++i) {
    std::int64_t rest = i;
    std::int64_t element = 0;
    for (std::size_t d = shape.size(); d-- > 0;) {
      element += (box.offsets[d] + rest % box.sizes[d]) * strides[d];
      rest /= box.sizes[d];
    }
    elements.push_back(element);
  }
  return elements;
}

RC_GTEST_PROP(RegionLaws, RunsPairExactlyTheSharedElements, ()) {
  const Shape shape = *arbitrary_shape();
  const Region source = *arbitrary_region(shape);
  const Region destination = *arbitrary_region(shape);
  const auto source_elements = elements_of(source, shape);
  const auto destination_elements = elements_of(destination, shape);

  std::vector<std::int64_t> found(destination_elements.size(), -1);
  const CopyRuns runs(shape, source, destination);
  std::int64_t last_end = 0;
  runs.for_each_in({0, numel_of(destination)}, [&](const CopyRuns::Run& run) {
    RC_ASSERT(run.destination_begin >= last_end);
    last_end = run.destination_begin + run.numel;
    for (std::int64_t i = 0; i < run.numel; ++i) {
      found[static_cast<std::size_t>(run.destination_begin + i)] =
          source_elements[static_cast<std::size_t>(run.source_begin + i)];
    }
  });
  std::int64_t num_shared = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const bool is_shared = std::find(source_elements.begin(), source_elements.end(),
                                     destination_elements[i]) != source_elements.end();
    RC_ASSERT(found[i] == (is_shared ? destination_elements[i] : -1));
    num_shared += is_shared ? 1 : 0;
  }
  RC_ASSERT(runs.numel() == num_shared);
}

RC_GTEST_PROP(RegionLaws, WindowsTogetherGiveTheWholeWalk, ()) {
  const Shape shape = *arbitrary_shape();
  const Region source = *arbitrary_region(shape);
  const Region destination = *arbitrary_region(shape);
  const CopyRuns runs(shape, source, destination);
  const std::int64_t numel = numel_of(destination);
  const std::int64_t step = pick(1, 9);
  std::vector<std::int64_t> whole(static_cast<std::size_t>(numel), -1);
  std::vector<std::int64_t> windowed = whole;
  const auto record = [](std::vector<std::int64_t>& into) {
    return [&into](const CopyRuns::Run& run) {
      for (std::int64_t i = 0; i < run.numel; ++i) {
        into[static_cast<std::size_t>(run.destination_begin + i)] = run.source_begin + i;
      }
    };
  };
  runs.for_each_in({0, numel}, record(whole));
  for (std::int64_t begin = 0; begin < numel; begin += step) {
    const FlatRange window{begin, std::min(begin + step, numel)};
    runs.for_each_in(window, [&](const CopyRuns::Run& run) {
      RC_ASSERT(run.destination_begin >= window.begin);
      RC_ASSERT(run.destination_begin + run.numel <= window.end);
    });
    runs.for_each_in(window, record(windowed));
  }
  RC_ASSERT(windowed == whole);
}

RC_GTEST_PROP(RegionLaws, BoxesOfARangeAreItsElementsInOrderAndFew, ()) {
  const Shape shape = *arbitrary_shape();
  const auto [begin, end] = pick_range(numel_of(shape));
  std::vector<std::int64_t> elements;
  const auto boxes = boxes_of(FlatRange{begin, end}, shape);
  for (const Box& box : boxes) {
    for (const std::int64_t element : elements_of(box, shape)) elements.push_back(element);
  }
  RC_ASSERT(elements == elements_of(FlatRange{begin, end}, shape));
  RC_ASSERT(boxes.size() <= std::max<std::size_t>(1, 2 * shape.size() - (shape.empty() ? 0 : 1)));
}

RC_GTEST_PROP(RegionLaws, CoverageAgreesWithCountingElements, ()) {
  const Shape shape = *arbitrary_shape();
  const auto regions = *rc::gen::container<std::vector<Region>>(
      rc::gen::exec([&] { return *arbitrary_region(shape); }));
  std::set<Region> distinct(regions.begin(), regions.end());
  std::map<std::int64_t, int> uses;
  for (const Region& region : distinct) {
    for (const std::int64_t element : elements_of(region, shape)) ++uses[element];
  }
  // Skip cases where a box and a range have the same elements: they may count as replicas.
  std::set<std::pair<std::int64_t, std::int64_t>> ranges;
  bool has_twins = false;
  for (const Region& region : distinct) {
    if (const auto range = as_flat_range(region, shape); range && range->numel() != 0) {
      has_twins = has_twins || !ranges.insert({range->begin, range->end}).second;
    }
  }
  RC_PRE(!has_twins);
  const bool covers_once =
      static_cast<std::int64_t>(uses.size()) == numel_of(shape) &&
      std::all_of(uses.begin(), uses.end(), [](const auto& use) { return use.second == 1; });
  RC_ASSERT(check_coverage(regions, shape).empty() == covers_once);
}

}  // namespace
}  // namespace tessera
