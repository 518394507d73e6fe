#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {

/// What to check besides structure and checksums.
struct VerifyOptions {
  /// Whether NaN and infinities are also findings (rule `finite`).
  enum class Numbers { any, must_be_finite } numbers = Numbers::any;
  ScanOptions scan{};  // how tensors are read
};

/// What a check found, and how much it read.
struct VerifyReport {
  std::vector<formats::Finding> findings{};  // rule `part`, then all others by file, tensor, rule
  std::int64_t num_tensors = 0;
  std::int64_t num_pieces = 0;
  std::int64_t num_values = 0;
  std::uint64_t nbytes = 0;  // of the pieces' elements

  /// Returns whether a finding is worse than a note.
  bool has_errors() const;
};

/// Checks an open checkpoint completely. Continues after a finding if possible. Checks what the
/// format can check (checksums of all stored bytes, files, structure), and these rules: `coverage`:
/// pieces that miss elements or overlap; `value`: values that cannot be read (a note if Tessera
/// never reads them); `alias`: aliases of no tensor; `units`: parameters of flat units that are no
/// tensor, or one of another shape. Throws: Error(io) if the system fails; Error(interrupted).
VerifyReport verify(const formats::CheckpointReader& reader, const VerifyOptions& options);

/// Returns how many bytes `verify` reports to `progress` in total.
std::uint64_t verify_nbytes(const formats::CheckpointReader& reader, const VerifyOptions& options);

}  // namespace tessera::inspect
