#include "formats/torch_zip/part_of_whole.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdio>
#include <set>
#include <string_view>
#include <vector>

#include "base/checked_math.h"
#include "formats/file_names.h"
#include "formats/numbered_names.h"
#include "formats/shard_files.h"
#include "tessera/base/error.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::Object;
using pickle::ObjectKind;

using Found = std::optional<Object>;

/// Returns the value under a key of a dict or an OrderedDict, or the attribute of that name of an
/// object.
Found entry(Found mapping, std::string_view key) {
  if (mapping && mapping->is(ObjectKind::call) && mapping->num_entries("entries") == 0) {
    mapping = mapping->call_state("state");
  }
  if (!mapping || (!mapping->is(ObjectKind::dict) && !mapping->is(ObjectKind::call))) return {};
  const std::size_t num_entries = mapping->num_entries("entries");
  for (std::size_t i = 0; i < num_entries; ++i) {
    const Object name = mapping->entry_key(i);
    if (name.is(ObjectKind::str) && name.as_text("key") == key) return mapping->entry_value(i);
  }
  return {};
}

/// Returns an integer, given as a number, as an Enum, or as a list (its first item).
std::optional<std::int64_t> number(Found object) {
  if (object && object->is(ObjectKind::call)) object = object->call_arguments("enum");
  if (object && (object->is(ObjectKind::list) || object->is(ObjectKind::tuple))) {
    object = object->num_items("items") > 0 ? Found(object->item(0)) : Found();
  }
  if (!object || !object->is(ObjectKind::integer)) return {};
  return object->as_integer("number");
}

/// Returns the number of parts, which is the product of the factors; nothing if any factor is
/// unknown.
std::optional<std::uint64_t> product(std::initializer_list<std::optional<std::int64_t>> factors) {
  std::int64_t result = 1;
  for (const std::optional<std::int64_t> factor : factors) {
    const auto next =
        factor && *factor > 0 ? checked_mul(result, *factor) : std::optional<std::int64_t>();
    if (!next) return {};
    result = *next;
  }
  return static_cast<std::uint64_t>(result);
}

std::string with_stage(std::optional<std::int64_t> stage, const std::string& what) {
  return "DeepSpeed ZeRO" + (stage ? " stage " + std::to_string(*stage) : std::string()) + ", " +
         what;
}

/// Returns which part `zero_pp_rank_0_mp_rank_00_optim_states.pt` is; nothing for another file.
std::optional<PartOfWhole> part_of_deepspeed_optimizer(Object root) {
  const Found state = entry(root, "optimizer_state_dict");
  const Found stage = entry(state, "zero_stage");
  const bool has_groups = entry(state, "single_partition_of_fp32_groups") ||
                          entry(state, "fp32_flat_groups") || entry(state, "param_slice_mappings");
  if (!stage && !has_groups) return {};
  // The file does not tell the number of model-parallel ranks.
  const auto data_parallel = product({number(entry(state, "partition_count"))});
  return PartOfWhole{
      .form = with_stage(
          number(stage),
          "optimizer state" + (data_parallel ? " of one of " + std::to_string(*data_parallel) +
                                                   " data-parallel ranks"
                                             : std::string()))};
}

/// Returns which part `mp_rank_00_model_states.pt` is; nothing for another file. Without ZeRO and
/// model parallelism, this file holds everything and is no part.
std::optional<PartOfWhole> part_of_deepspeed_model(Object root) {
  if (!entry(root, "module") || !entry(root, "ds_version")) return {};
  const auto model_parallel = number(entry(root, "mp_world_size"));
  const Found optimizer = entry(root, "optimizer");
  const bool has_optimizer = optimizer && !optimizer->is(ObjectKind::none);
  if (has_optimizer && model_parallel.value_or(1) == 1) return {};
  const auto stage = number(entry(entry(entry(root, "ds_config"), "zero_optimization"), "stage"));
  return PartOfWhole{.form = with_stage(stage, "model states"),
                     .num_parts = product({number(entry(root, "dp_world_size")),
                                           model_parallel ? model_parallel : 1})};
}

