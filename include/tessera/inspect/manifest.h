#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/scan_options.h"
#include "tessera/inspect/summary.h"

namespace tessera::inspect {

/// The digests of what a checkpoint holds, by name: equal for equal contents in every format and
/// sharding. A tensor's is of `compute_content_digests`; an alias has that of the tensor it names;
/// a value's is XXH3-128 of the line `value`, its line break, and the value as compact JSON
/// (`value_to_json`). A plain value type.
///
/// As text it has a line `DIGEST  NAME` for each, and at the end `whole: DIGEST`, which is XXH3-128
/// of the lines before. In names, `\` is written `\\`, and control bytes and invalid UTF-8 `\xNN`.
struct Manifest {
  /// A name and the digest of what stands under it.
  struct Entry {
    std::string name;
    std::string digest;  // 32 hex digits
    friend bool operator==(const Entry&, const Entry&) = default;
  };
  std::vector<Entry> entries{};  // by name (byte order), no name twice

  /// Returns the digest of all entries together: the last line of the text.
  std::string whole_digest() const;
  /// Returns the manifest as parse_manifest reads it.
  std::string to_text() const;

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

/// Throws: Error(corruption) where something cannot be read or an alias has no target; Error(io);
/// Error(unsupported) where a value is of a kind that is never read; Error(interrupted).
Manifest compute_manifest(const formats::CheckpointReader& reader, const Selection& selection,
                          const ScanOptions& options);

/// Returns the bytes of elements that compute_manifest reads: what progress goes up to.
std::uint64_t manifest_nbytes(const formats::CheckpointContents& contents,
                              const Selection& selection);

/// Reads a manifest as text, or as the JSON that `ckpt-inspect hash --json` prints. Lines may stand
/// in any order and end with LF or CRLF. The digest of the whole must be there and fit: without it
/// a manifest that is cut short looks like one of fewer names. Throws: Error(corruption) naming
/// `path` and the line.
Manifest parse_manifest(std::string_view text, const std::string& path);

/// Judges by the first bytes of a text whether it can be a manifest, before it is read in full.
/// Throws: as parse_manifest.
void check_manifest_begin(std::string_view begin, const std::string& path);

/// A name under which two manifests differ.
struct ManifestDifference {
  /// In what way they differ.
  enum class Kind {
    changed,
    missing,  // expected, but not found
    extra,    // found, but not expected
  } kind;
  std::string name;
  std::string expected{};  // digests; empty where there is none
  std::string found{};
  friend bool operator==(const ManifestDifference&, const ManifestDifference&) = default;
};

/// Returns the differences by name; none where the manifests are equal.
std::vector<ManifestDifference> compare(const Manifest& expected, const Manifest& found);

}  // namespace tessera::inspect
