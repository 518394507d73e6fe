#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/tensor_reader.h"

namespace tessera::inspect {

/// Options of a comparison: tolerances, and the names to compare.
struct DiffOptions {
  /// An element of A equals one of B if `|a - b| <= atol + rtol * |b|`, with the magnitude of
  /// complex numbers; NaN equals NaN, and an infinity equals itself. If only `rtol` or `atol` is
  /// set, the other is 0. If neither is set, elements must be equal bit for bit, or as numbers if
  /// their dtypes differ.
  std::optional<double> rtol{};
  /// The absolute tolerance in the formula at `rtol`, which also says what an unset one means.
  std::optional<double> atol{};

  /// What to do with two tensors of different dtypes: report the dtypes, or compare the elements as
  /// numbers.
  enum class DTypes { must_agree, any } dtypes = DTypes::must_agree;

  std::vector<Rename> renames{};  // change A's names into B's; the first that matches is used
  NameSelection names{};          // names in B of the tensors and values to compare
  ScanOptions scan{};             // threads and memory for reading
};

/// How many elements of a tensor differ, and the first of them.
struct ElementDifferences {
  std::int64_t numel = 0;
  std::int64_t num_different = 0;
  Shape first_index{};    // index of the first differing element in row-major order
  std::string first_a{};  // that element of A, as text
  std::string first_b{};  // that element of B
  std::int64_t num_nan_on_one_side = 0;
  /// The largest |a - b| of the differing elements; nothing if each of them has NaN on one side.
  std::optional<double> max_abs_difference{};
};

/// A name whose contents differ between two checkpoints.
struct Difference {
  /// In what way the contents differ.
  enum class Kind {
    missing,  // only in A
    extra,    // only in B
    shape,
    dtype,
    elements,  // the elements of a tensor differ
    value,     // the values differ
    type,      // a tensor on one side, a value on the other
    refused,   // values that are not compared: one has objects of classes, which are never read
  };
  Kind kind;
  std::string name;
  std::string a{};  // A's content as text; empty if A lacks the name, or for kind `elements`
  std::string b{};  // as `a`, of B
  std::optional<ElementDifferences> elements{};  // only for kind `elements`
};

/// A name that is tied to other names in A than in B.
struct Untied {
  std::string name;
  std::string target_a{};  // in A: the tensor of this alias, by the name in B; empty: no alias
  std::string target_b{};
};

/// A name whose keys in the nested state dict are others in A than in B, such as a number and text.
struct OtherKeys {
  std::string name;
  std::string keys_a;  // as Python spells them: `["state"][0]`; `[item 0]` is an item of a list
  std::string keys_b;
};

/// How two checkpoints differ.
struct DiffReport {
  std::vector<Difference> differences{};  // sorted by name
  /// Names in both checkpoints that are an alias of a tensor in one of them, but not tied to a
  /// tensor of this name in the other. This alone is not a difference: the contents were compared.
  std::vector<Untied> untied{};
  /// Names in both checkpoints with different keys. This alone is not a difference. Compares keys
  /// as text if one of the formats keeps only their text (DCP), and not at all if one checkpoint
  /// has names without keys (safetensors of other programs), or for renamed names and entries of
  /// single ranks.
  std::vector<OtherKeys> other_keys{};
  std::int64_t num_tensors_compared = 0;  // names in both, aliases included
  std::int64_t num_values_compared = 0;
  std::uint64_t nbytes_compared = 0;  // of the elements in A
};

/// Compares the contents of two checkpoints, whatever their formats and shardings: names, shapes,
/// dtypes, elements, values. An alias counts as the tensor it names. The report uses the names in
/// B. Throws: Error(invalid_argument) if renames give two entries of A the same name, or a rename
/// matches nothing; Error(corruption), Error(io) if a checkpoint cannot be read;
/// Error(interrupted).
DiffReport diff(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                const DiffOptions& options);

/// Returns how many bytes of elements `diff` would read from both together: its progress total.
std::uint64_t diff_nbytes(const formats::CheckpointReader& a, const formats::CheckpointReader& b,
                          const DiffOptions& options);

}  // namespace tessera::inspect