/// Returns which part `mp_rank_00/model_optim_rng.pt` is; nothing for another file. If there is
/// only one rank, its file holds everything and is no part.
std::optional<PartOfWhole> part_of_megatron(Object root, const std::string& path) {
  const Found args = entry(root, "args");
  const auto tensor_parallel = number(entry(args, "tensor_model_parallel_size"));
  if (!args || (!entry(root, "checkpoint_version") && !tensor_parallel)) return {};
  if (last_component(path) == "common.pt") return {};  // of torch_dist: equal on all ranks
  // Tessera's own result from all files: Megatron writes neither of these.
  if (entry(entry(root, "optim"), "state") || entry(root, "per_rank")) return {};
  const auto size_of = [&](std::string_view dimension) -> std::optional<std::int64_t> {
    return number(entry(args, dimension)).value_or(1);
  };
  // Tensors of experts may be cut into more parts than other tensors.
  const auto of_tensors = tensor_parallel
                              ? std::max(tensor_parallel, size_of("expert_tensor_parallel_size"))
                              : std::nullopt;
  const auto num_parts = product(
      {of_tensors, size_of("pipeline_model_parallel_size"), size_of("expert_model_parallel_size")});
  const std::string folder = last_component(directory_of(path));
  if (num_parts == 1 || (!num_parts && !folder.starts_with("mp_rank_"))) return {};
  return PartOfWhole{.form = "Megatron-LM, one rank of tensor, pipeline and expert parallelism",
                     .num_parts = num_parts};
}

/// Returns which part DeepSpeed's file of one layer or expert is; nothing for another name. Such a
/// file holds tensors and nothing else, so its name is all that tells.
std::optional<PartOfWhole> part_of_deepspeed_name(std::string_view name) {
  struct Form {
    std::string_view pattern;
    std::string_view in_words;
  };
  constexpr std::array kForms{
      Form{"layer_#-model_states.pt", "one layer of a pipeline"},
      Form{"layer_#-model_#-model_states.pt", "one model-parallel rank's part of one layer"},
      Form{"layer_#_expert_#_mp_rank_#_model_states.pt", "one expert of one layer"},
      Form{"expert_#_mp_rank_#_model_states.pt", "one expert of all layers"},
      Form{"expp_rank_#_mp_rank_#_optim_states.pt", "optimizer state of one expert-parallel rank"},
  };
  for (const Form& form : kForms) {
    if (!is_name_like(name, form.pattern)) continue;
    return PartOfWhole{
        .unit = PartOfWhole::Unit::file,
        .form = "DeepSpeed, " + std::string(form.in_words) + ", as the name of the file says"};
  }
  return {};
}

/// Returns which part Megatron-LM's `distrib_optim.pt` is; nothing for another file.
std::optional<PartOfWhole> part_of_megatron_optimizer(Object root) {
  if (!entry(root, "buckets_coalesced") && !entry(root, "per_bucket_numel")) return {};
  return PartOfWhole{.unit = PartOfWhole::Unit::file,
                     .form = "Megatron-LM's distributed optimizer, without its model"};
}

/// Returns N of a name such as `model_world_size_N_rank_R.pt`.
std::optional<std::uint64_t> world_size_in_name(std::string_view name) {
  constexpr std::string_view kMark = "world_size_";
  const std::size_t begin = name.find(kMark);
  if (begin == std::string_view::npos ||
      !is_name_like(name.substr(begin), "world_size_#_rank_#.pt")) {
    return {};
  }
  name.remove_prefix(begin + kMark.size());
  std::uint64_t world_size = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), world_size);
  return error == std::errc{} ? std::optional(world_size) : std::nullopt;
}

std::optional<PartOfWhole> part_of_sharded_tensors(std::size_t num_local_tensors,
                                                   const std::string& name) {
  const auto world_size = world_size_in_name(name);
  if (num_local_tensors == 0 && world_size.value_or(1) == 1) return {};
  return PartOfWhole{.form = num_local_tensors == 0
                                 ? "FSDP, as the name of the file says"
                                 : "FSDP or tensor parallelism, the local parts of " +
                                       std::to_string(num_local_tensors) +
                                       (num_local_tensors == 1 ? " tensor" : " tensors"),
                     .num_parts = world_size};
}

