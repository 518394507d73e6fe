#pragma once

#include <rapidcheck.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tessera/layout/region.h"
#include "tessera/layout/strategy.h"

namespace tessera::test {

/// Integers in [low, high], all as likely from the first case on.
inline std::int64_t pick(std::int64_t low, std::int64_t high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<std::int64_t>(low, high + 1));
}

/// Ranges within [0, size): mostly wide ones, so that two of them mostly meet; some empty.
inline FlatRange pick_range(std::int64_t size) {
  if (pick(0, 9) == 0) {
    const std::int64_t at = pick(0, size);
    return {at, at};
  }
  const std::int64_t begin = pick(0, size / 2);
  return {begin, pick(begin, size)};
}

/// Shapes of 0 to 4 dimensions, zero sizes and ones among them, of a few hundred elements at most.
inline rc::Gen<Shape> arbitrary_shape() {
  return rc::gen::exec([] {
    constexpr std::int64_t kSizes[] = {0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 5, 7, 7, 2, 3, 4, 5, 6, 6};
    const std::int64_t num_dims = pick(0, 4);
    Shape shape;
    for (std::int64_t d = 0; d < num_dims; ++d) shape.push_back(kSizes[pick(0, 19)]);
    return shape;
  });
}

inline rc::Gen<Region> arbitrary_region(const Shape& shape) {
  return rc::gen::exec([shape]() -> Region {
    if (pick(0, 1) == 0) return pick_range(numel_of(shape));
    Box box;
    for (const std::int64_t size : shape) {
      const FlatRange range = pick_range(size);
      box.offsets.push_back(range.begin);
      box.sizes.push_back(range.numel());
    }
    return box;
  });
}

/// Any strategy that needs nothing but ranks, and the flat ones.
inline rc::Gen<std::string> arbitrary_strategy() {
  return rc::gen::exec([]() -> std::string {
    const std::string name =
        *rc::gen::element<std::string>("replicated", "dim0", "flat", "hybrid", "hybrid-flat");
    if (!name.starts_with("hybrid")) return name;
    return name + ":" + std::to_string(pick(1, 3)) + "x" +
           std::to_string(pick(1, 5));
  });
}

}  // namespace tessera::test
