#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/pickle/pickler.h"
#include "tessera/base/dtype.h"
#include "tessera/base/shape.h"
#include "tessera/formats/create.h"
#include "tessera/layout/region.h"

namespace tessera::formats::rank_files {

/// How a DTensor is cut. There are `num_replicas` copies; in each copy, `num_shards` ranks cut
/// dimension `dim` as torch.chunk does. With one replica, the mesh has one axis and the placement
/// is Shard(dim). With more, it has two axes, with the placements Replicate and Shard(dim).
struct DTensorCut {
  std::size_t dim = 0;
  int num_replicas = 1;
  int num_shards = 1;

  /// Returns the box of the tensor that one rank holds; it may have no elements.
  Box region_of(int rank, std::span<const std::int64_t> shape) const;
  friend bool operator==(const DTensorCut&, const DTensorCut&) = default;
};

/// Writes DTensors into the pickle of one rank's file, as `torch.save` of torch 2.11 pickles them.
/// The file needs an additional storage with the numbers of all ranks (`ranks_storage_bytes`),
/// which the pickled DeviceMesh refers to. Keeps a view of `mesh`, which must outlive this. Not
/// thread-safe.
class DTensorPickler {
 public:
  /// `ranks_storage`: the key of the storage with the numbers of all ranks.
  DTensorPickler(const DeviceMeshOptions& mesh, int rank, std::string ranks_storage)
      : mesh_(mesh), rank_(rank), ranks_storage_(std::move(ranks_storage)) {}

  /// Writes this rank's DTensor. `shape`: of the whole tensor. `storage`: the key of the storage
  /// with this rank's part.
  void push(pickle::Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
            const DTensorCut& cut, std::string_view storage);

 private:
  void push_wrapper_arguments(pickle::Pickler& pickler, DType dtype,
                              std::span<const std::int64_t> shape);
  void push_spec(pickle::Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                 const DTensorCut& cut);
  void push_mesh(pickle::Pickler& pickler, const DTensorCut& cut);
  void push_layout(pickle::Pickler& pickler, const std::vector<std::int64_t>& sizes);
  void push_placements(pickle::Pickler& pickler, const DTensorCut& cut);

  const DeviceMeshOptions& mesh_;
  const int rank_;
  const std::string ranks_storage_;
  struct PushedMesh {
    int num_replicas;
    int num_shards;
    std::size_t memo;
  };
  std::vector<PushedMesh> meshes_;  // already in the pickle
};

/// Returns the numbers 0, 1, … of all ranks as int32, little-endian.
std::string ranks_storage_bytes(int world_size);

}  // namespace tessera::formats::rank_files
