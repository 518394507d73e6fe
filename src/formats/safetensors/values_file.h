#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::detail {

/// [Note: Values file] What safetensors cannot store is in a JSON file beside the tensor file:
/// values, key paths, kinds of optimizer state, flat units. The tensor file (or the index) holds
/// the XXH3-64 of its text under `tessera.values`, so that no reader uses values of other tensors.
/// Readers ignore a values file without such an entry. If there are no values, the tensor file (or
/// the index) holds the text itself, under `tessera.structure`, and there is no values file.
inline constexpr std::string_view kValuesSuffix = ".values.json";
inline constexpr std::string_view kValuesDigestKey = "tessera.values";
inline constexpr std::string_view kStructureKey = "tessera.structure";

/// A longer structure text goes into a values file, even if there are no values, because every
/// reader must parse the whole header.
inline constexpr std::size_t kMaxStructureNbytes = std::size_t{16} << 20;

/// Returns the path of the values file that belongs to `tensors`: a single tensor file, or the
/// `<model>.safetensors` that an index `<model>.safetensors.index.json` stands for.
inline std::string values_path_of(const std::string& tensors) {
  return tensors + std::string(kValuesSuffix);
}

/// The longest values file that is read, and so also the longest that is written.
inline constexpr std::size_t kMaxValuesNbytes = std::size_t{64} << 20;
// The most nested levels of JSON in a values file. One level of a value takes up to three levels of
// JSON.
inline constexpr int kMaxValuesDepth = 1000;

/// Returns the text of a values file; empty if there is nothing to store. Does not store the key
/// path of a top-level entry, because it is the entry's name.
std::string format_values_file(const CheckpointContents& contents, const std::vector<Value>& values,
                               JsonStyle style);

/// Whether `head`, the first bytes of a file, is the beginning of a text that `format_values_file`
/// can return.
bool begins_as_values_file(std::string_view head);

/// Whether the file starts like a values file. An empty file does not.
bool is_values_file(const FileSystem& fs, const std::string& path);

/// Whether the file starts like a values file, or is empty.
bool may_be_values_file(const FileSystem& fs, const std::string& path);

/// Adds the content of `text` to `contents` and the parallel `values`. Requires: `contents` holds
/// all tensors and aliases, and no values yet. Leaves `contents.values` sorted.
/// Throws: Error(corruption) naming `path`; Error(unsupported) for a later schema.
void apply_values_file(std::string_view text, const std::string& path, CheckpointContents& contents,
                       std::vector<Value>& values);

/// Returns the XXH3-64 of `text` as 16 hex digits.
std::string values_digest(std::string_view text);

/// [Note: Replaced values] The values beside a single tensor file are replaced before the tensors.
/// If the writer dies in between, the values of the old tensors are at `<values>.partial`, or at
/// `<values>.partial.old` ([Note: Exchange in steps]): readers find them there, and the next writer
/// restores them.

/// Returns the text with this digest: that of `path`, or else the replaced values. Returns nothing
/// if there are no such replaced values, and no file at `path`. Throws: Error(corruption) if the
/// file at `path` has another digest, or is too large.
std::optional<std::string> read_values_file(const FileSystem& fs, const std::string& path,
                                            const std::string& digest);

/// If the tensor file at `destination` has the digest of the replaced values ([Note: Replaced
/// values]), restores these. Requires: no other writer uses the destination.
void put_back_replaced_values(FileSystem& fs, const std::string& destination);

/// Says whether the tensor file at `tensors` has the digest of the values at `path`.
bool names_values(const FileSystem& fs, const std::string& tensors, const std::string& path);

/// Removes the values file beside a single file, and a values file that a dead writer had begun.
/// Ignores failures: the new checkpoint is in place and does not name these files (`left_over_at`
/// reports them).
void remove_values_beside(FileSystem& fs, const std::string& destination) noexcept;

}  // namespace tessera::formats::detail
