#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "formats/deepspeed/copies.h"
#include "formats/deepspeed/files.h"
#include "tessera/base/shape.h"

namespace tessera::formats::deepspeed {

/// A parameter that is trained, and its group.
struct Parameter {
  std::string fqn;
  Shape shape;
  std::string vector;  // the number of the flat vector that has its parts
};

/// One rank's part of a parameter: elements of a flat vector of that rank.
struct Slice {
  std::size_t rank;
  std::string vector;  // the number of the vector, as state and fp32 weights are keyed
  std::int64_t begin;  // in the vector
  std::int64_t numel;
};

/// How ZeRO cut the parameters into the flat vectors of the ranks.
struct Partition {
  int stage = 0;                      // 2 also stands for 1, whose files are the same
  std::vector<Parameter> parameters;  // in the optimizer's order
  std::map<std::string, std::vector<Slice>> slices;  // by fqn: by rank, without empty ones

  /// Returns the slices of a parameter; none if it has no elements.
  const std::vector<Slice>& slices_of(const Parameter& parameter) const;
};

/// Reads the parameters that the model states list, each with the number of its flat vector.
/// Throws: Error(corruption) if they list none, or something that is not a shape.
std::vector<Parameter> read_parameters(const File& model);

/// Returns the shape that the module has for a parameter of `numel` elements; nothing if none.
using ShapeInModule =
    std::function<std::optional<Shape>(const std::string& fqn, std::int64_t numel)>;

/// Reads how the parameters are cut. In stages 1 and 2 the parameters of a group are one vector,
/// cut into a part for each rank; the last parts are padded, and padding may be between parameters.
/// In stage 3, each parameter is cut into equal parts, rounded up, one for each rank. The parts
/// follow each other in the vectors in the order of the parameters; the last ones are padded with
/// elements of any value. Source: deepspeed/utils/zero_to_fp32.py and
/// runtime/zero/stage_1_and_2.py, 0.19. Throws: Error(corruption) naming a parameter whose parts do
/// not add up to its shape or are not where the rank recorded them, or a vector with more elements
/// than parameters and padding need. `shape_in_module`: for BF16_Optimizer without ZeRO, which
/// lists no shapes; then the parameters are taken from the slices that the ranks recorded.
Partition read_partition(const File& model, const std::vector<const File*>& optimizer, int stage,
                         const ShapeInModule& shape_in_module);

/// Whether the model states list the parameters. BF16_Optimizer without ZeRO does not; then their
/// member `optimizer` is a copy of rank 0's optimizer state.
bool lists_parameters(const File& model);

/// Returns the stage that the fp32 weights are laid out for: 3, or 2 for stages 1 and 2.
/// Throws: Error(unsupported) if the file has none.
int stage_of(const File& optimizer);

/// Returns the whole numbers that are all items of a tuple, as a shape; nothing for anything else.
std::optional<Shape> shape_in(const Value& value);

/// Whether a vector of optimizer state with `numel` elements can belong to this vector of fp32
/// weights. It has one element for each weight. In stages 1 and 2 it may also have elements for the
/// padding at the end, which DeepSpeed saves with the state but not with the weights.
bool has_length_of_vector(const File& optimizer, int stage, const std::string& vector,
                          std::int64_t numel);

/// Returns the vector at a path, from which a slice is cut: a tensor of the file.
/// Throws: Error(corruption) naming `fqn` if it is missing or not as long as the fp32 weights.
std::size_t vector_at(const File& file, int stage, const std::vector<std::string>& path,
                      const Slice& slice, const std::string& fqn);
/// Returns where the fp32 weights of a parameter are. `optimizer`: files by rank.
std::vector<Run> runs_of_weights(const Partition& partition, const Parameter& parameter,
                                 const std::vector<const File*>& optimizer);

/// The path of the vectors with fp32 weights in a file of optimizer states.
std::vector<std::string> path_of_weights(int stage);
/// The path below which an optimizer keeps the state of its vectors: `<path>.<vector>.<name>`.
std::vector<std::string> path_of_state(const File& optimizer, int stage);
/// Returns the path of the state of one vector, or of the entry at `name` in it.
std::vector<std::string> path_in_state(const File& optimizer, int stage, const std::string& vector,
                                       const std::vector<std::string>& name = {});
/// The path of the optimizer's own state dict, which has `param_groups`.
std::vector<std::string> path_of_optimizer(int stage);

}  // namespace tessera::formats::deepspeed
