#include "support/contents_text.h"

#include <gtest/gtest.h>

#include "tessera/layout/region.h"

namespace tessera::test {

std::string pieces_of(const formats::CheckpointReader& reader, const std::string& fqn) {
  const formats::TensorEntry* const tensor = reader.contents().find_tensor(fqn);
  if (tensor == nullptr) return "none";
  std::string text;
  for (const formats::Piece& piece : tensor->pieces) {
    text += (text.empty() ? "" : ", ") + region_to_string(piece.region) + " on " +
            std::to_string(piece.rank);
  }
  return text;
}

std::vector<std::string> notes_of(const formats::CheckpointReader& reader) {
  std::vector<std::string> notes;
  for (const formats::Finding& finding : reader.contents().opening_findings) {
    EXPECT_EQ(finding.severity, formats::Finding::Severity::note);
    notes.push_back(finding.rule + ": " + finding.found);
  }
  return notes;
}

}  // namespace tessera::test
