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
  std::string item;  // prefix of the names of its entries; may be empty
  int rank = 0;
  std::unique_ptr<torch_zip::TorchFileReader> reader;
  /// Whether the file holds one tensor or value instead of a dict. The name of the item becomes the
  /// name of this entry.
  bool is_sole = false;
};

/// Returns a reader that shows the files of all ranks as one checkpoint. Entries are joined as
/// open_rank_files describes. `notes`: the reader's first opening findings. `files`: sorted by rank
/// within each item.
/// Throws: Error(corruption) naming a file of another rank, or tensors of different shape or dtype;
/// Error(unsupported) for a tensor whose place in the whole is not known.
std::unique_ptr<CheckpointReader> join_ranks(Format format, std::string path, int world_size,
                                             std::vector<RankFile> files,
                                             std::vector<Finding> notes = {});

}  // namespace tessera::formats::rank_files
