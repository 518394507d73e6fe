#include "recipe/megatron_rows.h"

#include <algorithm>
#include <array>
#include <optional>
#include <span>

#include "base/outside_failure.h"
#include "formats/megatron/cuts_by_name.h"
#include "formats/megatron/torch_dist_files.h"
#include "formats/torch_zip.h"
#include "tessera/base/error.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointReader;

constexpr std::string_view kTurnsOfExperts = "moe_mlp_glu_interleave_size";
constexpr std::string_view kTurnsOfSharedExperts = "moe_shared_expert_glu_interleave_size";
constexpr std::string_view kTensorRanks = "tensor_model_parallel_size";
constexpr std::string_view kTensorRanksOfExperts = "expert_tensor_parallel_size";
constexpr std::array kTurns{kTurnsOfExperts, kTurnsOfSharedExperts};
constexpr std::array kRanks{kTensorRanks, kTensorRanksOfExperts};
constexpr std::string_view kArgs = "args.";

std::optional<std::int64_t> number_in(const Value& value) {
  const auto* const number = value.get_if<std::int64_t>();
  return number == nullptr ? std::nullopt : std::optional(*number);
}

/// Adds the arguments `names`, if they are numbers.
void add_numbers(const CheckpointReader& reader, std::span<const std::string_view> names,
                 MegatronArguments& arguments) {
  const auto& values = reader.contents().values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    std::string_view name = values[i].name;
    if (!name.starts_with(kArgs)) continue;
    name.remove_prefix(kArgs.size());
    if (std::ranges::find(names, name) == names.end()) continue;
    if (const auto number = number_in(reader.read_value(i))) arguments.emplace(name, *number);
  }
}

std::int64_t argument(const MegatronArguments& arguments, std::string_view name) {
  const auto found = arguments.find(std::string(name));
  return found == arguments.end() ? 0 : found->second;
}

}  // namespace

bool is_size_of_turns(std::string_view name) {
  if (!name.starts_with(kArgs)) return false;
  name.remove_prefix(kArgs.size());
  return std::ranges::find(kTurns, name) != kTurns.end();
}

MegatronArguments arguments_in_values(const CheckpointReader& reader) {
  MegatronArguments arguments;
  add_numbers(reader, kTurns, arguments);  // whole tensors: the number of ranks does not matter
  return arguments;
}

MegatronArguments arguments_in_common_file(const FileSystem& fs, const std::string& folder) {
  const std::string path = join_path(folder, formats::megatron::kCommonFile);
  if (fs.kind_of(path) != FileKind::regular) return {};
  try {
    const auto file = formats::open_torch_zip_with_classes(fs, path, {"argparse.Namespace"});
    MegatronArguments arguments = arguments_in_values(*file);
    add_numbers(*file, kRanks, arguments);
    return arguments;
  } catch (const Error& error) {
    if (tessera::detail::is_outside_failure(error)) throw;
    return {};  // another program's file: the recipe needs nothing of it
  }
}

std::vector<Operation> operations_for_rows(const std::string& name,
                                           const MegatronArguments& arguments,
                                           const std::string& path) {
  const bool is_of_expert = formats::megatron::is_of_expert(name);
  if (!formats::megatron::second_of_perceptron(name)) return {};
  if (!is_of_expert && !formats::megatron::is_of_shared_expert(name)) return {};
  const std::int64_t turns =
      argument(arguments, is_of_expert ? kTurnsOfExperts : kTurnsOfSharedExperts);
  if (turns <= 0) return {};
  std::int64_t num_ranks = is_of_expert ? argument(arguments, kTensorRanksOfExperts) : 0;
  if (num_ranks == 0) num_ranks = argument(arguments, kTensorRanks);
  if (num_ranks > 1) {
    throw Error::expected(ErrorKind::unsupported, {.path = path, .fqn = name}, "order of rows",
                          "one tensor rank, where rows of the gate and of the up projection take "
                          "turns every " +
                              std::to_string(turns) + " rows",
                          std::to_string(num_ranks) +
                              " ranks, of which Megatron stores halves with rows of both (load the "
                              "checkpoint with Megatron, and save it with one tensor rank)");
  }
  return {Unflatten{0, {-1, 2, turns}}, Transpose{0, 1}, Flatten{0, {2, -1, turns}}};
}

void require_new_order_of_rows(const CheckpointReader& reader) {
  const auto& contents = reader.contents();
  const auto fused = std::ranges::find_if(contents.tensors, [](const auto& tensor) {
    return formats::megatron::is_of_module(tensor.meta.fqn, "query_key_value") ||
           formats::megatron::is_of_module(tensor.meta.fqn, "key_value");
  });
  if (fused == contents.tensors.end()) return;
  const auto& values = contents.values;
  const auto stated = std::ranges::find(values, "checkpoint_version", &formats::ValueEntry::name);
  double version = 0;  // as Megatron reads its files without the value
  if (stated != values.end()) {
    const Value value = reader.read_value(static_cast<std::size_t>(stated - values.begin()));
    if (const auto number = number_in(value)) version = static_cast<double>(*number);
    if (const auto* const number = value.get_if<double>()) version = *number;
  } else if (reader.format() != formats::Format("megatron")) {
    return;  // not a file of Megatron: nothing says which order it is
  }
  if (version >= 2) return;
  throw Error::expected(ErrorKind::unsupported, {.path = reader.path(), .fqn = fused->meta.fqn},
                        "order of rows", "checkpoint_version 2 or later",
                        "version " + std::string(version < 1 ? "0" : "1") +
                            ", which has the rows of Q, K and V in another order (if the rules of "
                            "the recipe expect it, remove \"megatron\" from the recipe)");
}

}  // namespace tessera::recipe
