#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/torch_zip/torch_zip_reader.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/format.h"

namespace tessera::formats::rank_files {

/// One file of one rank.
struct RankFile {
  std::string name;  // its path from the checkpoint's directory
  std::string item;  // what the names of its entries begin with; may be empty
  int rank = 0;
  std::unique_ptr<torch_zip::TorchFileReader> reader;
  /// Whether the file has one tensor or value instead of a dict, whose name is the item's.
  bool is_sole = false;
};

/// Returns the files of all ranks as one checkpoint. What open_rank_files says of entries holds.
/// `notes` are the first of the opening findings. `files` are in the order of their ranks within
/// each item.
/// Throws: Error(corruption) naming a file of another rank, or tensors of different shape or dtype;
/// Error(unsupported) for a tensor whose place in the whole is not known.
std::unique_ptr<CheckpointReader> join_ranks(Format format, std::string path, int world_size,
                                             std::vector<RankFile> files,
                                             std::vector<Finding> notes = {});

}  // namespace tessera::formats::rank_files
