#pragma once

#include <rapidcheck.h>

#include <string>
#include <vector>

#include "tessera/layout/region.h"
#include "tessera/layout/strategy.h"

namespace tessera::test {

/// Shapes of 0 to 4 dimensions, zero sizes and ones among them, of a few hundred elements at most.
inline rc::Gen<Shape> arbitrary_shape() {
  return rc::gen::exec([] {
    const int num_dims = *rc::gen::inRange(0, 5);
    Shape shape;
    for (int d = 0; d < num_dims; ++d) {
      shape.push_back(*rc::gen::weightedElement<std::int64_t>(
          {{1, 0}, {4, 1}, {6, 2}, {6, 3}, {4, 5}, {2, 7}}));
    }
    return shape;
  });
}

inline rc::Gen<Region> arbitrary_region(const Shape& shape) {
  return rc::gen::exec([shape]() -> Region {
    if (*rc::gen::arbitrary<bool>()) {
      const std::int64_t begin = *rc::gen::inRange<std::int64_t>(0, numel_of(shape) + 1);
      return FlatRange{begin, *rc::gen::inRange<std::int64_t>(begin, numel_of(shape) + 1)};
    }
    Box box;
    for (const std::int64_t size : shape) {
      const std::int64_t begin = *rc::gen::inRange<std::int64_t>(0, size + 1);
      box.offsets.push_back(begin);
      box.sizes.push_back(*rc::gen::inRange<std::int64_t>(begin, size + 1) - begin);
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
    return name + ":" + std::to_string(*rc::gen::inRange(1, 4)) + "x" +
           std::to_string(*rc::gen::inRange(1, 6));
  });
}

}  // namespace tessera::test
