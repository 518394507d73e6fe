#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "formats/torch_zip/mesh_region.h"
#include "formats/torch_zip/sharded_tensor.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_checkpointing {

inline constexpr std::string_view kMetadataName = "metadata.pkl";

/// A mesh of ranks.
struct Mesh {
  Shape sizes;
  std::vector<std::string> axes{};                   // names; empty if the mesh has none
  std::vector<std::pair<int, std::int64_t>> places;  // rank, place in row-major order; sorted

  /// Returns the coordinates of a rank in the mesh; nothing if the mesh does not contain the rank.
  std::optional<Shape> coordinates_of(int rank) const;
};

/// How `metadata.pkl` describes one tensor for a group of ranks.
struct Sharding {
  enum class Kind {
    mesh,     // a DTensor, or a plain tensor, which counts as replicated on all ranks
    offsets,  // boxes of the whole tensor, and the place of each in the local tensor
    unknown,  // another type: Tessera cannot place the parts
  };

  Kind kind = Kind::unknown;
  std::string type;  // as in the file: `DTensorShardingMetadata`
  Shape whole_shape{};
  std::string dtype{};                                 // `torch.float32`
  std::shared_ptr<const Mesh> mesh{};                  // Kind::mesh
  std::vector<torch_zip::AxisPlacement> placements{};  // Kind::mesh; indexed by axis
  std::vector<Box> of_whole{};                         // Kind::offsets
  std::vector<Box> of_local{};                         // parallel to of_whole

  /// Whether each rank of the mesh has the whole tensor. False for other kinds than `mesh`.
  bool is_replicated() const;
  /// Returns the place of one rank's part in the whole tensor. If it is not known,
  /// ShardPlace::problem says why.
  /// Requires: the kind is not unknown.
  torch_zip::ShardPlace place_of(int rank) const;
};

/// A group of ranks that have the same Sharding of one tensor.
struct Group {
  std::shared_ptr<const std::vector<int>> ranks;  // sorted
  Sharding sharding;

  bool has(int rank) const;
};

/// The file that one rank wrote for an item. Both texts are empty if it has its default name.
struct ItemFile {
  std::string path;  // relative to the checkpoint's directory
  std::string form;  // such as `TorchSerialization`
};

/// One item that the trainer saved, such as its model.
struct Item {
  struct Tensor {
    KeyPath path;  // empty: one key, or a key is a number (a dict key or a list position)
    std::vector<Group> groups;
  };
  std::map<std::string, Tensor> tensors;  // key: name, the keys of the path joined by dots
  std::vector<ItemFile> files;            // indexed by rank

  const Group* find(const std::string& tensor, int rank) const;  // null: none
};

/// The contents of `metadata.pkl`: the items that can be resharded. Other items have files only.
struct Metadata {
  int world_size = 1;
  std::map<std::string, Item> items;
};

/// Reads `metadata.pkl`, which consists of dicts of plain values. Runs no code from the file, and
/// makes no objects of its classes.
/// Throws: Error(corruption) naming the byte and the broken rule; Error(unsupported) for another
/// version.
Metadata read_metadata(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats::torch_checkpointing
