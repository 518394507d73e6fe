#include "formats/torch_zip/sharded_tensor.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "base/checked_math.h"
#include "base/list_pool.h"
#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/torch_zip/mesh_region.h"
#include "formats/torch_zip/object_parts.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::Object;
using pickle::ObjectKind;
using pickle::ValueGlobal;

constexpr std::size_t kMaxDims = 64;  // of tensors and meshes

std::optional<std::int64_t> natural_of(const std::optional<Object>& object) {
  if (!object || !object->is(ObjectKind::integer)) return std::nullopt;
  const std::int64_t number = object->as_integer("number");
  return number < 0 ? std::nullopt : std::optional(number);
}

/// Returns the numbers in a tuple, a list or a torch.Size; nothing if it has anything but numbers
/// of 0 or more.
std::optional<Shape> naturals_of(std::optional<Object> object) {
  if (object && object->is(ObjectKind::call) && value_global(*object) == ValueGlobal::torch_size) {
    object = item_of(object->call_arguments("size"), 0);
  }
  if (!object || (!object->is(ObjectKind::tuple) && !object->is(ObjectKind::list))) {
    return std::nullopt;
  }
  const std::size_t num_items = object->num_items("sizes");
  if (num_items > kMaxDims) return std::nullopt;
  Shape numbers;
  for (std::size_t i = 0; i < num_items; ++i) {
    const auto number = natural_of(object->item(i));
    if (!number) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

/// Returns the shape of the whole tensor, from the arguments of `_rebuild_wrapper_subclass`.
std::optional<Shape> whole_shape_of(Object call) {
  return naturals_of(item_of(item_of(call.call_arguments("tensor"), 2), 2));
}

/// Returns the sizes of a mesh, from one of three forms: since torch 2.15 a layout with a flat
/// layout for each axis, before that a layout, and before torch 2.9 a tensor of ranks.
std::optional<Shape> sizes_of_mesh(const std::optional<Object>& mesh) {
  const auto layout = attribute_of(mesh, "_layout");
  if (const auto axes = attribute_of(layout, "axes")) {
    Shape sizes;
    for (std::size_t i = 0; item_of(axes, i) && i < kMaxDims; ++i) {
      const auto shape = naturals_of(attribute_of(item_of(axes, i), "shape"));
      const auto size = shape ? checked_numel(*shape) : std::nullopt;
      if (!size) return std::nullopt;
      sizes.push_back(*size);
    }
    return sizes;
  }
  if (layout) return naturals_of(attribute_of(layout, "shape"));
  const auto ranks = attribute_of(mesh, "mesh");
  if (!ranks || !ranks->is(ObjectKind::call)) return std::nullopt;
  return naturals_of(item_of(ranks->call_arguments("mesh"), 2));
}

/// Returns what one axis of a mesh does to the tensor. Sets `problem` if there is no placement, or
/// one of another kind than Replicate, Shard and _StridedShard. A cut whose `dim` cannot be read
/// gets the dimension `num_dims`, which region_in_mesh refuses.
AxisPlacement placement_of(const std::optional<Object>& placement, std::size_t num_dims,
                           std::string& problem) {
  if (!placement || !placement->is(ObjectKind::call)) {
    problem = "a dimension of the mesh without a placement";
    return {};
  }
  const std::string_view name = placement->global_name("placement");
  if (name == "Replicate") return {};
  if (name != "Shard" && name != "_StridedShard") {
    problem = "a tensor placed " + printable(name, 40) + " (only Shard and Replicate are joined)";
    return {};
  }
  AxisPlacement made{.kind = AxisPlacement::Kind::shard};
  made.dim =
      natural_of(attribute_of(placement, "dim")).value_or(static_cast<std::int64_t>(num_dims));
  if (name == "_StridedShard") {
    made.kind = AxisPlacement::Kind::strided_shard;
    made.split_factor = natural_of(attribute_of(placement, "split_factor")).value_or(0);
  }
  return made;
}

/// Returns the names of a mesh's axes; nothing unless each axis has a name.
std::vector<std::string> names_of_axes(const std::optional<Object>& mesh, std::size_t num_axes) {
  constexpr std::size_t kMaxNbytes = 256;  // of a name
  std::optional<Object> names = attribute_of(mesh, "_mesh_dim_names");
  if (!names) names = attribute_of(mesh, "mesh_dim_names");  // before torch 2.9
  std::vector<std::string> found;
  for (std::size_t i = 0; i < num_axes; ++i) {
    const auto name = item_of(names, i);
    if (!name || !name->is(ObjectKind::str)) return {};
    found.emplace_back(name->as_text("name of an axis").substr(0, kMaxNbytes));
  }
  return found;
}

/// Fills in the mesh of a DTensor and the part of the tensor that this rank holds.
void find_place(const std::optional<Object>& spec, ShardPlace& place) {
  const auto mesh = attribute_of(spec, "mesh");
  const auto sizes = sizes_of_mesh(mesh);
  const auto coordinates = naturals_of(attribute_of(mesh, "_coordinate_on_dim"));
  if (!sizes || !coordinates || sizes->size() != coordinates->size()) {
    place.problem = "a mesh without its sizes or the coordinates of this rank";
    return;
  }
  place.mesh = *sizes;
  const auto placements = attribute_of(spec, "placements");
  if (item_of(placements, sizes->size())) {
    place.problem = "more placements than its mesh has dimensions";
    return;
  }
  std::vector<AxisPlacement> parsed;
  for (std::size_t i = 0; i < sizes->size() && place.problem.empty(); ++i) {
    parsed.push_back(placement_of(item_of(placements, i), place.whole_shape.size(), place.problem));
  }
  if (!place.problem.empty()) return;
  place.coordinates = *coordinates;
  place.axes = names_of_axes(mesh, sizes->size());
  place.placements = parsed;
  MeshRegion found = region_in_mesh(place.whole_shape, *sizes, *coordinates, parsed);
  place.region = std::move(found.region);
  place.problem = std::move(found.problem);
}

std::optional<LocalTensor> local_part_of_dtensor(const std::optional<Object>& state,
                                                 const Shape& whole_shape) {
  const auto tensor = attribute_of(state, "_local_tensor");
  if (!tensor) return std::nullopt;
  const auto spec = attribute_of(state, "_spec");
  LocalTensor local{*tensor, {}, false};
  local.place.whole_shape = whole_shape;
  if (const auto rank = natural_of(attribute_of(attribute_of(spec, "mesh"), "_rank"))) {
    local.place.rank = static_cast<int>(std::min<std::int64_t>(*rank, INT32_MAX));
  }
  find_place(spec, local.place);
  return local;
}

std::optional<LocalTensor> local_part_of_sharded_tensor(const std::optional<Object>& state,
                                                        const Shape& whole_shape) {
  const auto shards = item_of(state, 0);  // the shards of this rank
  const auto shard = item_of(shards, 0);
  const auto tensor = attribute_of(shard, "tensor");
  if (!tensor || item_of(shards, 1)) return std::nullopt;
  LocalTensor local{*tensor, {}, false};
  local.place.whole_shape = whole_shape;
  const auto metadata = attribute_of(shard, "metadata");
  const auto offsets = naturals_of(attribute_of(metadata, "shard_offsets"));
  const auto sizes = naturals_of(attribute_of(metadata, "shard_sizes"));
  if (offsets && sizes) {
    local.place.region = {*offsets, *sizes};
    if (const auto error = region_error(local.place.region, whole_shape)) {
      local.place.problem = *error;
    }
  } else {
    local.place.problem = "a shard without offsets and sizes";
  }
  return local;
}

}  // namespace

SharedPlace PlacePool::share(ShardPlace place) {
  std::uint64_t hash = place.whole_shape.size();
  for (const Shape* shape : {&place.whole_shape, &place.region.offsets, &place.region.sizes}) {
    for (const std::int64_t size : *shape) {
      hash = tessera::detail::mix_hash(hash, static_cast<std::uint64_t>(size));
    }
  }
  if (slots_.empty()) slots_.resize(kNumSlots);
  SharedPlace& slot = slots_[(hash >> 32) % kNumSlots];
  if (slot == nullptr || *slot != place) {
    slot = std::make_shared<const ShardPlace>(std::move(place));
  }
  return slot;
}

std::optional<LocalTensor> local_tensor(Object call, Object type) {
  const std::string name = pickle::foreign_name(type);
  if (!name.starts_with("torch.distributed.")) return std::nullopt;
  const std::optional<Object> state = item_of(call.call_arguments("tensor"), 3);
  const std::optional<Shape> whole_shape = whole_shape_of(call);
  if (!whole_shape) return std::nullopt;
  std::optional<LocalTensor> local;
  if (name.ends_with(".DTensor")) local = local_part_of_dtensor(state, *whole_shape);
  if (name.ends_with(".ShardedTensor")) local = local_part_of_sharded_tensor(state, *whole_shape);
  constexpr std::size_t kRequiresGrad = 7;  // its index among the arguments
  const auto flag = item_of(item_of(call.call_arguments("tensor"), 2), kRequiresGrad);
  if (local && flag && flag->is(ObjectKind::boolean)) {
    local->requires_grad = flag->as_boolean("requires_grad");
  }
  return local;
}

}  // namespace tessera::formats::torch_zip
