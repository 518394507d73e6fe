#include "reshard/source_gaps.h"

#include <set>
#include <utility>

#include "formats/name_pattern.h"
#include "formats/per_rank_rules.h"
#include "reshard/piece_index.h"
#include "tessera/base/name_rules.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::Piece;

/// Returns the file names in words: `the file a that the checkpoint lists`. Of many names, returns
/// the first ones and the number of the others.
std::string files_in_words(const std::set<std::string>& files) {
  constexpr std::size_t kMaxNames = 3;
  std::string text;
  std::size_t num_names = 0;
  for (const std::string& file : files) {
    if (num_names == kMaxNames) break;
    text += (num_names++ == 0 ? "" : ", ") + printable(file);
  }
  if (files.size() > kMaxNames)
    text += " and " + std::to_string(files.size() - kMaxNames) + " more";
  return (files.size() == 1 ? "the file " : "the files ") + text + " that the checkpoint lists";
}

/// Reports a tensor or value that cannot be moved because its files are missing.
void report_missing_data(const std::string& fqn, const std::set<std::string>& files,
                         Relaxation missing, PlanReport& report) {
  report.relaxable(missing, "structure", fqn, files_in_words(files), "none");
}

/// Adds a note that files of a tensor are missing, but that other files have replicas of all its
/// data.
void note_replaced(const std::string& fqn, const std::set<std::string>& files, PlanReport& report) {
  report.note("structure", fqn, files_in_words(files),
              "none, but other files have copies of all its data");
}

}  // namespace

SourceGaps find_gaps(const formats::CheckpointReader& reader, const NameSelection& names) {
  SourceGaps gaps{reader.find_missing_data(), {}};
  const formats::EntrySelection selection(names);
  const auto& values = reader.contents().values;
  for (std::size_t v = 0; v < values.size(); ++v) {
    if (!selection.selects(values[v].name) || gaps.missing.values.contains(v)) continue;
    try {
      reader.read_value(v);
    } catch (const Error& error) {
      if (error.kind() == ErrorKind::interrupted) throw;
      // Other errors are thrown when the move (also a dry run) reads the value, if it does.
      if (error.kind() == ErrorKind::unsupported) gaps.refused_values.emplace(v, error);
      if (error.kind() == ErrorKind::io) break;  // do not wait for a dead server once per value
    }
  }
  return gaps;
}

void PresentPieces::restore_numbers(TensorCopy& copy) const {
  for (std::vector<std::uint32_t>& pieces : copy.source_pieces.edit()) {
    for (std::uint32_t& piece : pieces) piece = numbers[piece];
  }
}

std::optional<PresentPieces> find_present_pieces(const CheckpointContents& source,
                                                 std::size_t tensor_index, const std::string& name,
                                                 const SourceGaps& gaps, Relaxation missing,
                                                 PlanReport& report) {
  const auto lost = gaps.missing.pieces.find(tensor_index);
  if (lost == gaps.missing.pieces.end()) return std::nullopt;
  PresentPieces present{source.tensors[tensor_index], {}, false};
  const SharedVector<Piece> pieces = std::move(present.tensor.pieces);
  present.tensor.pieces.clear();
  std::set<std::string> files;
  for (std::uint32_t p = 0; p < pieces.size(); ++p) {
    const auto file = lost->second.find(p);
    if (file != lost->second.end()) {
      files.insert(file->second);
      continue;
    }
    present.tensor.pieces.push_back(pieces[p]);
    present.numbers.push_back(p);
  }
  present.are_enough =
      check_coverage(regions_of(present.tensor), present.tensor.meta.shape).empty();
  if (present.are_enough) {
    note_replaced(name, files, report);
  } else {
    report_missing_data(name, files, missing, report);
  }
  return present;
}

bool can_give_value(const CheckpointContents& source, std::size_t value_index,
                    const SourceGaps& gaps, Relaxation missing, PlanReport& report) {
  const std::string& name = source.values[value_index].name;
  const auto lost = gaps.missing.values.find(value_index);
  if (lost != gaps.missing.values.end()) {
    report_missing_data(name, {lost->second}, missing, report);
    return false;
  }
  const auto refused = gaps.refused_values.find(value_index);
  if (refused == gaps.refused_values.end()) return true;
  ErrorWhere where = refused->second.where();
  where.fqn = name;
  report.problem_at(where, "value", "a value of plain types", std::string(refused->second.reason()),
                    {Remedy::Action::leave_out, formats::pattern_of(source, name)});
  return false;
}

}  // namespace tessera::reshard
