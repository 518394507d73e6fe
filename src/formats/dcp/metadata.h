#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/list_of_lists.h"
#include "formats/pickle/pickle_bytes.h"
#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::dcp {

inline constexpr const char* kMetadataFile = ".metadata";
inline constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
inline constexpr std::string_view kFilesystemModule = "torch.distributed.checkpoint.filesystem";

/// The place of one item (a chunk of a tensor, or a value): DCP's `_StorageInfo`. Units: bytes.
/// Small, because a large checkpoint has millions of items.
struct StorageInfo {
  static constexpr int kNbytesBits = 44;  // items of less than 16 TiB
  static constexpr int kFileBits = 64 - kNbytesBits;
  static constexpr std::uint64_t kMaxNbytes = (std::uint64_t{1} << kNbytesBits) - 1;
  static constexpr std::uint64_t kMaxFiles = std::uint64_t{1} << kFileBits;

  std::uint64_t offset = 0;
  std::uint64_t nbytes : kNbytesBits = 0;
  std::uint64_t file : kFileBits = 0;  // index into Storage::files
};
static_assert(sizeof(StorageInfo) == 16);

/// The places of all items of a checkpoint.
struct Storage {
  std::vector<std::string> files;  // relative to the checkpoint
  std::vector<int> ranks;          // parallel to files
  /// Parallel to contents.tensors and their pieces.
  tessera::detail::ListOfLists<StorageInfo> pieces;
  std::vector<StorageInfo> values;  // parallel to contents.values
};

/// The contents of `.metadata`, sorted and checked as CheckpointReader promises. A piece's rank is
/// the number in the name of its file, `__<rank>_<n>.distcp`. If any file's name has another form,
/// it is the place of the file among the sorted names. In the metadata of one rank, it is 0.
struct Metadata {
  CheckpointContents contents;
  Storage storage;
  /// Whether the planner flattened the state dict. If not, values may hold tensors.
  bool is_flattened = false;
  /// Tensors that Tessera does not read, such as quantized ones, each with the reason.
  /// `contents.values` has a value of the same name for each.
  std::map<std::string, Error, std::less<>> refused_tensors;
  std::vector<std::string>
      foreign_names;  // classes that the pickle names and Tessera does not know
};

/// The name of the metadata of one rank (name_pattern.h), saved with use_collectives=False.
inline constexpr std::string_view kMetadataOfOneRank = "__#.metadata";

/// Reads the pickle of a `Metadata` object in the forms that torch 2.2 to 2.15 write. `path` is for
/// messages. Ignores objects of unknown classes in places that Tessera does not need.
/// Throws: Error(corruption); Error(unsupported) naming a call of a foreign function, a class or an
/// attribute of a newer torch, a layout or a stream extension that Tessera does not read.
Metadata parse_metadata(pickle::PickleBytes bytes, const std::string& path);

/// Makes `.metadata` for these contents: the pickle of a `Metadata` object of
/// torch.distributed.checkpoint.metadata, version 1.0.0. Passes it to `write` in parts of about
/// 1 MiB, in their order. Requires: Box pieces only.
void pickle_metadata(const CheckpointContents& contents, const Storage& storage,
                     const std::function<void(std::string_view)>& write);
/// Returns the whole pickle as one string.
std::string pickle_metadata(const CheckpointContents& contents, const Storage& storage);

}  // namespace tessera::formats::dcp