std::optional<PartOfWhole> part_of_series(const std::string& path, const std::string& name) {
  for (const std::string_view suffix : {".bin", ".pt", ".pth"}) {
    const auto place = detail::place_in_series(name, suffix);
    if (!place || place->count < 2) continue;
    return PartOfWhole{.unit = PartOfWhole::Unit::file,
                       .form = "file " + std::to_string(place->number) + " of a model",
                       .num_parts = place->count,
                       .series = join_path(directory_of(path), place->series),
                       .number = place->number};
  }
  return {};
}

/// Returns the name that Meta gives to the file of a rank.
std::string name_of_meta(std::uint64_t rank) {
  char name[40];
  std::snprintf(name, sizeof name, "consolidated.%02u.pth", static_cast<unsigned>(rank));
  return name;
}

}  // namespace

std::optional<PartOfWhole> find_part(Object root, std::size_t num_local_tensors,
                                     const std::string& path) {
  const std::string name = last_component(path);
  if (auto part = part_of_deepspeed_optimizer(root)) return part;
  if (auto part = part_of_deepspeed_model(root)) return part;
  if (auto part = part_of_megatron(root, path)) return part;
  if (auto part = part_of_megatron_optimizer(root)) return part;
  if (auto part = part_of_deepspeed_name(name)) return part;
  if (auto part = part_of_sharded_tensors(num_local_tensors, name)) return part;
  return part_of_series(path, name);
}

std::optional<PartOfWhole> part_by_optimizer_beside(const FileSystem& fs, const std::string& path) {
  constexpr const char* kOptimizer = "distrib_optim.pt";
  if (last_component(path) != "model_optim_rng.pt" ||
      fs.kind_of(join_path(directory_of(path), kOptimizer)) != FileKind::regular) {
    return {};
  }
  PartOfWhole part;
  part.unit = PartOfWhole::Unit::file;
  part.form = "Megatron-LM's model, without the optimizer and its float32 weights in ";
  part.form += kOptimizer;
  part.num_parts = 2;
  return part;
}

std::optional<std::string> form_of_directory(const std::vector<std::string>& names) {
  struct Form {
    std::string_view pattern;
    std::string_view in_words;
  };
  constexpr std::array kForms{
      Form{"zero_pp_rank_#_mp_rank_#_model_states.pt", "DeepSpeed ZeRO, files of each rank"},
      Form{"mp_rank_#_model_states.pt", "DeepSpeed, files of each rank"},
      Form{"model_optim_rng.pt", "the file of one model-parallel rank of Megatron-LM"},
  };
  for (const Form& form : kForms) {
    const auto is_such = [&](const std::string& name) { return is_name_like(name, form.pattern); };
    if (std::ranges::any_of(names, is_such)) return std::string(form.in_words);
  }
  return {};
}

std::optional<Error> refusal_of_meta(const std::string& directory,
                                     const std::vector<std::string>& names) {
  std::set<std::uint64_t> ranks;
  for (const std::string& name : names) {
    const auto numbered = numbered_name(name);
    const bool is_of_meta = numbered && name == name_of_meta(numbered->number);
    if (is_of_meta) ranks.insert(numbered->number);
  }
  if (ranks.empty()) return {};
  const std::string first = name_of_meta(0);
  const std::uint64_t last = *ranks.rbegin();
  if (last == 0) {
    return Error::expected(ErrorKind::unsupported, {.path = directory}, "directory", "a checkpoint",
                           "a folder with " + first + ", a whole model of Meta in one file",
                           "give the path " + printable(join_path(directory, first)));
  }
  std::uint64_t missing = 0;
  while (ranks.contains(missing)) ++missing;
  return Error::expected(
      ErrorKind::unsupported, {.path = directory}, "directory",
      "a checkpoint in one file or with an index",
      first + " to " + name_of_meta(last) +
          (missing < last ? " without " + name_of_meta(missing) : std::string()) +
          ", the parts of " + std::to_string(last + 1) +
          " ranks in tensor parallelism, as Meta saves models; Tessera does not join them",
      "make one model of them first, such as with convert_llama_weights_to_hf.py of transformers; "
      "or give the path of one file to look into it");
}

}  // namespace tessera::formats::torch_zip
