#include "tessera/layout/strategy.h"

#include <charconv>
#include <numeric>

#include "base/checked_math.h"
#include "layout/cut.h"
#include "tessera/base/error.h"

namespace tessera {
namespace {

std::optional<int> parse_count(std::string_view text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (count < 1 || count > kMaxWorldSize) return std::nullopt;
  return count;
}

std::vector<int> replicas_of(const Strategy& strategy, int shard) {
  std::vector<int> ranks;
  for (int replica = 0; replica < strategy.num_replicas; ++replica) {
    ranks.push_back(replica * strategy.num_shards + shard);
  }
  return ranks;
}

}  // namespace

Strategy parse_strategy(std::string_view text, int world_size) {
  const auto refuse = [&](std::string_view expected) {
    return Error::expected(ErrorKind::invalid_argument, {}, "strategy", expected, printable(text));
  };
  if (world_size < 0 || world_size > kMaxWorldSize) {
    throw Error::expected(ErrorKind::invalid_argument, {}, "world size",
                          "1 to " + std::to_string(kMaxWorldSize), std::to_string(world_size));
  }
  const int ranks = world_size == 0 ? 1 : world_size;
  if (text == "replicated") return {Strategy::Sharding::replicated, ranks, 1};
  if (text == "flat") return {Strategy::Sharding::flat, 1, ranks};
  if (text == "dim0") return {Strategy::Sharding::dim0, 1, ranks};
  if (text == "dim1") return {Strategy::Sharding::dim1, 1, ranks};

  const std::size_t colon = text.find(':');
  const std::string_view name = text.substr(0, colon);
  if (colon == std::string_view::npos || (name != "hybrid" && name != "hybrid-flat")) {
    throw refuse("replicated, flat, dim0, dim1, hybrid:AxB or hybrid-flat:AxB");
  }
  const std::string_view sizes = text.substr(colon + 1);
  const std::size_t cross = sizes.find('x');
  if (cross == std::string_view::npos) throw refuse(std::string(name) + ":AxB with two numbers");
  const auto num_replicas = parse_count(sizes.substr(0, cross));
  const auto num_shards = parse_count(sizes.substr(cross + 1));
  if (!num_replicas || !num_shards)
    throw refuse(std::string(name) + ":AxB with two numbers of 1 or more");
  const auto product = checked_mul(*num_replicas, *num_shards);
  if (!product || *product > kMaxWorldSize || (world_size != 0 && *product != world_size)) {
    throw refuse(world_size == 0
                     ? "at most " + std::to_string(kMaxWorldSize) + " ranks in total"
                     : "A times B to be " + std::to_string(world_size) + ", the world size");
  }
  const auto sharding = name == "hybrid" ? Strategy::Sharding::dim0 : Strategy::Sharding::flat;
  return {sharding, *num_replicas, *num_shards};
}

std::string strategy_to_string(const Strategy& strategy) {
  const auto name = [&](std::string_view plain, std::string_view hybrid) {
    if (strategy.num_replicas == 1) return std::string(plain);
    return std::string(hybrid) + ":" + std::to_string(strategy.num_replicas) + "x" +
           std::to_string(strategy.num_shards);
  };
  switch (strategy.sharding) {
    case Strategy::Sharding::replicated:
      return "replicated";
    case Strategy::Sharding::flat:
      return name("flat", "hybrid-flat");
    case Strategy::Sharding::dim0:
      return name("dim0", "hybrid");
    case Strategy::Sharding::dim1:
      return "dim1";
  }
  TESSERA_CHECK(false && "unnamed Sharding");
  return {};
}

FlatUnitIndex::FlatUnitIndex(std::span<const FlatUnit> units) {
  for (const FlatUnit& unit : units) {
    for (const FlatUnitParameter& parameter : unit.parameters) {
      places_.emplace(parameter.fqn, Place{&unit, &parameter});
    }
  }
}

const FlatUnitIndex::Place* FlatUnitIndex::find(const std::string& fqn) const {
  const auto it = places_.find(fqn);
  return it == places_.end() ? nullptr : &it->second;
}

namespace {

std::vector<Shard> replicated_on_all(const Strategy& strategy,
                                     std::span<const std::int64_t> shape) {
  std::vector<int> everyone(static_cast<std::size_t>(strategy.world_size()));
  std::iota(everyone.begin(), everyone.end(), 0);
  return {{whole_box(shape), std::move(everyone)}};
}

std::vector<Shard> flat_shards(const Strategy& strategy, const FlatUnitIndex::Place& place) {
  std::vector<Shard> shards;
  for (int shard = 0; shard < strategy.num_shards; ++shard) {
    const FlatRange range =
        shard_of_parameter(*place.unit, *place.parameter, shard, strategy.num_shards);
    if (range.numel() != 0) shards.push_back({range, replicas_of(strategy, shard)});
  }
  return shards;
}

std::vector<Shard> shards_of_dimension(const Strategy& strategy,
                                       std::span<const std::int64_t> shape, std::size_t dimension) {
  std::vector<Shard> shards;
  for (int shard = 0; shard < strategy.num_shards; ++shard) {
    const FlatRange share = chunk_of(shape[dimension], shard, strategy.num_shards);
    if (share.numel() == 0) break;  // the ranks after this one get nothing either
    Box box = whole_box(shape);
    box.offsets[dimension] = share.begin;
    box.sizes[dimension] = share.numel();
    shards.push_back({std::move(box), replicas_of(strategy, shard)});
  }
  return shards;
}

}  // namespace

std::vector<Shard> shards_of(const Strategy& strategy, std::span<const std::int64_t> shape,
                             const FlatUnitIndex::Place* place) {
  if (shape.empty() || numel_of(shape) == 0) return replicated_on_all(strategy, shape);
  switch (strategy.sharding) {
    case Strategy::Sharding::replicated:
      return replicated_on_all(strategy, shape);
    case Strategy::Sharding::flat:
      if (place == nullptr) return replicated_on_all(strategy, shape);
      return flat_shards(strategy, *place);
    case Strategy::Sharding::dim0:
      return shards_of_dimension(strategy, shape, 0);
    case Strategy::Sharding::dim1:
      return shards_of_dimension(strategy, shape, shape.size() > 1 ? 1 : 0);
  }
  TESSERA_CHECK(false && "unnamed Sharding");
  return {};
}

}  // namespace tessera
