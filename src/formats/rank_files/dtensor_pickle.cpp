#include "formats/rank_files/dtensor_pickle.h"

#include <algorithm>

#include "formats/torch_zip/torch_save_layout.h"
#include "layout/cut.h"

namespace tessera::formats::rank_files {
namespace {

using pickle::Pickler;

constexpr std::string_view kSpecModule = "torch.distributed.tensor._dtensor_spec";
constexpr std::string_view kPlacementModule = "torch.distributed.tensor.placement_types";

template <class Numbers>
void push_tuple(Pickler& pickler, const Numbers& numbers) {
  if (std::empty(numbers)) return pickler.empty_tuple();
  pickler.mark();
  for (const std::int64_t number : numbers) pickler.integer(number);
  pickler.tuple_from_mark();
}

/// Writes the beginning of an object whose attributes are a dict. The opcode BUILD ends the object
/// (end_object).
void begin_object(Pickler& pickler, std::string_view module, std::string_view name) {
  pickler.global(module, name);
  pickler.empty_tuple();
  pickler.new_object();
  pickler.empty_dict();
  pickler.mark();
}

void end_object(Pickler& pickler) {
  pickler.set_items_from_mark();
  pickler.build();
}

/// Returns the sizes of the mesh's axes.
std::vector<std::int64_t> mesh_sizes(const DTensorCut& cut) {
  if (cut.num_replicas == 1) return {cut.num_shards};
  return {cut.num_replicas, cut.num_shards};
}

}  // namespace

Box DTensorCut::region_of(int rank, std::span<const std::int64_t> shape) const {
  Box box = whole_box(shape);
  const FlatRange share = chunk_of(shape[dim], rank % num_shards, num_shards);
  box.offsets[dim] = share.begin;
  box.sizes[dim] = share.numel();
  return box;
}

void DTensorPickler::push(Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                          const DTensorCut& cut, std::string_view storage) {
  pickler.global("torch._tensor", "_rebuild_from_type_v2");
  pickler.mark();
  pickler.global("torch._utils", "_rebuild_wrapper_subclass");
  pickler.global("torch.distributed.tensor", "DTensor");
  push_wrapper_arguments(pickler, dtype, shape);
  pickler.none();
  pickler.empty_dict();
  pickler.mark();
  pickler.interned("_local_tensor");
  torch_zip::pickle_tensor(pickler, dtype, cut.region_of(rank_, shape).sizes, storage);
  pickler.interned("_spec");
  push_spec(pickler, dtype, shape, cut);
  pickler.set_items_from_mark();
  pickler.tuple2();
  pickler.tuple_from_mark();
  pickler.reduce();
}

void DTensorPickler::push_wrapper_arguments(Pickler& pickler, DType dtype,
                                            std::span<const std::int64_t> shape) {
  pickler.mark();
  pickler.global("torch.distributed.tensor", "DTensor");
  pickler.global("torch", dtype_name(dtype));
  push_tuple(pickler, shape);
  push_tuple(pickler, row_major_strides(shape));
  pickler.integer(0);  // storage offset
  pickler.global("torch.serialization", "_get_layout");
  pickler.interned("torch.strided");
  pickler.tuple1();
  pickler.reduce();
  // The device of the local part is always the CPU, whatever the mesh's device is: PyTorch moves
  // the part when it loads it.
  pickler.global("torch", "device");
  pickler.interned("cpu");
  pickler.tuple1();
  pickler.reduce();
  pickler.boolean(false);  // requires_grad
  pickler.tuple_from_mark();
}

void DTensorPickler::push_spec(Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                               const DTensorCut& cut) {
  begin_object(pickler, kSpecModule, "DTensorSpec");
  pickler.interned("mesh");
  push_mesh(pickler, cut);
  pickler.interned("placements");
  push_placements(pickler, cut);
  pickler.interned("tensor_meta");
  pickler.global(kSpecModule, "TensorMeta");
  pickler.mark();
  pickler.global("torch", "Size");
  push_tuple(pickler, shape);
  pickler.tuple1();
  pickler.reduce();
  push_tuple(pickler, row_major_strides(shape));
  pickler.global("torch", dtype_name(dtype));
  pickler.tuple_from_mark();
  pickler.new_object();
  pickler.interned("shard_order");
  pickler.global(kSpecModule, "ShardOrderEntry");
  pickler.integer(static_cast<std::int64_t>(cut.dim));
  pickler.integer(cut.num_replicas == 1 ? 0 : 1);  // the axis of the mesh
  pickler.tuple1();
  pickler.tuple2();
  pickler.new_object();
  pickler.tuple1();
  pickler.interned("use_strided_shard_as_shard_order");
  pickler.boolean(false);
  pickler.interned("_hash");
  pickler.none();
  end_object(pickler);
}

void DTensorPickler::push_mesh(Pickler& pickler, const DTensorCut& cut) {
  const auto pushed = std::ranges::find_if(meshes_, [&](const PushedMesh& mesh) {
    return mesh.num_replicas == cut.num_replicas && mesh.num_shards == cut.num_shards;
  });
  if (pushed != meshes_.end()) return pickler.get(pushed->memo);
  const std::vector<std::int64_t> sizes = mesh_sizes(cut);
  const std::int64_t num_ranks = std::int64_t{cut.num_replicas} * cut.num_shards;
  begin_object(pickler, "torch.distributed.device_mesh", "DeviceMesh");
  pickler.interned("_device_type");
  pickler.text(mesh_.device_type);
  pickler.interned("_layout");
  push_layout(pickler, sizes);
  pickler.interned("_rank_map");
  torch_zip::pickle_tensor(pickler, DType::int32, std::span(&num_ranks, 1), ranks_storage_);
  pickler.interned("_mesh_dim_names");
  if (mesh_.dim_names.size() == sizes.size()) {
    pickler.mark();
    for (const std::string& name : mesh_.dim_names) pickler.text(name);
    pickler.tuple_from_mark();
  } else {
    pickler.none();
  }
  pickler.interned("_root_mesh");
  pickler.none();
  pickler.interned("_flatten_rank_map");
  pickler.mark();
  for (std::int64_t rank = 0; rank < num_ranks; ++rank) pickler.integer(rank);
  pickler.tuple_from_mark();
  pickler.interned("_thread_id");
  pickler.none();
  pickler.interned("_flatten_mapping");
  pickler.empty_dict();
  if (sizes.size() == 1) {  // the group of all ranks; smaller groups have no fixed names
    pickler.interned("_dim_group_names");
    pickler.empty_list();
    pickler.text("0");
    pickler.append();
  }
  pickler.interned("_rank");
  pickler.integer(rank_);
  pickler.interned("_coordinate_on_dim");
  if (sizes.size() == 1) {
    pickler.integer(rank_);
    pickler.tuple1();
  } else {
    pickler.integer(rank_ / cut.num_shards);
    pickler.integer(rank_ % cut.num_shards);
    pickler.tuple2();
  }
  end_object(pickler);
  meshes_.push_back({cut.num_replicas, cut.num_shards, pickler.memoize()});
}

void DTensorPickler::push_layout(Pickler& pickler, const std::vector<std::int64_t>& sizes) {
  begin_object(pickler, "torch.distributed._mesh_layout", "_MeshLayout");
  pickler.interned("shape");
  push_tuple(pickler, sizes);
  pickler.interned("stride");
  push_tuple(pickler, row_major_strides(sizes));
  end_object(pickler);
}

void DTensorPickler::push_placements(Pickler& pickler, const DTensorCut& cut) {
  pickler.mark();
  if (cut.num_replicas != 1) {
    // The empty state is needed: torch's class makes its C++ object when the state is set.
    begin_object(pickler, kPlacementModule, "Replicate");
    end_object(pickler);
  }
  begin_object(pickler, kPlacementModule, "Shard");
  pickler.interned("dim");
  pickler.integer(static_cast<std::int64_t>(cut.dim));
  end_object(pickler);
  pickler.tuple_from_mark();
}

std::string ranks_storage_bytes(int world_size) {
  std::string bytes;
  for (int rank = 0; rank < world_size; ++rank) {
    for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(rank >> shift);
  }
  return bytes;
}

}  // namespace tessera::formats::rank_files
