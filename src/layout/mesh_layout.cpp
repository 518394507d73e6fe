#include "tessera/layout/strategy.h"

#include <algorithm>
#include <charconv>
#include <functional>
#include <iterator>
#include <numeric>
#include <utility>

#include "base/json.h"
#include "base/word_list.h"
#include "layout/cut.h"
#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"

namespace tessera {
namespace {

constexpr std::string_view kPlacements = "Replicate, Shard(dimension) or Stage(index)";
constexpr int kMaxAxes = 8;
constexpr int kMaxDimension = 64;

/// A reader of the file. Errors name the file and, as soon as it is known, the rule.
class MeshJson {
 public:
  explicit MeshJson(const std::string& path) : path_(path) {}

  MeshLayout read(const Value& file) {
    require_members(file, {"schema", "mesh", "rules"});
    const auto* schema = file.find("schema")->get_if<std::int64_t>();
    if (schema == nullptr || *schema != 1) refuse("schema", "1", *file.find("schema"));
    MeshLayout layout;
    layout.path = path_;
    layout.shape = axes(*file.find("mesh"));
    const auto* rules = file.find("rules")->get_if<Value::List>();
    if (rules == nullptr || rules->empty()) {
      refuse("rules", "a list of one rule or more", *file.find("rules"));
    }
    for (const Value& each : *rules) {
      rule_ = "rule " + std::to_string(layout.rules.size()) + ": ";
      layout.rules.push_back(rule(each, layout.shape));
    }
    return layout;
  }

 private:
  [[noreturn]] void refuse(std::string_view what, std::string_view expected,
                           const std::string& found) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, rule_ + std::string(what),
                          expected, found);
  }
  [[noreturn]] void refuse(std::string_view what, std::string_view expected,
                           const Value& found) const {
    refuse(what, expected, value_to_string(found));
  }

  void require_members(const Value& object, std::initializer_list<std::string_view> names) const {
    const auto* dict = object.get_if<Value::Dict>();
    if (dict == nullptr) refuse("mesh layout", "an object", object);
    for (const auto& [key, value] : *dict) {
      const auto* name = key.get_if<std::string>();
      if (name == nullptr || std::ranges::find(names, *name) == names.end()) {
        refuse("members", "only " + tessera::detail::list_of(names), key);
      }
    }
    for (const std::string_view name : names) {
      if (object.find(name) == nullptr) refuse(name, "a member of this name", std::string("none"));
    }
  }

  std::vector<int> axes(const Value& value) const {
    const auto* sizes = value.get_if<Value::List>();
    if (sizes == nullptr || sizes->empty() || sizes->size() > kMaxAxes) {
      refuse("mesh", "a list of 1 to " + std::to_string(kMaxAxes) + " sizes", value);
    }
    std::vector<int> axes;
    int world_size = 1;
    for (const Value& each : *sizes) {
      const auto* size = each.get_if<std::int64_t>();
      if (size == nullptr || *size < 1 || *size > kMaxWorldSize / world_size) {
        refuse("mesh",
               "sizes of 1 or more, whose product is at most " + std::to_string(kMaxWorldSize),
               value);
      }
      axes.push_back(static_cast<int>(*size));
      world_size *= axes.back();
    }
    return axes;
  }

  MeshLayout::Rule rule(const Value& value, const std::vector<int>& mesh) const {
    require_members(value, {"names", "placements"});
    const auto* names = value.find("names")->get_if<std::string>();
    if (names == nullptr) refuse("names", "a pattern", *value.find("names"));
    const Value& list = *value.find("placements");
    const auto* placements = list.get_if<Value::List>();
    if (placements == nullptr || placements->size() != mesh.size()) {
      refuse("placements", "a list of " + std::to_string(mesh.size()) + ", one for each axis",
             list);
    }
    MeshLayout::Rule rule{*names, {}};
    for (std::size_t axis = 0; axis < mesh.size(); ++axis) {
      rule.placements.push_back(placement((*placements)[axis], mesh[axis]));
    }
    return rule;
  }

