#include "formats/deepspeed/files.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <iterator>
#include <utility>

#include "formats/deepspeed/universal_members.h"
#include "formats/file_names.h"
#include "tessera/base/error.h"

namespace tessera::formats::deepspeed {
namespace {

constexpr std::string_view kModelOfAll = "mp_rank_#_model_states.pt";
constexpr std::string_view kModelOfRank = "zero_pp_rank_#_mp_rank_#_model_states.pt";
constexpr std::array<std::string_view, 3> kOptimizerFiles = {
    "zero_pp_rank_#_mp_rank_#_optim_states.pt", "bf#_zero_pp_rank_#_mp_rank_#_optim_states.pt",
    "fp#_zero_pp_rank_#_mp_rank_#_optim_states.pt"};

/// A pattern of names of files that pipeline or expert parallelism writes, and which of the two.
struct Parallelism {
  std::string_view pattern;
  std::string_view in_words;
};
constexpr std::string_view kPipeline = "pipeline";
constexpr std::array<Parallelism, 5> kOtherParallelism = {{
    {"layer_#-model_#-model_states.pt", kPipeline},
    {"layer_#-model_states.pt", kPipeline},
    {"layer_#_expert_#_mp_rank_#_model_states.pt", "expert"},
    {"expert_#_mp_rank_#_model_states.pt", "expert"},
    {"expp_rank_#_mp_rank_#_optim_states.pt", "expert"},
}};
constexpr std::string_view kRank = "pp_rank_";
constexpr std::string_view kModelParallelRank = "mp_rank_";
constexpr std::string_view kLayer = "layer_";
constexpr std::string_view kTensorRank = "-model_";
constexpr std::size_t kMaxRanks = 1 << 20;

bool is_optimizer(std::string_view name) {
  return std::ranges::any_of(kOptimizerFiles,
                             [&](std::string_view pattern) { return is_name_like(name, pattern); });
}

/// Returns the kind of parallelism that the pattern of the name shows: "pipeline" or "expert".
/// Returns an empty text for all other names, also for those with a tensor rank (`mp_rank_01_…`).
std::string_view other_parallelism(std::string_view name) {
  for (const Parallelism& other : kOtherParallelism) {
    if (is_name_like(name, other.pattern)) return other.in_words;
  }
  return {};
}

/// Returns the number after `mark` in a name; kMaxRanks if it is larger, or not a number.
std::size_t number_after(std::string_view name, std::string_view mark) {
  name.remove_prefix(name.find(mark) + mark.size());
  std::size_t number = kMaxRanks;
  std::from_chars(name.data(), name.data() + name.size(), number);
  return std::min(number, kMaxRanks);
}

/// Sets `files[rank]` to the name. Throws if the rank is too large, or already has a file.
void place(std::vector<std::string>& files, std::size_t rank, const std::string& name,
           const std::string& directory) {
  if (rank >= kMaxRanks) {
    throw Error::expected(ErrorKind::corruption, {.path = join_path(directory, name)}, "rank",
                          "a rank below 2^20", "a larger rank in the file's name");
  }
  if (files.size() <= rank) files.resize(rank + 1);
  if (!files[rank].empty()) {
    throw Error::expected(ErrorKind::unsupported, {.path = directory}, "files of ranks",
                          "one file of rank " + std::to_string(rank),
                          "'" + printable(files[rank]) + "' and '" + printable(name) + "'");
  }
  files[rank] = name;
}

void require_all(const std::vector<std::string>& files, const std::string& what,
                 const std::string& directory) {
  const auto missing = std::ranges::find(files, std::string());
  if (missing == files.end()) return;
  throw Error::expected(ErrorKind::corruption, {.path = directory}, "files of ranks",
                        what + " of ranks 0 to " + std::to_string(files.size() - 1),
                        "none of rank " + std::to_string(missing - files.begin()),
                        "not copied from its host?");
}

/// Puts a file at the place of its model rank, the number after `mp_rank_`, and of `data_rank`.
void place(std::vector<std::vector<std::string>>& files, std::size_t data_rank,
           const std::string& name, const std::string& directory) {
  const std::size_t rank = number_after(name, kModelParallelRank);
  std::vector<std::string> of_none;
  if (rank < kMaxRanks && files.size() <= rank) files.resize(rank + 1);
  // If the rank is too large, the other `place` gets it and throws.
  place(rank < kMaxRanks ? files[rank] : of_none, rank < kMaxRanks ? data_rank : rank, name,
        directory);
}

/// Puts a file of model states at the place of its model rank and, in stage 3, of its data rank.
void place_model(std::vector<std::vector<std::string>>& files, const std::string& name,
                 const std::string& directory) {
  const bool is_of_all = is_name_like(name, kModelOfAll);
  place(files, is_of_all ? 0 : number_after(name, kRank), name, directory);
}

/// Throws if a rank has no file of model states, or if model ranks have unequal numbers of files.
void require_all_models(const std::vector<std::vector<std::string>>& files,
                        const std::string& directory) {
  for (std::size_t rank = 0; rank < files.size(); ++rank) {
    if (files[rank].empty()) {
      throw Error::expected(ErrorKind::corruption, {.path = directory}, "files of ranks",
                            "model states of ranks 0 to " + std::to_string(files.size() - 1),
                            "none of rank " + std::to_string(rank), "not copied from its host?");
    }
    require_all(files[rank], "model states of mp_rank " + std::to_string(rank), directory);
    if (files[rank].size() == files.front().size()) continue;
    throw Error::expected(
        ErrorKind::corruption, {.path = directory}, "files of ranks",
        std::to_string(files.front().size()) + " files of model states for each mp_rank",
        std::to_string(files[rank].size()) + " for mp_rank " + std::to_string(rank));
  }
}

/// Throws Error(unsupported) if the name shows that the file is of tensor parallelism (mp_rank
/// above 0), pipeline parallelism or expert parallelism.
void require_zero_alone(const std::string& name, const std::string& directory) {
  std::string_view other = other_parallelism(name);
  if (other.empty() && number_after(name, kModelParallelRank) != 0) other = "tensor";
  if (other.empty()) return;
  throw Error::expected(ErrorKind::unsupported, {.path = join_path(directory, name)}, "parallelism",
                        "only files of ZeRO", "a file of " + std::string(other) + " parallelism");
}

/// Returns the files. Does not check that all optimizer states are there.
ParallelFiles sorted_files(const std::vector<std::string>& names, const std::string& directory) {
  ParallelFiles files;
  for (const std::string& name : names) {
    if (!is_file_name(name)) continue;
    const std::string_view other = other_parallelism(name);
    if (other == kPipeline) {
      const bool is_cut = is_name_like(name, kOtherParallelism.front().pattern);
      const std::size_t tensor = is_cut ? number_after(name, kTensorRank) : 0;
      files.layers.push_back({number_after(name, kLayer), tensor, name});
      continue;
    }
    if (!other.empty()) require_zero_alone(name, directory);
    if (!is_optimizer(name)) {
      place_model(files.model, name, directory);
      continue;
    }
    place(files.optimizer, number_after(name, kRank), name, directory);
  }
  require_all_models(files.model, directory);
  const auto place_of = [](const LayerFile& file) { return std::pair(file.layer, file.tensor); };
  std::ranges::sort(files.layers, {}, place_of);
  const auto again = std::ranges::adjacent_find(files.layers, {}, place_of);
  if (again != files.layers.end()) {
    throw Error::expected(
        ErrorKind::unsupported, {.path = directory}, "files of layers",
        "one file of layer " + std::to_string(again->layer),
        "'" + printable(again->name) + "' and '" + printable(std::next(again)->name) + "'");
  }
  return files;
}

}  // namespace

bool is_file_name(std::string_view name) {
  return is_optimizer(name) || is_name_like(name, kModelOfAll) ||
         is_name_like(name, kModelOfRank) || !other_parallelism(name).empty();
}

bool are_of_zero(const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [](const std::string& name) { return is_optimizer(name); });
}

