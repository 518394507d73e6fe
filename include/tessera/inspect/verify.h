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
  std::vector<formats::Finding> findings{};  // first rule `part`; the others by file, tensor, rule
  std::int64_t num_tensors = 0;
  std::int64_t num_pieces = 0;
  std::int64_t num_values = 0;
  std::uint64_t nbytes = 0;  // of the pieces' elements

  /// Returns whether any finding is an error; false if all are notes, or if there are none.
  bool has_errors() const;
};

/// Checks an open checkpoint completely, and returns damage as findings. Checks what the format can
/// check (all checksums, files, structure), and that the pieces of a tensor hold each element once
/// (rule `coverage`), each value can be read (`value`; a note if Tessera never reads such a value),
/// each alias has its tensor (`alias`), and each parameter of a flat unit is a tensor of the same
/// shape (`units`). Throws: Error(io) if the system fails; Error(interrupted) on a stop request.
VerifyReport verify(const formats::CheckpointReader& reader, const VerifyOptions& options);

/// Returns how many bytes `verify` reports to `options.scan.progress` in total.
std::uint64_t verify_nbytes(const formats::CheckpointReader& reader, const VerifyOptions& options);

}  // namespace tessera::inspect