  MeshPlacement placement(const Value& value, int num_indices) const {
    const auto* text = value.get_if<std::string>();
    if (text == nullptr) refuse("placement", kPlacements, value);
    if (*text == "Replicate") return {};
    using Kind = MeshPlacement::Kind;
    for (const auto& [word, kind] : {std::pair("Shard(", Kind::shard), {"Stage(", Kind::stage}}) {
      std::string_view rest = *text;
      if (!rest.starts_with(word) || !rest.ends_with(")")) continue;
      rest.remove_prefix(std::string_view(word).size());
      rest.remove_suffix(1);
      int number = -1;
      const auto [end, error] = std::from_chars(rest.data(), rest.data() + rest.size(), number);
      if (error != std::errc{} || end != rest.data() + rest.size()) break;
      const int bound = kind == Kind::stage ? num_indices : kMaxDimension;
      if (number < 0 || number >= bound) {
        refuse("placement", "a number from 0 to " + std::to_string(bound - 1), value);
      }
      return {kind, number};
    }
    refuse("placement", kPlacements, value);
  }

  const std::string& path_;
  std::string rule_;
};

/// Cuts or copies `shard` along one axis of the mesh, and returns the resulting shards. `shard` is
/// a result for the later axes; its ranks have index 0 on this axis. `stride`: the difference
/// between two ranks whose indices on the axis differ by one.
std::vector<Shard> along_axis(const Shard& shard, const MeshPlacement& placement, int num_indices,
                              int stride) {
  const auto add_ranks = [&](std::vector<int>& to, int index) {
    for (const int rank : shard.ranks) to.push_back(rank + index * stride);
  };
  std::vector<Shard> shards;
  if (placement.kind == MeshPlacement::Kind::shard) {
    const auto dimension = static_cast<std::size_t>(placement.number);
    for (int index = 0; index < num_indices; ++index) {
      Box box = std::get<Box>(shard.region);
      const FlatRange share = chunk_of(box.sizes[dimension], index, num_indices);
      if (share.numel() == 0) break;  // the ranks after this one get nothing either
      box.offsets[dimension] += share.begin;
      box.sizes[dimension] = share.numel();
      shards.push_back({std::move(box), {}});
      add_ranks(shards.back().ranks, index);
    }
    return shards;
  }
  shards.push_back({shard.region, {}});
  if (placement.kind == MeshPlacement::Kind::stage) {
    add_ranks(shards.back().ranks, placement.number);
  } else {
    for (int index = 0; index < num_indices; ++index) add_ranks(shards.back().ranks, index);
  }
  return shards;
}

}  // namespace

int MeshLayout::world_size() const {
  return std::accumulate(shape.begin(), shape.end(), 1, std::multiplies<>());
}

MeshLayout MeshLayout::from_json(std::string_view text, const std::string& path) {
  return MeshJson(path).read(parse_json(text, path));
}

MeshLayout::RuleChoice MeshLayout::choose_rule(std::string_view name,
                                               std::span<const std::int64_t> tensor_shape) const {
  if (tensor_shape.empty() || numel_of(tensor_shape) == 0) return {};
  const auto rule =
      std::ranges::find_if(rules, [&](const Rule& each) { return glob_match(each.names, name); });
  if (rule == rules.end())
    return {nullptr, "a rule whose names match, such as a last rule for *", "none"};
  for (const MeshPlacement& placement : rule->placements) {
    if (placement.kind == MeshPlacement::Kind::shard &&
        placement.number >= static_cast<int>(tensor_shape.size())) {
      return {
          &*rule, "a dimension of the shape " + shape_to_string(tensor_shape),
          "Shard(" + std::to_string(placement.number) + ") for '" + printable(rule->names) + "'"};
    }
  }
  return {&*rule};
}

std::vector<Shard> MeshLayout::shards_of(std::string_view name,
                                         std::span<const std::int64_t> tensor_shape) const {
  const auto [rule, expected, found] = choose_rule(name, tensor_shape);
  if (!expected.empty()) {
    throw Error::expected(ErrorKind::invalid_argument, {.path = path, .fqn = std::string(name)},
                          "rules of the mesh", expected, found);
  }
  if (rule == nullptr) {
    return tessera::shards_of({Strategy::Sharding::replicated, world_size(), 1}, tensor_shape);
  }
  std::vector<Shard> shards{{whole_box(tensor_shape), {0}}};
  int stride = 1;
  for (std::size_t axis = shape.size(); axis-- > 0;) {  // the last axis varies fastest
    std::vector<Shard> cut;
    for (const Shard& shard : shards) {
      std::ranges::move(along_axis(shard, rule->placements[axis], shape[axis], stride),
                        std::back_inserter(cut));
    }
    shards = std::move(cut);
    stride *= shape[axis];
  }
  std::ranges::sort(shards, {}, &Shard::region);
  return shards;
}

}  // namespace tessera
