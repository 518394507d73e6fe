#pragma once

#include <rapidcheck.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "tessera/layout/region.h"
#include "tessera/layout/strategy.h"
#include "tessera/layout/table_plan.h"

namespace tessera::test {

/// Draws an integer in [low, high]. All are equally likely, also in RapidCheck's first cases.
inline std::int64_t pick(std::int64_t low, std::int64_t high) {
  return *rc::gen::resize(rc::kNominalSize, rc::gen::inRange<std::int64_t>(low, high + 1));
}

/// Draws a range within [0, size): mostly wide, so that two ranges often overlap; sometimes empty.
inline FlatRange pick_range(std::int64_t size) {
  if (pick(0, 9) == 0) {
    const std::int64_t at = pick(0, size);
    return {at, at};
  }
  const std::int64_t begin = pick(0, size / 2);
  return {begin, pick(begin, size)};
}

/// Shapes of 0 to 4 dimensions, with sizes from 0 to 7.
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

/// The text of any strategy that needs no other option.
inline rc::Gen<std::string> arbitrary_strategy() {
  return rc::gen::exec([]() -> std::string {
    const std::string name =
        *rc::gen::element<std::string>("replicated", "dim0", "flat", "hybrid", "hybrid-flat");
    if (!name.starts_with("hybrid")) return name;
    return name + ":" + std::to_string(pick(1, 3)) + "x" + std::to_string(pick(1, 5));
  });
}

/// Any plan for the named tables, on 1 to 6 ranks.
inline rc::Gen<TablePlan> arbitrary_table_plan(std::vector<std::string> tables) {
  return rc::gen::exec([tables] {
    constexpr TableSharding kShardings[] = {TableSharding::data_parallel,
                                            TableSharding::table_wise,
                                            TableSharding::column_wise,
                                            TableSharding::row_wise,
                                            TableSharding::table_row_wise,
                                            TableSharding::table_column_wise,
                                            TableSharding::grid};
    TablePlan plan;
    plan.world_size = static_cast<int>(pick(1, 6));
    for (const std::string& table : tables) {
      TableRule rule;
      rule.sharding = kShardings[pick(0, 6)];
      rule.ranks.resize(static_cast<std::size_t>(plan.world_size));
      std::iota(rule.ranks.begin(), rule.ranks.end(), 0);
      if (rule.sharding != TableSharding::data_parallel) {
        std::rotate(rule.ranks.begin(), rule.ranks.begin() + pick(0, plan.world_size - 1),
                    rule.ranks.end());
        const bool is_whole = rule.sharding == TableSharding::table_wise;
        rule.ranks.resize(is_whole ? 1 : static_cast<std::size_t>(pick(1, plan.world_size)));
      }
      if (rule.sharding == TableSharding::grid) {
        const auto num_ranks = static_cast<int>(rule.ranks.size());
        do {
          rule.num_column_shards = static_cast<int>(pick(1, num_ranks));
        } while (num_ranks % rule.num_column_shards != 0);
      }
      plan.tables[table] = rule;
    }
    return plan;
  });
}

}  // namespace tessera::test
