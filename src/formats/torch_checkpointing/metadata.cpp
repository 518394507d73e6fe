#include "formats/torch_checkpointing/metadata.h"

#include <algorithm>
#include <limits>

#include "base/checked_math.h"
#include "base/json.h"
#include "formats/pickle/plain_value.h"
#include "formats/pickle/unpickler.h"
#include "tessera/base/error.h"

namespace tessera::formats::torch_checkpointing {
namespace {

using pickle::Object;
using pickle::ObjectKind;
using torch_zip::AxisPlacement;
using torch_zip::ShardPlace;

constexpr std::uint64_t kMaxMetadataNbytes = std::uint64_t{1} << 30;
constexpr std::int64_t kMaxRanks = 1 << 20;
constexpr std::size_t kMaxDims = 64;  // of tensors and meshes
constexpr std::string_view kDTensorType = "DTensorShardingMetadata";
constexpr std::string_view kOffsetsType = "default_tensor_v1";

const pickle::AllowList& allowed_globals() {
  static const pickle::AllowList allowed{pickle::value_globals()};
  return allowed;
}

/// Turns the objects of the pickle into a Metadata. Large objects that the pickle refers to several
/// times are parsed once. A budget limits the work for a hostile file.
class Parser {
 public:
  Parser(const pickle::ObjectGraph& graph, std::string path)
      : path_(std::move(path)), budget_(graph) {}

  Metadata parse(Object root) {
    const Object version = member(root, "version");
    if (!version.is(ObjectKind::str) || version.as_text("version") != "2.0") {
      version.fail(ErrorKind::unsupported,
                   "version: expected 2.0, found " + version.describe() +
                       " (written by another version of torch_checkpointing?)");
    }
    Metadata metadata;
    metadata.world_size =
        static_cast<int>(number(member(root, "world_size"), "world_size", 1, kMaxRanks));
    world_size_ = metadata.world_size;
    const Object items = dict_member(root, "metadata");
    for (std::size_t i = 0; i < items.num_entries("metadata"); ++i) {
      metadata.items.emplace(text(items.entry_key(i), "item"), item(items.entry_value(i)));
    }
    return metadata;
  }

 private:
  /// Returns the value under a key of a dict.
  Object member(Object dict, std::string_view key) {
    if (!dict.is(ObjectKind::dict))
      dict.fail_expected("object with the key '" + std::string(key) + "'", "a dict");
    budget_.spend(dict, dict.num_entries(key) + 16);
    const auto found = dict.find(key);
    if (!found) {
      dict.fail(ErrorKind::corruption,
                "dict: expected the key '" + std::string(key) + "', found none");
    }
    return *found;
  }
  Object dict_member(Object dict, std::string_view key) {
    const Object found = member(dict, key);
    if (!found.is(ObjectKind::dict)) found.fail_expected(key, "a dict");
    return found;
  }
  static std::int64_t number(Object object, std::string_view rule, std::int64_t min,
                             std::int64_t max) {
    const std::int64_t found = object.as_integer(rule);
    if (found >= min && found <= max) return found;
    object.fail(ErrorKind::corruption, std::string(rule) + ": expected " + std::to_string(min) +
                                           " to " + std::to_string(max) + ", found " +
                                           std::to_string(found));
  }
  std::string text(Object object, std::string_view rule) {
    std::string found(object.as_str(rule));
    budget_.spend(object, found.size() + 16);
    return found;
  }

  Shape sizes(Object object, std::string_view rule) {
    const std::size_t num_items = object.num_items(rule);
    if (num_items > kMaxDims) {
      object.fail(ErrorKind::corruption, std::string(rule) + ": expected at most " +
                                             std::to_string(kMaxDims) + " dimensions, found " +
                                             std::to_string(num_items));
    }
    budget_.spend(object, 16 * num_items + 16);
    Shape found;
    for (std::size_t i = 0; i < num_items; ++i) {
      found.push_back(number(object.item(i), rule, 0, std::numeric_limits<std::int64_t>::max()));
    }
    return found;
  }

  Item item(Object object) {
    Item made;
    const Object tensors = dict_member(object, "nested_path_to_metadata");
    for (std::size_t i = 0; i < tensors.num_entries("nested_path_to_metadata"); ++i) {
      add_tensor(made, tensors.entry_key(i), tensors.entry_value(i));
    }
    const Object files = dict_member(object, "rank_to_layout_info");
    made.files.resize(files.num_entries("rank_to_layout_info"));
    if (made.files.size() != static_cast<std::size_t>(world_size_)) {
      files.fail(ErrorKind::corruption, "rank_to_layout_info: expected an entry for each of " +
                                            std::to_string(world_size_) + " ranks, found " +
                                            std::to_string(made.files.size()));
    }
    for (std::size_t i = 0; i < made.files.size(); ++i) {
      const auto rank = static_cast<std::size_t>(
          number(files.entry_key(i), "rank", 0, std::int64_t{world_size_} - 1));
      const Object layout = files.entry_value(i);
      if (layout.is(ObjectKind::none)) continue;  // the file has its default name
      made.files[rank] = {text(member(layout, "file_path"), "file_path"),
                          text(member(member(layout, "serialization_format"), "type"), "type")};
      if (!is_contained_path(made.files[rank].path)) {
        layout.fail(ErrorKind::corruption,
                    "file_path: expected a path inside the checkpoint, found '" +
                        printable(made.files[rank].path) + "'");
      }
    }
    return made;
  }

