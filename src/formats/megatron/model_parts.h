#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/megatron/cuts_by_name.h"
#include "formats/megatron/optimizer.h"
#include "formats/megatron/rank_folders.h"
#include "tessera/layout/region.h"

namespace tessera::formats::megatron {

/// The tensors of the model that one rank saved.
struct RankModel {
  const File* file = nullptr;
  Place place;
  std::size_t num_chunks = 1;
  std::vector<Parameter> tensors;  // in the order of the model, with buffers
};

/// One rank's part of a tensor of the whole model.
struct Part {
  std::size_t rank;    // index of its folder in RankFolders::names
  std::size_t tensor;  // index in RankModel::tensors
};

/// Returns the tensors of the model in a file, without the extra state of layers (`_extra_state`).
/// Throws: Error(corruption) if there is no model.
RankModel read_rank_model(const File& file, const Place& place);
/// Returns the number of the model chunk under a key of the file's dict: 1 for `model1`; 0 for
/// `model`, the key if there is only one chunk. Nothing for any other key. With an interleaved
/// pipeline, a rank has several chunks: parts of the model that do not follow one another.
std::optional<std::size_t> chunk_number(std::string_view member);
/// Whether an entry of the model is extra state of a layer. The reader does not join extra state:
/// each rank keeps its own.
bool is_extra_state(const Path& path);
/// Returns the name that an entry of the model has on its rank: the numbers of layers and experts
/// count within the rank.
std::string name_on_rank(const Path& path);

/// How the parts of the tensor-parallel ranks make the whole tensor.
struct Joint {
  Cut cut = Cut::whole;
  // Several matrices are one tensor: each rank has a part of the first one (the gate of an MLP),
  // then a part of the next (the up projection), and so on.
  std::int64_t num_matrices = 1;
  std::size_t num_parts = 1;
  Shape part;
  Shape whole;

  /// A box of the whole tensor, and the element of a rank's part at which the box begins.
  struct Piece {
    Box region;
    std::int64_t begin = 0;
  };
  std::vector<Piece> pieces_of(std::size_t tensor_rank) const;
};

/// Returns how `num_parts` parts of shape `part` make a whole tensor; nothing if `part` cannot be
/// the result of the cut. Requires: `cut` is whole, first_dimension or second_dimension;
/// `num_matrices` is 1 unless `cut` is first_dimension.
std::optional<Joint> join(Cut cut, std::int64_t num_matrices, std::size_t num_parts,
                          const Shape& part);

}  // namespace tessera::formats::megatron
