#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::formats::megatron {

/// The file that each rank has in its folder, and the one beside it that the distributed optimizer
/// writes.
inline constexpr std::string_view kModelFile = "model_optim_rng.pt";
inline constexpr std::string_view kOptimizerFile = "distrib_optim.pt";
/// In the folder of a run: names the newest checkpoint.
inline constexpr std::string_view kTracker = "latest_checkpointed_iteration.txt";

/// Where a rank is: its numbers in the groups of tensor, pipeline and expert parallelism.
struct Place {
  std::size_t tensor = 0;
  std::size_t stage = 0;
  std::size_t expert = 0;
};

/// What the second of two numbers in a folder's name is: `mp_rank_00_001`.
enum class SecondNumber { stage, expert };

/// The folders of one save, in the order of ranks: tensor ranks first, then experts, then stages.
struct RankFolders {
  Place sizes;  // how many there are of each
  std::vector<std::string> names;

  std::size_t index_of(const Place& place) const {
    return (place.stage * sizes.expert + place.expert) * sizes.tensor + place.tensor;
  }
  Place place_of(std::size_t index) const;
};

/// Whether a name is that of a rank's folder, such as `mp_rank_00` or `mp_rank_00_001_002`.
bool is_rank_folder(std::string_view name);
/// Whether a name is that of a checkpoint's folder in the folder of a run.
bool is_iteration(std::string_view name);
/// Returns how many numbers the name of a rank's folder has.
std::size_t count_numbers(std::string_view name);

/// Puts the folders of ranks in order. `second` matters if their names have two numbers.
/// Throws: Error(corruption) naming a missing rank; Error(unsupported) for names of several kinds.
RankFolders find_rank_folders(const std::vector<std::string>& names, const std::string& directory,
                              SecondNumber second);

}  // namespace tessera::formats::megatron