  /// Adds a tensor. `key` is its path as JSON: `["state","up.weight","exp_avg"]`.
  void add_tensor(Item& to, Object key, Object groups) {
    const Value parsed = parse_json(text(key, "path of a tensor"), path_);
    const auto* const keys = parsed.get_if<Value::List>();
    if (keys == nullptr) key.fail_expected("path of a tensor", "a list as JSON");
    KeyPath path;
    bool has_number = false;
    for (const Value& each : *keys) {
      if (const auto* const name = each.get_if<std::string>()) {
        path.emplace_back(*name);
      } else if (const auto* const position = each.get_if<std::int64_t>()) {
        path.emplace_back(*position);
        has_number = true;  // list position or dict key; the file does not record which
      } else {
        key.fail_expected("path of a tensor", "texts and numbers");
      }
    }
    Item::Tensor tensor;
    std::string name = spell(path);
    if (!has_number && path.size() > 1) tensor.path = std::move(path);
    for (std::size_t i = 0; i < groups.num_items("groups of ranks"); ++i) {
      const Object group = groups.item(i);
      tensor.groups.push_back(
          {ranks(member(group, "ranks")), sharding(member(group, "sharding_metadata"))});
    }
    const auto [found, is_new] = to.tensors.emplace(std::move(name), std::move(tensor));
    if (!is_new) {
      key.fail(ErrorKind::unsupported, "path of a tensor: expected each name once, found '" +
                                           printable(found->first) + "' for two paths");
    }
  }

  std::shared_ptr<const std::vector<int>> ranks(Object object) {
    auto& known = ranks_[object.id()];
    if (known) return known;
    std::vector<int> made;
    for (std::size_t i = 0; i < object.num_items("ranks"); ++i) {
      made.push_back(rank(object.item(i)));
    }
    std::ranges::sort(made);
    known = std::make_shared<const std::vector<int>>(std::move(made));
    return known;
  }
  int rank(Object object) const {
    return static_cast<int>(number(object, "rank", 0, std::int64_t{world_size_} - 1));
  }

  Sharding sharding(Object object) {
    Sharding made;
    made.type = text(member(object, "type"), "type");
    const Object data = member(object, "data");
    if (made.type != kDTensorType && made.type != kOffsetsType) return made;
    made.whole_shape = sizes(member(data, "global_shape"), "global_shape");
    made.dtype = text(member(data, "dtype"), "dtype");
    if (made.type == kDTensorType) {
      made.kind = Sharding::Kind::mesh;
      made.mesh = mesh(member(data, "mesh_spec"));
      made.placements = placements(member(data, "placements"), made.mesh->sizes.size());
    } else {
      made.kind = Sharding::Kind::offsets;
      add_boxes(made, data);
    }
    return made;
  }

  std::shared_ptr<const Mesh> mesh(Object object) {
    auto& known = meshes_[object.id()];
    if (known) return known;
    Mesh made;
    made.sizes = sizes(member(object, "mesh_shape"), "mesh_shape");
    const Object ranks = member(object, "mesh_data");
    const std::size_t num_ranks = ranks.num_items("mesh_data");
    if (checked_numel(made.sizes) != static_cast<std::int64_t>(num_ranks)) {
      ranks.fail(ErrorKind::corruption, "mesh_data: expected as many ranks as the mesh " +
                                            shape_to_string(made.sizes) + " has, found " +
                                            std::to_string(num_ranks));
    }
    for (std::size_t i = 0; i < num_ranks; ++i) {
      made.places.emplace_back(rank(ranks.item(i)), static_cast<std::int64_t>(i));
    }
    std::ranges::sort(made.places);
    made.axes = names_of_axes(member(object, "mesh_dim_names"), made.sizes.size());
    const auto twice = std::ranges::adjacent_find(
        made.places, {}, [](const std::pair<int, std::int64_t>& place) { return place.first; });
    if (twice != made.places.end()) {
      ranks.fail(ErrorKind::corruption, "mesh_data: expected each rank once, found rank " +
                                            std::to_string(twice->first) + " twice");
    }
    known = std::make_shared<const Mesh>(std::move(made));
    return known;
  }

  std::vector<std::string> names_of_axes(Object object, std::size_t num_axes) {
    if (object.is(ObjectKind::none) || object.num_items("mesh_dim_names") != num_axes) return {};
    std::vector<std::string> names;
    for (std::size_t i = 0; i < num_axes; ++i) names.push_back(text(object.item(i), "axis"));
    return names;
  }

