#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/value.h"

// What the formats share whose checkpoints are several files with an index beside them, as Hugging
// Face writes them.
namespace tessera::formats::detail {

/// `model-00002-of-00003.safetensors` has the place 2 of 3.
struct PlaceInSeries {
  std::string series;  // the name without the place: `model-`
  std::uint64_t number;
  std::uint64_t count;
};

/// Returns the place that a file's name states; nothing if it states none, or the name does not end
/// in `suffix`.
std::optional<PlaceInSeries> place_in_series(std::string_view name, std::string_view suffix);

/// How a format names the files of a model, and the index beside them.
struct ShardNaming {
  std::string_view model;         // the usual name: `model`, as in `model.safetensors.index.json`
  std::string_view file_suffix;   // `.safetensors`
  std::string_view index_suffix;  // `.safetensors.index.json`
};

/// Returns the index that a reader of the directory takes; none if there is no index.
std::optional<std::string> index_among(const std::vector<std::string>& names,
                                       const ShardNaming& naming);

/// Whether the file at `path` is an index, or one of several files, as the names or an index beside
/// it show. `names_file` says whether an index names a file.
bool is_one_of_several(
    const FileSystem& fs, const std::string& path, const ShardNaming& naming,
    const std::function<bool(const std::string& index_path, const std::string& name)>& names_file);

/// Throws Error(corruption) if the names show that files are missing: a name says `-of-00003`, and
/// there are fewer of its series. Names for which `has_place` returns nothing are left out.
void require_all_shards(const std::string& directory, const std::vector<std::string>& names,
                        std::optional<PlaceInSeries> (*place_of)(std::string_view name));

/// Throws Error(corruption) for a link out of the directory, except in Hugging Face's cache: a
/// directory `snapshots/<revision>` of links into the `blobs` beside `snapshots`.
/// Requires: `is_contained_path(name)`.
void require_in_checkpoint(const FileSystem& fs, const std::string& directory,
                           const std::string& name);

/// An index: which file has which tensor.
struct ShardIndex {
  static constexpr std::size_t kMaxNbytes = std::size_t{64} << 20;

  std::unordered_map<std::string, std::string> weight_map{};  // tensor to file
  std::vector<std::string> names{};                           // of the files, sorted
  /// The `metadata` but `total_size` and Tessera's own: texts, and other values as JSON.
  std::map<std::string, std::string> texts{};
  Value whole{};  // the JSON document
};

/// Reads an index. All files that it names exist in `directory`.
/// Throws: Error(corruption) naming the tensor, or the missing file; Error(io).
ShardIndex read_shard_index(const FileSystem& fs, const std::string& directory,
                            const std::string& index_path);

}  // namespace tessera::formats::detail
