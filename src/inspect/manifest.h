#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "inspect/summary.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {

/// The digests of a checkpoint's contents, by name. Equal contents give equal manifests in every
/// format and sharding. A plain value type.
///
///     tensor   the digest that `compute_content_digests` returns
///     alias    the digest of its tensor
///     value    the XXH3-128 of the text `value`, a line feed, and the value as compact JSON
///              (`value_to_json`)
///
/// `to_text` has a line `DIGEST  NAME` (two spaces) for each entry, and ends with `whole: DIGEST`,
/// the XXH3-128 of these lines. In names, `\` is written `\\`, and control bytes and invalid UTF-8
/// `\xNN`. With extra files, the text begins with a line `file DIGEST  NAME` for each, then `files:
/// DIGEST`, the XXH3-128 of these lines. The `whole` digest does not cover the files: it stays the
/// same if only extra files change. A part of a manifest ends with `part I/N FILES: DIGEST` instead
/// of `whole: DIGEST`. So a part cannot be mistaken for a whole manifest. FILES is Part::files.
struct Manifest {
  /// A name and the digest of its contents.
  struct Entry {
    std::string name;
    std::string digest;  // 32 hex digits
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  /// Which of several processes that share the work made this manifest.
  struct Part {
    int index;
    int num_parts;
    /// A digest of the names and states of all data files of the checkpoint. Equal for all parts,
    /// if the checkpoint does not change in between. Empty: not known.
    std::string files{};
    friend bool operator==(const Part&, const Part&) = default;
  };
  std::vector<Entry> entries{};  // sorted by name (byte order), no name twice
  std::vector<Entry> files{};    // extra files beside the checkpoint; sorted as `entries`
  std::optional<Part> part{};    // nothing: the manifest has all names

  /// Returns the digest of all entries, which is in the last line of `to_text`.
  std::string whole_digest() const;
  /// Returns the text that parse_manifest reads.
  std::string to_text() const;

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

/// Returns the manifest of the selected names. Throws: Error(corruption) if something cannot be
/// read or an alias has no target; Error(io); Error(unsupported) for a value that Tessera never
/// reads (one with objects of classes); Error(interrupted).
Manifest compute_manifest(const formats::CheckpointReader& reader, const Selection& selection,
                          const ScanOptions& options);

/// Returns how many bytes of elements compute_manifest reads. This is the total for its progress.
std::uint64_t manifest_nbytes(const formats::CheckpointContents& contents,
                              const Selection& selection);

/// Reads a manifest as text, or the JSON of `ckpt-inspect hash --json`. Lines may be in any order
/// and end with LF or CRLF. The line `whole:` (or `part I/N FILES:`) is required, and its digest
/// must match the entries, because a truncated manifest could look complete. Throws:
/// Error(corruption) naming `path` and the line.
Manifest parse_manifest(std::string_view text, const std::string& path);

/// Throws as parse_manifest does if a text that begins with `begin` cannot be a manifest. So a
/// caller can refuse a wrong file before it reads all of it.
void check_manifest_begin(std::string_view begin, const std::string& path);

/// A name whose digests differ between two manifests.
struct ManifestDifference {
  /// In what way the digests differ.
  enum class Kind {
    changed,
    missing,  // in the expected manifest, but not in the found one
    extra,    // in the found manifest, but not in the expected one
  } kind;
  std::string name;
  std::string expected{};  // digest; empty if the name is not there
  std::string found{};
  bool is_file = false;  // the name is that of an extra file
  friend bool operator==(const ManifestDifference&, const ManifestDifference&) = default;
};

/// Returns the digests of extra files, for `Manifest::files`: the XXH3-128 of each file's bytes.
/// Sorted by name. `names`: the names of these files in `directory`.
std::vector<Manifest::Entry> digest_files(const FileSystem& fs, const std::string& directory,
                                          const std::vector<std::string>& names);

/// Returns the differences, sorted by name; differences of files come last. Ignores the files of
/// `found` if `expected` has no files, because older manifests have none.
std::vector<ManifestDifference> compare(const Manifest& expected, const Manifest& found);

}  // namespace tessera::inspect
