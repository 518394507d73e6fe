#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "recipe/operation.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::recipe {

/// Arguments of Megatron that say in which order the rows of `linear_fc1` are, by name. Only those
/// that a checkpoint states as a number.
using MegatronArguments = std::map<std::string, std::int64_t>;

/// Whether a value's name is that of an argument that says after how many rows those of the gate
/// and of the up projection take turns: `args.moe_mlp_glu_interleave_size`.
bool is_size_of_turns(std::string_view name);

/// Reads the arguments from the `common.pt` of a torch_dist checkpoint. Returns nothing if the
/// folder has no such file, or one that cannot be read.
MegatronArguments arguments_in_common_file(const FileSystem& fs, const std::string& folder);
/// Reads the arguments from the values of a checkpoint.
MegatronArguments arguments_in_values(const formats::CheckpointReader& reader);

/// Returns operations that put all rows of the gate before those of the up projection; none if the
/// tensor has them so. `name`: as in `GPTModel.state_dict()`. `path`: of the checkpoint.
/// Throws: Error(unsupported) if the arguments say that several tensor ranks of torch_dist have the
/// tensor: Megatron stores the first halves of all ranks first, whatever rows are in them.
std::vector<Operation> operations_for_rows(const std::string& name,
                                           const MegatronArguments& arguments,
                                           const std::string& path);

/// Throws Error(unsupported) naming a tensor whose rows are in the order of a `checkpoint_version`
/// below 2, which rules for Megatron's names do not expect.
void require_new_order_of_rows(const formats::CheckpointReader& reader);

}  // namespace tessera::recipe
