#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "formats/torch_files/entry_reader.h"
#include "formats/torch_files/file.h"

namespace tessera::formats::megatron {

using torch_files::Entry;
using torch_files::File;
using torch_files::Path;

/// What one rank has of one parameter, as the file of the model has it.
struct Parameter {
  std::size_t chunk;  // of the model: `model0`, `model1`, …
  std::string name;   // on the rank
  const File* file;
  const Entry* entry;

  const TensorMeta& meta() const { return file->tensor(*entry); }
};

/// Elements of a tensor of a file, from `begin` on.
struct Elements {
  const File* file;
  std::size_t tensor;
  std::int64_t begin = 0;

  DType dtype() const { return file->reader().contents().tensors[tensor].meta.dtype; }
};

/// What the optimizer has of one part of a parameter.
struct PartState {
  std::optional<Elements> weights{};          // in fp32; nothing: the model has them
  std::map<std::string, Elements> tensors{};  // `exp_avg`, …: as many elements as the part has
  std::map<std::string, const Entry*> scalars{};  // `step`: in the file of the model
};

/// A group of parameters in the file of the model.
struct ParamGroup {
  Path path;                              // where it is
  std::vector<std::size_t> parameters{};  // indices; empty if the file does not say
  bool lists_parameters = false;
};

/// What the optimizer of one rank has.
struct RankOptimizer {
  bool is_there = false;
  std::vector<ParamGroup> groups{};
  std::map<std::size_t, PartState> parts{};  // by index of the parameter
  std::vector<Path> state_paths{};           // entries below these paths are in `parts` or `groups`
  /// Why state cannot be given to parameters; empty if it could.
  std::string problem{};
};

/// Reads the optimizer's state of one rank, and finds out which parameter it is of: the files
/// number parameters, or put them into flat vectors, in an order that follows from Megatron's code.
/// Where the files have the same weights twice, in fp32 and in the model's dtype, compares the
/// first ones of each parameter, which proves the order. `parameters`: of the rank, in the order of
/// the model. `vectors`: the file of the distributed optimizer; null if there is none.
RankOptimizer read_optimizer(const File& model, const File* vectors,
                             const std::vector<Parameter>& parameters);

}  // namespace tessera::formats::megatron