  std::vector<AxisPlacement> placements(Object object, std::size_t num_axes) {
    if (object.num_items("placements") != num_axes) {
      object.fail(ErrorKind::corruption,
                  "placements: expected one for each of " + std::to_string(num_axes) +
                      " axes of the mesh, found " + std::to_string(object.num_items("placements")));
    }
    budget_.spend(object, 32 * num_axes + 16);
    std::vector<AxisPlacement> made;
    for (std::size_t i = 0; i < num_axes; ++i) {
      const Object each = object.item(i);
      const Object type = member(each, "type");
      const std::string_view name = type.as_str("type");
      AxisPlacement& placement = made.emplace_back();
      if (name == "Replicate") continue;
      if (name != "Shard" && name != "StridedShard") {
        type.fail(ErrorKind::unsupported,
                  "placement: expected Shard, StridedShard or Replicate, found '" +
                      printable(name, 40) + "'");
      }
      placement.kind = AxisPlacement::Kind::shard;
      placement.dim = number(member(each, "dim"), "dim", 0, kMaxDims);
      if (name == "StridedShard") {
        placement.kind = AxisPlacement::Kind::strided_shard;
        placement.split_factor = number(member(each, "split_factor"), "split_factor", 1, kMaxRanks);
      }
    }
    return made;
  }

  void add_boxes(Sharding& to, Object data) {
    const Object global = member(data, "global_offsets");
    const Object local = member(data, "local_offsets");
    const Object extents = member(data, "local_sizes");
    const std::size_t num_boxes = global.num_items("global_offsets");
    if (local.num_items("local_offsets") != num_boxes ||
        extents.num_items("local_sizes") != num_boxes) {
      data.fail(ErrorKind::corruption,
                "shards: expected global_offsets, local_offsets and local_sizes of equal lengths");
    }
    for (std::size_t i = 0; i < num_boxes; ++i) {
      const Shape extent = sizes(extents.item(i), "local_sizes");
      to.of_whole.push_back({sizes(global.item(i), "global_offsets"), extent});
      to.of_local.push_back({sizes(local.item(i), "local_offsets"), extent});
      if (const auto error = region_error(to.of_whole.back(), to.whole_shape)) {
        extents.item(i).fail(ErrorKind::corruption, "shard: " + *error);
      }
    }
  }

  std::string path_;
  pickle::WalkBudget budget_;
  int world_size_ = 1;
  std::map<std::uint32_t, std::shared_ptr<const std::vector<int>>> ranks_;  // key: id of the object
  std::map<std::uint32_t, std::shared_ptr<const Mesh>> meshes_;             // key: id of the object
};

}  // namespace

std::optional<Shape> Mesh::coordinates_of(int rank) const {
  const auto found = std::ranges::lower_bound(places, std::pair{rank, std::int64_t{0}});
  if (found == places.end() || found->first != rank) return std::nullopt;
  Shape coordinates(sizes.size());
  std::int64_t rest = found->second;
  for (std::size_t axis = sizes.size(); axis-- > 0;) {
    coordinates[axis] = rest % sizes[axis];
    rest /= sizes[axis];
  }
  return coordinates;
}

bool Sharding::is_replicated() const {
  return kind == Kind::mesh && std::ranges::all_of(placements, [](const AxisPlacement& placement) {
           return placement.kind == AxisPlacement::Kind::replicate;
         });
}

ShardPlace Sharding::place_of(int rank) const {
  ShardPlace place;
  place.whole_shape = whole_shape;
  if (kind == Kind::offsets) {
    if (of_whole.size() == 1 && of_local[0] == whole_box(of_local[0].sizes)) {
      place.region = of_whole[0];
    } else {
      place.problem = std::to_string(of_whole.size()) + " shards in one tensor";
    }
    return place;
  }
  place.mesh = mesh->sizes;
  const auto coordinates = mesh->coordinates_of(rank);
  if (!coordinates) {
    place.problem = "a mesh without rank " + std::to_string(rank);
    return place;
  }
  place.coordinates = *coordinates;
  place.axes = mesh->axes;
  place.placements = placements;
  torch_zip::MeshRegion found =
      torch_zip::region_in_mesh(whole_shape, mesh->sizes, *coordinates, placements);
  place.region = std::move(found.region);
  place.problem = std::move(found.problem);
  return place;
}

bool Group::has(int rank) const {
  return std::ranges::binary_search(*ranks, rank);
}

const Group* Item::find(const std::string& tensor, int rank) const {
  const auto found = tensors.find(tensor);
  if (found == tensors.end()) return nullptr;
  for (const Group& group : found->second.groups) {
    if (group.has(rank)) return &group;
  }
  return nullptr;
}

Metadata read_metadata(const FileSystem& fs, const std::string& path) {
  const std::string content = read_file(fs, path, kMaxMetadataNbytes);
  const pickle::ObjectGraph graph =
      pickle::unpickle({content.begin(), content.end()}, {.path = path}, allowed_globals(),
                       {.policy = pickle::ForeignGlobals::Policy::record});
  return Parser(graph, path).parse(graph.root());
}

}  // namespace tessera::formats::torch_checkpointing
