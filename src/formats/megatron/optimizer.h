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

/// One rank's part of a parameter, in the rank's model file.
struct Parameter {
  std::size_t chunk;  // 1 for a parameter in `model1`
  std::string name;   // its name on the rank
  const File* file;
  const Entry* entry;

  const TensorMeta& meta() const { return file->tensor(*entry); }
};

/// Consecutive elements of a tensor in a file, from element `begin` on, in row-major order.
struct Elements {
  const File* file;
  std::size_t tensor;
  std::int64_t begin = 0;

  DType dtype() const { return file->reader().contents().tensors[tensor].meta.dtype; }
  std::uint32_t dict_order() const { return file->reader().contents().tensors[tensor].dict_order; }
};

/// The optimizer's state for one part of a parameter.
struct PartState {
  std::optional<Elements> weights{};              // in fp32; empty: only the model has them
  std::map<std::string, Elements> tensors{};      // such as `exp_avg`: as many elements as the part
  std::map<std::string, const Entry*> scalars{};  // such as `step`; in the model file
};

/// A parameter group (an item of `param_groups`) in the model file.
struct ParamGroup {
  Path path;                              // of the group in the file
  std::vector<std::size_t> parameters{};  // indices; empty if the file does not list them
  bool lists_parameters = false;
};

/// The optimizer state of one rank.
struct RankOptimizer {
  bool is_there = false;
  std::vector<ParamGroup> groups{};
  std::map<std::size_t, PartState> parts{};  // key: index of the parameter
  std::vector<Path> state_paths{};           // entries below these paths are in `parts` or `groups`
  /// Why the reader cannot tell which state belongs to which parameter; empty if it can.
  std::string problem{};
  /// Whether `problem` is the fault of the files, not of an order that Tessera does not know: the
  /// state is missing, or is that of other weights.
  bool is_damaged = false;
};

/// Reads the optimizer state of one rank, and finds the parameter that each state belongs to. The
/// files do not name parameters: they number them, or put them into flat vectors, in an order that
/// follows from Megatron's code. If the files have the weights twice, in fp32 and in the model's
/// dtype, the function compares some weights of each parameter to check the order. `parameters`: of
/// the rank, in the order of the model. `vectors`: the file of the distributed optimizer; null if
/// there is none.
RankOptimizer read_optimizer(const File& model, const File* vectors,
                             const std::vector<Parameter>& parameters);

}  // namespace tessera::formats::megatron
