#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::formats::rank_files {

/// The parts of the name of one rank's file: `model_world_size_8_rank_3.pt`, `rank3.pt`.
struct FileName {
  std::string name;
  std::string item;                        // the object that the ranks saved: `model`; may be empty
  std::optional<std::uint64_t> num_ranks;  // if the name has a `world_size_<N>`
  std::uint64_t rank = 0;
};

/// Returns the parts of the name; nothing unless it ends with `rank`, a number, and a suffix of
/// torch.save files.
std::optional<FileName> parse_file_name(std::string_view name);

/// The items for which Tessera's writer makes files, with the names that verl and SkyRL use. The
/// last item has no name: its file holds all entries that belong to none of the others.
inline constexpr std::array<std::string_view, 4> kWrittenItems{"model", "optim", "extra_state", ""};
bool is_written_item(std::string_view item);
/// Returns the name of a file that Tessera's writer makes.
std::string written_file_name(std::string_view item, int world_size, int rank);

/// The files of all ranks for one item (a saved object, such as the model), sorted by rank.
struct Item {
  std::string name;
  std::vector<FileName> files;
};

/// Returns the files of ranks among the names of a directory, grouped by item. If one rank has
/// several files for an item, all are listed.
std::vector<Item> items_among(const std::vector<std::string>& names);

/// Whether the names are those of a checkpoint: files of several ranks, or files whose names state
/// the number of ranks.
bool are_of_a_checkpoint(const std::vector<Item>& items);

/// Returns the number of ranks. `path`: of the directory. Throws: Error(corruption) unless each
/// item has a file of every rank, and all items have equally many ranks; Error(unsupported) if an
/// item has two files of one rank, or if the files are those of several checkpoints.
int check_items(const std::vector<Item>& items, const std::string& path);

}  // namespace tessera::formats::rank_files
