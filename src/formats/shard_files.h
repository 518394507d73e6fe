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
#include "tessera/formats/checkpoint.h"

// Shared by the formats that store a model in several files with an index, as Hugging Face's
// programs do.
namespace tessera::formats::detail {

/// The place of a file among several, as its name states it: 2 of 3 in
/// `model-00002-of-00003.safetensors`.
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

/// Returns the usual index, else the first other one (readers refuse several others), or nothing.
std::optional<std::string> index_among(const std::vector<std::string>& names,
                                       const ShardNaming& naming);

/// Whether the file at `path` is an index, or one file of several: an index beside it names it, or
/// another file of its series is beside it. `names_file`: whether the index names the file `name`.
bool is_one_of_several(
    const FileSystem& fs, const std::string& path, const ShardNaming& naming,
    const std::function<bool(const std::string& index_path, const std::string& name)>& names_file);

/// Throws Error(corruption) if the names show that files are missing: a name has `-of-00003`, but
/// the files of its series are not three with consecutive numbers. Ignores names for which
/// `places_of` returns nothing.
void require_all_shards(const std::string& directory, const std::vector<std::string>& names,
                        std::vector<PlaceInSeries> (*places_of)(std::string_view name));

/// Throws Error(corruption) if `name` is a link to something outside the directory. Accepts the
/// links of Hugging Face's cache: in a directory `snapshots/<revision>`, links into the `blobs`
/// directory beside `snapshots`.
/// Requires: `is_contained_path(name)`.
void require_in_checkpoint(const FileSystem& fs, const std::string& directory,
                           const std::string& name);

/// Throws Error(invalid_argument) if `names`, the files of a directory, has a model in one file
/// beside an index that does not name this file: `model.safetensors` beside
/// `model.safetensors.index.json`. One of them may be from an earlier save, and programs differ in
/// which one they read (transformers the file, vLLM what the index names). `files_of_index`:
/// sorted.
void refuse_file_beside_index(const std::string& directory, const std::vector<std::string>& names,
                              const std::string& index,
                              const std::vector<std::string>& files_of_index,
                              const ShardNaming& naming);

/// Returns the error for a folder that has the files of a model and an adapter of PEFT, which are
/// two checkpoints. `model`, `adapter`: the name of a file of each.
Error refusal_of_adapter(const std::string& directory, const std::string& model,
                         const std::string& adapter);

/// Returns the names of the first files for a message, and the number of the others:
/// `a.safetensors, b.safetensors, c.safetensors and 4 more`.
std::string some_of(const std::vector<std::string>& names);

/// An index: which file has which tensor.
struct ShardIndex {
  static constexpr std::size_t kMaxNbytes = std::size_t{64} << 20;

  std::unordered_map<std::string, std::string> weight_map{};  // tensor to file
  std::vector<std::string> names{};                           // of the files, sorted
  /// The entries of `metadata`, except `total_size`, and except a number `total_parameters`: both
  /// count what the files have, which a move may change. An entry that is not a text is here as its
  /// JSON text.
  std::map<std::string, std::string> texts{};
  Value whole{};  // the JSON document
  /// What the index has besides `weight_map` and the `texts` of `metadata`.
  struct Rest {
    std::optional<Value> total_size{};   // of `metadata`
    std::vector<std::string> unknown{};  // members that Tessera does not know, in words
  } rest{};
};

/// Reads an index, and checks that all files that it names exist in `directory`.
/// Throws: Error(corruption) naming the tensor, or the missing file; Error(io).
ShardIndex read_shard_index(const FileSystem& fs, const std::string& directory,
                            const std::string& index_path);

/// Returns opening findings of a checkpoint: notes about members of an index that are not read, and
/// about a `total_size` that differs from the size of the tensors. `contents`: all tensors and
/// aliases.
std::vector<Finding> notes_on_rest(const ShardIndex::Rest& rest, const std::string& index_path,
                                   const std::unordered_map<std::string, std::string>& weight_map,
                                   const CheckpointContents& contents);

}  // namespace tessera::formats::detail
