#pragma once

#include <compare>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/pickle/pickle_object.h"
#include "formats/torch_zip/mesh_region.h"
#include "tessera/layout/region.h"

// DTensor and ShardedTensor, the tensors of torch.distributed of which each rank holds a part.
namespace tessera::formats::torch_zip {

/// Where a rank's part is in the whole tensor.
struct ShardPlace {
  Shape whole_shape;
  Box region;                     // of the part; meaningless if there is a `problem`
  Shape mesh;                     // the sizes of a DTensor's mesh; empty for a ShardedTensor
  Shape coordinates;              // of the rank in the mesh
  std::vector<std::string> axes;  // names of the mesh's axes, if it has names
  std::vector<AxisPlacement> placements;  // indexed by axis of the mesh
  std::optional<int> rank;                // the rank that saved the part, if the tensor says so
  std::string problem;                    // why the region is not known; empty if it is known

  friend bool operator==(const ShardPlace&, const ShardPlace&) = default;
  friend auto operator<=>(const ShardPlace&, const ShardPlace&) = default;
};

/// The place of a rank's part, or null for an ordinary tensor. Shared, because most tensors of a
/// model have one of few shapes, and the parts that a rank has of them then have equal places.
using SharedPlace = std::shared_ptr<const ShardPlace>;

/// Makes equal places share memory, as far as its hash table remembers them: each of the kNumSlots
/// slots holds only its last place. Not thread-safe.
class PlacePool {
 public:
  /// Returns a place that is equal to `place`: an earlier one, if the pool still remembers it.
  SharedPlace share(ShardPlace place);

 private:
  static constexpr std::size_t kNumSlots = 1024;

  std::vector<SharedPlace> slots_;
};

/// The part of a DTensor or a ShardedTensor that one rank holds: a tensor, and its place.
struct LocalTensor {
  pickle::Object tensor;
  ShardPlace place;
  bool requires_grad = false;

  /// Whether the part is the whole tensor.
  bool is_whole() const {
    return place.problem.empty() && place.region == whole_box(place.whole_shape);
  }
};

/// Returns the local tensor in a DTensor or ShardedTensor. `call`: the pickled call of
/// `_rebuild_from_type_v2`. `type`: the class that it makes. Returns nothing for another class, or
/// if the rank holds no shard or several.
///
/// A DTensor names its mesh, this rank's coordinates in it, and a placement for each dimension of
/// the mesh (`region_in_mesh`). A ShardedTensor states the offsets of its shards. Source: DTensors
/// as torch 2.11 and 2.15 pickle them.
std::optional<LocalTensor> local_tensor(pickle::Object call, pickle::Object type);

}  // namespace tessera::formats::torch_zip
