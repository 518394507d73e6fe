#include <utility>

#include "formats/drivers.h"
#include "formats/open_files.h"
#include "formats/rank_files.h"
#include "formats/rank_files/file_names.h"
#include "formats/rank_files/joined_ranks.h"

namespace tessera::formats {

using rank_files::FileName;
using rank_files::Item;

std::unique_ptr<CheckpointReader> open_rank_files(const FileSystem& fs, std::string path,
                                                  const std::vector<std::string>& as_dict) {
  const std::vector<Item> items = rank_files::items_among(fs.list_directory(path));
  const int world_size = rank_files::check_items(items, path);
  std::vector<rank_files::RankFile> files;
  for (const Item& item : items) {
    for (const FileName& file : item.files) {
      files.push_back(
          {.name = file.name,
           .item = item.name,
           .rank = static_cast<int>(file.rank),
           .reader = torch_zip::read_torch_zip(open_kept(fs, join_path(path, file.name)), as_dict,
                                               torch_zip::Pieces::left_out)});
    }
  }
  return rank_files::join_ranks(rank_files_driver().format(), std::move(path), world_size,
                                std::move(files));
}

}  // namespace tessera::formats
