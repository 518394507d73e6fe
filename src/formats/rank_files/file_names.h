#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::formats::rank_files {

/// What the name of one rank's file says: `model_world_size_8_rank_3.pt`, `rank3.pt`.
struct FileName {
  std::string name;
  std::string item;                        // what the ranks saved: `model`; may be empty
  std::optional<std::uint64_t> num_ranks;  // if the name has a `world_size_<N>`
  std::uint64_t rank = 0;
};

/// Returns nothing unless the name ends with `rank`, a number and a suffix of torch.save.
std::optional<FileName> parse_file_name(std::string_view name);

/// What Tessera's writer calls the files, as verl and SkyRL do. The last one, without a name, has
/// the entries that belong into no other.
inline constexpr std::array<std::string_view, 4> kWrittenItems{"model", "optim", "extra_state", ""};
bool is_written_item(std::string_view item);
/// Returns the name of a file that Tessera's writer makes.
std::string written_file_name(std::string_view item, int world_size, int rank);

/// The files of all ranks for one item, by rank.
struct Item {
  std::string name;
  std::vector<FileName> files;
};

/// Returns the files of ranks among the names of a directory, by item. Several files of one rank
/// are all in the list.
std::vector<Item> items_among(const std::vector<std::string>& names);

/// Whether the names are those of a checkpoint: files of several ranks, or files that name the
/// number of ranks.
bool are_of_a_checkpoint(const std::vector<Item>& items);

/// Throws Error(corruption) unless each item has one file of every rank, and all items have as many
/// ranks. Throws Error(unsupported) for the items of several checkpoints. Returns the number of
/// ranks. `path`: of the directory.
int check_items(const std::vector<Item>& items, const std::string& path);

/// Whether a name is that of optimizer state of one numbered parameter: `optim.state.3.exp_avg`.
bool is_numbered_state(std::string_view name);

}  // namespace tessera::formats::rank_files
