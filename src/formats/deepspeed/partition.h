#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "formats/deepspeed/files.h"
#include "formats/torch_files/copies.h"
#include "tessera/base/error.h"
#include "tessera/base/shape.h"

namespace tessera::formats::deepspeed {

using torch_files::Run;

/// A trained parameter, and the flat vector of its parameter group.
struct Parameter {
  std::string fqn;
  Shape shape;
  std::string vector;  // the number of the flat vector that holds its elements
};

/// One rank's part of a parameter: elements of a flat vector of that rank.
struct Slice {
  std::size_t rank;
  std::string vector;  // the vector's number: the key of its state and of its fp32 weights
  std::int64_t begin;  // in the vector
  std::int64_t numel;
  std::int64_t begin_in_whole = 0;  // in state of the form VectorForm::whole_parameters
};

/// What a rank's vector with optimizer state has an element for.
enum class VectorForm {
  like_weights,  // each fp32 weight of the rank, and perhaps the padding at the end
  // Each element of all parameters of which the rank has a part, one parameter after the other,
  // without padding: the momentum of DeepSpeed's Muon in stages 1 and 2 without CPU offload.
  whole_parameters,
};

/// How ZeRO cut the parameters into the flat vectors of the ranks.
struct Partition {
  int stage = 0;                      // 2 or 3; 2 also for stage 1, whose files are the same
  std::vector<Parameter> parameters;  // in the optimizer's order
  std::map<std::string, std::vector<Slice>> slices;  // by fqn; sorted by rank, none empty
  // By vector, then by rank: the elements of all parameters of which the rank has a part.
  std::map<std::string, std::map<std::size_t, std::int64_t>> whole_numel{};

  /// Returns the slices of a parameter; none if it has no elements.
  const std::vector<Slice>& slices_of(const Parameter& parameter) const;
};

/// Returns the names of a group's parameters in the order of the optimizer's group. `names`: in the
/// order of the vector. With `round_robin_gradients`, stages 1 and 2 deal out the parameters to the
/// `num_ranks` data ranks in turn, and the vector has all of rank 0 first.
std::vector<std::string> in_group_order(std::vector<std::string> names, const File& model,
                                        int stage, std::size_t num_ranks);

/// Reads the parameters that the model states list. Sets `vector` to the number of the group; in
/// stage 3, `read_partition` changes it. Throws: Error(corruption) if none, or if one has no shape.
std::vector<Parameter> read_parameters(const File& model);

/// Returns the shape of the parameter in the module; nothing if the module has no such parameter.
using ShapeInModule =
    std::function<std::optional<Shape>(const std::string& fqn, std::int64_t numel)>;

/// Reads how ZeRO cut the parameters.
/// - Stages 1 and 2: all parameters of a group are one vector, cut into one part for each rank. The
///   vector is padded at its end, and may be padded between parameters.
/// - Stage 3: each parameter is cut into equal parts (rounded up), one for each rank. A rank's
///   vector holds its parts in the order of the parameters. The last part of a parameter is padded
///   with elements of any value.
/// `shape_in_module`: used for BF16_Optimizer without ZeRO, whose files do not list shapes. The
/// parameters are then those whose slices the ranks recorded.
/// Source: deepspeed/utils/zero_to_fp32.py and runtime/zero/stage_1_and_2.py, 0.19.
/// Throws: Error(corruption) naming a parameter whose parts do not add up to its shape or are not
/// where the rank recorded them, or a vector with more elements than parameters and padding need.
Partition read_partition(const File& model, const std::vector<const File*>& optimizer, int stage,
                         const ShapeInModule& shape_in_module);

/// Returns whether the model states list the parameters. Those of BF16_Optimizer without ZeRO do
/// not; their member `optimizer` is a copy of rank 0's optimizer state.
bool lists_parameters(const File& model);

/// Returns the ZeRO stage that wrote the fp32 weights: 3, or 2 for stages 1 and 2.
/// Throws: Error(unsupported) if the file has no fp32 weights.
int stage_of(const File& optimizer);

/// Returns a tuple of whole numbers as a shape; nothing if the value is anything else.
std::optional<Shape> shape_in(const Value& value);

/// Where the elements of a slice begin: in tensor number `tensor` of a file.
struct InVector {
  std::size_t tensor;
  std::int64_t begin;
};
/// Returns where a slice of `fqn` is in the vector at `path`. Requires, for state: `form` is what
/// `form_of_state` returned. Throws: Error(corruption) naming `fqn` if the vector is missing, or
/// not as long as the weights.
InVector vector_at(const File& file, const Partition& partition,
                   const std::vector<std::string>& path, const Slice& slice, const std::string& fqn,
                   VectorForm form = VectorForm::like_weights);
/// Returns the form of the state `name` of a parameter's vector on all ranks; an error if the state
/// cannot be cut into parameters: it has another length on some rank (8-bit optimizers keep
/// tables). In stages 1 and 2 it may be longer than the weights by the padding at the end, which
/// DeepSpeed saves with the state but not with the weights. `optimizer`: files by rank; `slice`:
/// the parameter's first one; `name`: the state's path below the vector; `fqn`: the parameter's
/// name, for the error.
std::variant<VectorForm, Error> form_of_state(const Partition& partition,
                                              const std::vector<const File*>& optimizer,
                                              const Slice& slice,
                                              const std::vector<std::string>& name,
                                              const std::string& fqn);
/// Returns the runs of elements that hold a parameter's fp32 weights. `optimizer`: files by rank.
std::vector<Run> runs_of_weights(const Partition& partition, const Parameter& parameter,
                                 const std::vector<const File*>& optimizer);

/// The path of the vectors with fp32 weights in a file of optimizer states.
std::vector<std::string> path_of_weights(int stage);
/// The path below which an optimizer keeps the state of its vectors: `<path>.<vector>.<name>`.
std::vector<std::string> path_of_state(const File& optimizer, int stage);
/// Returns the path of one vector's state or, with `name`, of an entry of that state.
std::vector<std::string> path_in_state(const File& optimizer, int stage, const std::string& vector,
                                       const std::vector<std::string>& name = {});
/// The path of the optimizer's own state dict, which has `param_groups`.
std::vector<std::string> path_of_optimizer(int stage);

}  // namespace tessera::formats::deepspeed
