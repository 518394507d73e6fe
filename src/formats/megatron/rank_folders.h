#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::formats::megatron {

/// The files in a rank's folder: the model file, and the file of the distributed optimizer, if the
/// run uses it.
inline constexpr std::string_view kModelFile = "model_optim_rng.pt";
inline constexpr std::string_view kOptimizerFile = "distrib_optim.pt";
/// The file that names a run's newest checkpoint; in the folder of the run.
inline constexpr std::string_view kTracker = "latest_checkpointed_iteration.txt";

/// A rank's numbers in tensor, pipeline and expert parallelism.
struct Place {
  std::size_t tensor = 0;
  std::size_t stage = 0;
  std::size_t expert = 0;
};

/// The meaning of the second number in a folder's name with two numbers, such as 001 in
/// `mp_rank_00_001`.
enum class SecondNumber { stage, expert };

/// The folders of one save, sorted by stage, then by expert rank, then by tensor rank.
struct RankFolders {
  Place sizes;  // how many tensor ranks, stages and expert ranks there are
  std::vector<std::string> names;

  std::size_t index_of(const Place& place) const {
    return (place.stage * sizes.expert + place.expert) * sizes.tensor + place.tensor;
  }
  Place place_of(std::size_t index) const;
};

/// Whether this is a name of a rank's folder, such as `mp_rank_00` or `mp_rank_00_001_002`.
bool is_rank_folder(std::string_view name);
/// Whether this is a name of a checkpoint's folder in a run's folder: `iter_0000100` or `release`.
bool is_iteration(std::string_view name);
/// Returns how many numbers the name of a rank's folder has.
std::size_t count_numbers(std::string_view name);

/// Finds the folders of ranks among `names`, and sorts them by rank. `second`: the meaning of the
/// second number, if names have two. Throws: Error(corruption) for a missing rank or too large a
/// number; Error(unsupported) for two folders of one rank, or names with unequal counts of numbers.
RankFolders find_rank_folders(const std::vector<std::string>& names, const std::string& directory,
                              SecondNumber second);

}  // namespace tessera::formats::megatron