bool is_plain_name(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

bool are_universal(const std::vector<std::string>& names) {
  const auto is_model = [](const std::string& name) {
    return is_name_like(name, kModelOfAll) || is_name_like(name, kModelOfRank);
  };
  return std::ranges::find(names, "zero") != names.end() && !are_of_zero(names) &&
         std::ranges::any_of(names, is_model);
}

bool is_path_of_universal(std::string_view path) {
  constexpr std::string_view kFile = ".pt";
  std::vector<std::string_view> names;
  for (std::size_t slash = path.find('/'); slash != std::string_view::npos;
       slash = path.find('/')) {
    names.push_back(path.substr(0, slash));
    path.remove_prefix(slash + 1);
  }
  const bool is_in_folder = !names.empty() && is_name_like(names[0], kUniversalFolder);
  if (!is_in_folder || !path.ends_with(kFile)) return false;
  if (names.size() == 1) return path == kModelStates || path == kModelStatesOfStage3;
  if (names[1] != kZero) return false;
  return names.size() == 2 ? path == kOptimizerState : names.size() == 3;
}

void require_zero_alone(const std::vector<std::string>& names, const std::string& directory) {
  for (const std::string& name : names) {
    if (is_file_name(name)) require_zero_alone(name, directory);
  }
}

void refuse_other_ranks(const std::string& directory, std::size_t num_models,
                        std::size_t num_optimizers) {
  const std::string what = num_models < num_optimizers ? "model states" : "optimizer states";
  throw Error::expected(
      ErrorKind::corruption, {.path = directory}, "files of ranks",
      what + " of ranks 0 to " + std::to_string(std::max(num_models, num_optimizers) - 1),
      "none of rank " + std::to_string(std::min(num_models, num_optimizers)),
      "not copied from its host?");
}

FileNames find_files(const std::vector<std::string>& names, const std::string& directory) {
  require_zero_alone(names, directory);
  FileNames files;
  for (const std::string& name : names) {
    if (!is_file_name(name)) continue;
    if (is_name_like(name, kModelOfAll)) {
      place(files.model, 0, name, directory);
    } else {
      auto& of_kind = is_optimizer(name) ? files.optimizer : files.model;
      place(of_kind, number_after(name, kRank), name, directory);
    }
  }
  require_all(files.optimizer, "optimizer states", directory);
  require_all(files.model, "model states", directory);
  if (files.model.empty()) {
    throw Error::expected(ErrorKind::corruption, {.path = directory}, "files of ranks",
                          "model states", "none", "not copied from the host of rank 0?");
  }
  return files;
}

bool are_of_several_model_ranks(const std::vector<std::string>& names) {
  return std::ranges::any_of(names, [](const std::string& name) {
    if (!is_file_name(name)) return false;
    const std::string_view other = other_parallelism(name);
    return other.empty() ? number_after(name, kModelParallelRank) != 0 : other == kPipeline;
  });
}

ParallelFiles find_parallel_files(const std::vector<std::string>& names,
                                  const std::string& directory) {
  ParallelFiles files = sorted_files(names, directory);
  if (files.optimizer.size() < files.model.size()) files.optimizer.resize(files.model.size());
  for (std::size_t rank = 0; rank < files.optimizer.size(); ++rank) {
    const std::string of_rank = " of mp_rank " + std::to_string(rank);
    if (files.optimizer[rank].empty() || rank >= files.model.size()) {
      throw Error::expected(ErrorKind::corruption, {.path = directory}, "files of ranks",
                            "optimizer states and model states" + of_rank,
                            rank < files.model.size() ? "no optimizer states" : "no model states",
                            "not copied from its host?");
    }
    require_all(files.optimizer[rank], "optimizer states" + of_rank, directory);
  }
  return files;
}

bool are_without_zero(const std::vector<std::string>& names) {
  const auto is_model = [](const std::string& name) { return is_name_like(name, kModelOfAll); };
  const auto is_of_stage_3 = [](const std::string& name) {
    return is_name_like(name, kModelOfRank);
  };
  return are_of_several_model_ranks(names) && !are_of_zero(names) && !are_universal(names) &&
         std::ranges::any_of(names, is_model) && std::ranges::none_of(names, is_of_stage_3);
}

ParallelFiles find_files_without_zero(const std::vector<std::string>& names,
                                      const std::string& directory) {
  return sorted_files(names, directory);
}

std::vector<std::vector<std::string>> find_model_ranks(const std::vector<std::string>& names,
                                                       const std::string& directory) {
  const bool has_first = std::ranges::find(names, kModelStates) != names.end();
  std::vector<std::vector<std::string>> models;
  for (const std::string& name : names) {
    const bool is_again = has_first && name == kModelStatesOfStage3;
    if (!is_file_name(name) || is_again) continue;
    if (!other_parallelism(name).empty()) require_zero_alone(name, directory);
    place_model(models, name, directory);
  }
  require_all_models(models, directory);
  return models;
}

/// Checks that the file still has the name under which it was saved: torch.save records that name
/// as the name of the folder in the archive.
void require_own_name(const File& file) {
  const std::string saved_as = file.reader().saved_name() + ".pt";
  if (saved_as == file.name() || !is_file_name(saved_as)) return;
  throw Error::expected(ErrorKind::corruption, {.path = file.reader().path()}, "rank",
                        "a file saved as " + file.name(), "a file saved as " + saved_as,
                        "copied over another rank's file?");
}

}  // namespace tessera::formats::deepspeed
