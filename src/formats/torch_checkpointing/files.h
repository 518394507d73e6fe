#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "formats/torch_checkpointing/metadata.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_checkpointing {

/// The item and the rank in the default name of a file: `optimizer_3.pt` is what rank 3 saved of
/// the item `optimizer`.
struct DefaultName {
  std::string item;
  std::uint64_t rank = 0;
};

/// Returns the item and the rank of a name `<item>_<rank>.pt`; nothing for any other name, and
/// nothing for names that end with `rank_<rank>.pt`, which other trainers use.
std::optional<DefaultName> parse_default_name(std::string_view name);
std::string default_name(const std::string& item, int rank);

/// Whether a folder has `metadata.pkl`, and a name with rank 0 before its first dot: `m_0.pt`.
bool are_with_metadata(const std::vector<std::string>& names);
/// Whether a folder looks like a checkpoint without `metadata.pkl`: an item has default names of
/// ranks 0 and 1.
bool are_without_metadata(const std::vector<std::string>& names);

/// One file of the checkpoint.
struct Source {
  std::string name;  // its path relative to the directory
  std::string item;
  int rank = 0;
  std::string form;  // `TorchSerialization`
};

struct Sources {
  int world_size = 1;
  std::vector<Source> files;  // sorted by item, then rank
  std::vector<Finding> notes{};
};

/// Finds the files of all ranks: those that `metadata` names, and files with default names of other
/// items (which cannot be resharded). `metadata`: may be null. Throws: Error(corruption)
/// naming a file of a rank that this save did not have, or a missing file. A rank without tensors
/// of an item in `metadata` needs no file of it; of another item, rank 0's file alone is enough.
Sources find_sources(const FileSystem& fs, const std::string& directory,
                     const std::vector<std::string>& names, const Metadata* metadata);

}  // namespace tessera::formats::torch_checkpointing
