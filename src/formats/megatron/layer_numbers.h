#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/megatron/model_parts.h"
#include "formats/megatron/rank_folders.h"

namespace tessera::formats::megatron {

/// Gives tensors the numbers that their layers and experts have in the whole model. In a rank's
/// file, layers are numbered from 0 within each model chunk, and experts within the rank.
class LayerNumbers {
 public:
  /// Throws: Error(corruption) if ranks of one pipeline stage have different tensors, or if the
  /// numbers of its layers have a gap.
  LayerNumbers(const std::vector<RankModel>& ranks, const RankFolders& folders);

  /// Returns the name that an entry of a rank's model has in the whole model.
  std::string name_of(std::size_t rank, std::size_t chunk, const std::string& name) const;
  /// Returns the number of layers of the whole model that have tensors; nothing if it has none, or
  /// several stacks of layers, such as an encoder and a decoder. Layers that predict further tokens
  /// (`mtp.`) do not count.
  std::optional<std::size_t> num_layers() const;

 private:
  using ChunkOfStage = std::pair<std::size_t, std::size_t>;  // chunk, stage

  void require_equal_ranks(const std::vector<RankModel>& ranks) const;
  void count_layers(const std::vector<RankModel>& ranks);
  void count_experts(const std::vector<RankModel>& ranks);

  const RankFolders& folders_;
  /// How many layers each chunk of each stage has. Key: the name before the layer's number.
  std::map<std::string, std::map<ChunkOfStage, std::size_t>> num_layers_;
  /// How many experts a rank has. Key: chunk and stage, then the name before the expert's number.
  std::map<std::pair<ChunkOfStage, std::string>, std::size_t> num_experts_;
};

}  // namespace tessera::formats::megatron
