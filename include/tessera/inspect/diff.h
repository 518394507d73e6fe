#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/glob.h"
#include "tessera/base/rename.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/scan_options.h"

namespace tessera::inspect {

/// What counts as a difference, and where to look for one.
struct DiffOptions {
  /// An element of A equals one of B where `|a - b| <= atol + rtol * |b|`; then NaN equals NaN and
  /// an infinity itself. One that is not given is 0; where neither is, elements are equal that are
  /// so bit for bit.
  std::optional<double> rtol{};
  /// See `rtol`.
  std::optional<double> atol{};

  /// Whether tensors of different dtypes are compared as numbers, instead of being a difference.
  enum class DTypes { must_agree, any } dtypes = DTypes::must_agree;

  std::vector<Rename> renames{};  // of A's names, to what they are in B; the first that fits
  NameSelection names{};          // tensors and values that are compared, by the names in B
  ScanOptions scan{};             // how tensors are read
};

/// How many elements of a tensor differ, and where it begins.
struct ElementDifferences {
  std::int64_t numel = 0;
  std::int64_t num_different = 0;
  Shape first_index{};  // of the first one in row-major order, one entry per dimension
  std::string first_a{};
  std::string first_b{};
  std::int64_t num_nan_on_one_side = 0;
  /// The largest |a - b| of the elements that differ; nothing where that is NaN for all of them.
  std::optional<double> max_abs_difference{};
};

/// A name under which two checkpoints differ.
struct Difference {
  /// In what way they differ.
  enum class Kind {
    missing,  // in A alone
    extra,    // in B alone
    shape,
    dtype,
    elements,  // of a tensor
    value,     // of something that is no tensor
    type,      // a tensor on one side, a value on the other
  };
  Kind kind;
  std::string name;
  std::string a{};  // in words, for all kinds but `elements`; empty where there is nothing
  std::string b{};
  std::optional<ElementDifferences> elements{};  // for that kind
};

/// How two checkpoints differ.
struct DiffReport {
  std::vector<Difference> differences{};  // by name
  /// Names that are aliases in one checkpoint and tensors of their own in the other. No difference:
  /// what they hold was compared.
  std::vector<std::string> untied{};
  std::int64_t num_tensors_compared = 0;  // names in both, with aliases
  std::int64_t num_values_compared = 0;
  std::uint64_t nbytes_compared = 0;  // of tensors' elements, one side
};

/// Compares what two checkpoints hold, whatever their formats and shardings: names, shapes, dtypes,
/// elements, values. An alias stands for the tensor it names. Names in the report are those in B.
/// Throws: Error(invalid_argument) where two names of A become one, or a rename fits none;
/// Error(corruption), Error(io) where either cannot be read; Error(interrupted).
DiffReport diff(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                const DiffOptions& options);

/// Returns the bytes of elements that `diff` would read, of both sides: what progress goes up to.
std::uint64_t diff_nbytes(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                          const DiffOptions& options);

}  // namespace tessera::inspect
