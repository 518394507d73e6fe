#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/scan_options.h"

namespace tessera::inspect {

/// What is checked beside structure and checksums.
struct VerifyOptions {
  /// Whether numbers that are NaN or infinite are findings too (rule `finite`).
  enum class Numbers { any, must_be_finite } numbers = Numbers::any;
  ScanOptions scan{};  // how tensors are read
};

/// What a check has found, and how much it has looked at.
struct VerifyReport {
  std::vector<formats::Finding> findings{};  // by file, then tensor, then rule
  std::int64_t num_tensors = 0;
  std::int64_t num_pieces = 0;
  std::int64_t num_values = 0;
  std::uint64_t nbytes = 0;  // of the pieces' elements

  /// Says whether a finding is more than a note.
  bool has_errors() const;
};

/// Checks all that can be known of an open checkpoint, and goes on after a finding where it can:
/// what the format checks (every stored byte against its checksum, files, structure); rule
/// `coverage`: pieces that leave out elements or share them; rule `value`: values that cannot be
/// read (a note, where they are of a kind that is never read); rules `alias` and `units`: names of
/// tensors that are not there, or of other shapes. Throws: Error(io) where the operating system
/// fails; Error(interrupted).
VerifyReport verify(const formats::CheckpointReader& reader, const VerifyOptions& options);

/// Returns the bytes that `verify` reports progress on.
std::uint64_t verify_nbytes(const formats::CheckpointReader& reader, const VerifyOptions& options);

}  // namespace tessera::inspect
