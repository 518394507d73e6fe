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

/// [Note: Values file] What a checkpoint holds and safetensors has no place for lies beside it as
/// JSON: values, key paths, kinds of optimizer state, flat units. The tensor file (or the index)
/// names the XXH3-64 of that text under `tessera.values`: a values file that belongs to other
/// tensors is never taken for this checkpoint's, and one that nobody names is ignored. Where there
/// are no values, the text itself stands there, under `tessera.structure`, and there is no file.
inline constexpr std::string_view kValuesSuffix = ".values.json";
inline constexpr std::string_view kValuesDigestKey = "tessera.values";
inline constexpr std::string_view kStructureKey = "tessera.structure";

/// What is longer goes to a values file all the same: other readers parse the whole header.
inline constexpr std::size_t kMaxStructureNbytes = std::size_t{16} << 20;

/// Returns where the values of a single tensor file lie, or of the files that an index names.
inline std::string values_path_of(const std::string& tensors) {
  return tensors + std::string(kValuesSuffix);
}

/// Bounds what is read, and therefore also what is written.
inline constexpr std::size_t kMaxValuesNbytes = std::size_t{64} << 20;
// Of JSON levels: a value takes up to three for each level of its own.
inline constexpr int kMaxValuesDepth = 1000;

/// Returns the text, or nothing (an empty string) where there is nothing to say. A key path that is
/// but the name says nothing.
std::string format_values_file(const CheckpointContents& contents, const std::vector<Value>& values,
                               JsonStyle style);

/// Whether `head` is the beginning of what `format_values_file` returns, or all that was written.
bool begins_as_values_file(std::string_view head);

/// Whether the file begins so. An empty one does not.
bool is_values_file(const FileSystem& fs, const std::string& path);

/// Whether it is that, or what is there before it is written: nothing.
bool may_be_values_file(const FileSystem& fs, const std::string& path);

/// Adds what `text` says to `contents` and to the parallel `values`, which hold tensors and aliases
/// so far. Leaves `contents.values` sorted.
/// Throws: Error(corruption) naming `path`; Error(unsupported) on a later schema.
void apply_values_file(std::string_view text, const std::string& path, CheckpointContents& contents,
                       std::vector<Value>& values);

/// Returns the XXH3-64 of `text` as 16 hex digits.
std::string values_digest(std::string_view text);

/// [Note: Replaced values] A single tensor file's values lie beside it and are replaced first. A
/// writer that dies before it has replaced the tensors leaves the values that these name under the
/// name of those in progress, `<values>.partial`: there readers find them, and from there the next
/// writer puts them back.

/// Returns the values at `path` (or those that were replaced) that have the digest.
/// Throws: Error(corruption) where there are none.
std::string read_values_file(const FileSystem& fs, const std::string& path,
                             const std::string& digest);

/// Puts back what was replaced, where the tensors at `destination` name it. Requires: no other
/// writer is at work there.
void put_back_replaced_values(FileSystem& fs, const std::string& destination);

/// Says whether the single file at `tensors` names the values at `path`.
bool names_values(const FileSystem& fs, const std::string& tensors, const std::string& path);

/// Removes the values beside a single file, and those that a dead writer had begun, as far as that
/// goes: what replaces them stands, and names none of them (`left_over_at` tells).
void remove_values_beside(FileSystem& fs, const std::string& destination) noexcept;

}  // namespace tessera::formats::detail
