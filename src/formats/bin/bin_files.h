#pragma once

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/shard_files.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::bin {

inline constexpr std::string_view kFileSuffix = ".bin";
/// The end of the name of every index file.
inline constexpr std::string_view kIndexSuffix = ".bin.index.json";
/// The model in one file, as transformers and accelerate name it.
inline constexpr std::string_view kModelFile = "pytorch_model.bin";
/// The beginning of the names of files that hold a model, also of those that are no checkpoint of
/// this format: a model of accelerate under FSDP, or a second model.
inline constexpr std::string_view kModelBegin = "pytorch_model";
/// The stem of the files, of this format or of safetensors, by which diffusers finds a model.
inline constexpr std::string_view kDiffusersStem = "diffusion_pytorch_model";
inline constexpr detail::ShardNaming kShardNaming{"pytorch_model", kFileSuffix, kIndexSuffix};

/// Returns the place that a file's name states: 2 of 3 for `pytorch_model-00002-of-00003.bin`.
/// Returns nothing if the name states none.
std::optional<detail::PlaceInSeries> place_in_series(std::string_view name);

/// Returns the name of the file that is a whole model by itself. `names`: the names of all files in
/// a directory.
/// - `pytorch_model.bin`;
/// - else PEFT's `adapter_model.bin`, if `adapter_config.json` is there too;
/// - else nothing.
std::optional<std::string> lone_file(const std::vector<std::string>& names);

/// The files of a checkpoint.
struct FileSet {
  std::string directory;                                      // the names below are relative to it
  std::vector<std::string> names{};                           // sorted
  std::string index_path{};                                   // empty: no index
  std::unordered_map<std::string, std::string> weight_map{};  // from the index: tensor to file
  std::map<std::string, std::string> texts{};                 // from the index
  detail::ShardIndex::Rest rest{};                            // from the index
  bool lacks_index = false;  // the names show that an index is missing
};

/// Returns the files of the checkpoint at `path`, which is a directory or an index. All of the
/// files exist.
/// Throws: Error(corruption) naming a missing file; Error(invalid_argument) for a directory with
/// several checkpoints; Error(not_found).
FileSet find_files(const FileSystem& fs, const std::string& path);

}  // namespace tessera::formats::bin
