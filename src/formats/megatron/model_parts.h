#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "formats/megatron/layer_names.h"
#include "formats/megatron/optimizer.h"
#include "formats/megatron/rank_folders.h"
#include "tessera/layout/region.h"

namespace tessera::formats::megatron {

/// The tensors of the model that one rank saved.
struct RankModel {
  const File* file = nullptr;
  Place place;
  std::size_t num_chunks = 1;
  std::vector<Parameter> tensors;  // in the order of the model, buffers too
};

/// One rank's part of a tensor of the whole model.
struct Part {
  std::size_t rank;
  std::size_t tensor;  // of the rank
};

/// Returns the tensors of the model in a file, without extra state of layers.
/// Throws: Error(corruption) if there is no model.
RankModel read_rank_model(const File& file, const Place& place);
/// Returns the number of the chunk of the model that a member of the file is; nothing if it is
/// another member. `model` is the only chunk of a file.
std::optional<std::size_t> chunk_number(std::string_view member);
/// Whether an entry of the model is extra state of a layer, which no rule joins.
bool is_extra_state(const Path& path);
/// Returns the name of an entry of the model on its rank.
std::string name_on_rank(const Path& path);

/// The numbers of layers and experts in the whole model.
class WholeNames {
 public:
  /// Throws: Error(corruption) if ranks of one stage have different tensors, or layers without a
  /// number in between.
  WholeNames(const std::vector<RankModel>& ranks, const RankFolders& folders);

  /// Returns the name that an entry of a rank's model has in the whole model.
  std::string name_of(std::size_t rank, std::size_t chunk, const std::string& name) const;

 private:
  using ChunkOfStage = std::pair<std::size_t, std::size_t>;  // chunk, stage

  void require_equal_ranks(const std::vector<RankModel>& ranks) const;
  void count_layers(const std::vector<RankModel>& ranks);
  void count_experts(const std::vector<RankModel>& ranks);

  const RankFolders& folders_;
  /// By what is before the number: how many layers each chunk of each stage has.
  std::map<std::string, std::map<ChunkOfStage, std::size_t>> num_layers_;
  /// By stage and chunk, and what is before the number: how many experts a rank has.
  std::map<std::pair<ChunkOfStage, std::string>, std::size_t> num_experts_;
};

/// How the tensor ranks' parts of a tensor make the whole.
struct Joint {
  Cut cut = Cut::whole;
  bool is_gated = false;  // each part is a part of the gate, and behind it a part of the rest
  std::size_t num_parts = 1;
  Shape part;
  Shape whole;

  /// A box of the whole, and where its elements begin in the part.
  struct Piece {
    Box region;
    std::int64_t begin = 0;
  };
  std::vector<Piece> pieces_of(std::size_t tensor_rank) const;
};

/// Computes the shape of the whole. Nothing if a part of that shape cannot be cut so.
std::optional<Joint> join(Cut cut, bool is_gated, std::size_t num_parts, const Shape& part);

}  // namespace tessera::formats::megatron
