#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/part_of_check.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/inspect/verify.h"

namespace tessera::inspect {

/// The rule of the note that only a part of a checkpoint was opened. This note comes first.
inline constexpr std::string_view kRuleOfPart = "part";

/// Returns the bytes of all pieces' elements.
std::uint64_t pieces_nbytes(const formats::TensorEntry& tensor);

/// A finding of one part of a check. `join_parts` needs the members after `finding`.
struct FindingOfPart {
  /// The checks, in their order.
  enum class Stage : std::uint8_t { contents, stored_bytes, values, numbers };

  formats::Finding finding;
  Stage stage = Stage::contents;
  std::uint64_t unit = 0;      // index of the checked file or tensor; one part has all its findings
  bool is_only_first = false;  // drop it if an earlier stage has a finding with the same name
};

/// What one of several processes found, and which part of which check it did.
struct PartOfVerify {
  int index = 0;
  int num_parts = 1;
  VerifyOptions::Numbers numbers = VerifyOptions::Numbers::any;
  std::vector<FindingOfPart> findings{};  // in the order in which they were found
  std::vector<formats::CountedNote> notes{};

  bool has_errors() const;
};

/// What one of several processes printed: the JSON of `part_of_verify_to_value`, and the path of
/// the file with that JSON.
struct PartDocument {
  std::string path;
  Value document;
};

/// Does one part, number `index` of `num_parts`, of the checks of `verify`. Every stored byte is
/// checked by one part. Requires: `0 <= index < num_parts`. Throws: as `verify`.
PartOfVerify verify_part(const formats::CheckpointReader& reader, const VerifyOptions& options,
                         int index, int num_parts);

/// Returns about how many bytes `verify_part` reports to `progress`. Reads no elements.
std::uint64_t verify_part_nbytes(const formats::CheckpointReader& reader,
                                 const VerifyOptions& options, int index, int num_parts);

/// Joins the results of all parts into the report that a single process would make. Requires: they
/// are all parts of one check, each once.
VerifyReport join_parts(const std::vector<PartOfVerify>& parts,
                        const formats::CheckpointReader& reader);

/// Returns the members of the JSON object from which `join_verify_documents` makes the part again.
Value::Dict part_of_verify_to_value(const PartOfVerify& part,
                                    const formats::CheckpointReader& reader);

/// Joins the documents of all parts. Reads no elements. Requires: one document or more. Throws:
/// Error(corruption) naming file and member for a document of another kind; Error(mismatch) for
/// parts of another checkpoint or check, for a missing part, and for a part that is given twice.
VerifyReport join_verify_documents(const std::vector<PartDocument>& documents,
                                   const formats::CheckpointReader& reader,
                                   VerifyOptions::Numbers numbers);

}  // namespace tessera::inspect
