#include "inspect/verify_parts.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <tuple>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/formats/format_driver.h"

namespace tessera::inspect {
namespace {

using formats::CountedNote;
using formats::Finding;
using Stage = FindingOfPart::Stage;

constexpr std::string_view kLikelyCause = "is this what verify prints for one part?";
constexpr std::string_view kParts = "parts of a check";

// By the values of Remedy::Action.
constexpr std::array<std::string_view, 18> kActions{
    "none",          "resume_or_discard", "discard",       "give_units",        "give_flat_layout",
    "give_strategy", "leave_out",         "allow_lossy",   "use_less_memory",   "choose_source",
    "rebuild_index", "allow_overflow",    "keep_dtype",    "leave_extra_files", "take_as_is",
    "name_params",   "prefer_source",     "drop_optimizer"};
static_assert(kActions.size() == static_cast<std::size_t>(Remedy::Action::drop_optimizer) + 1);

Value to_value(std::uint64_t count) {
  return Value(static_cast<std::int64_t>(count));
}

Value::Dict to_value(const FindingOfPart& found) {
  const auto& [severity, rule, where, expected, text, remedy] = found.finding;
  Value::Dict object{{"severity", severity == Finding::Severity::error ? "error" : "note"},
                     {"rule", rule},
                     {"file", where.path},
                     {"name", where.fqn}};
  if (where.byte_range) {
    object.emplace_back("byte_range", Value::List{to_value(where.byte_range->begin),
                                                  to_value(where.byte_range->end)});
  }
  object.emplace_back("expected", expected);
  object.emplace_back("found", text);
  object.emplace_back("stage", static_cast<int>(found.stage));
  object.emplace_back("unit", to_value(found.unit));
  if (found.is_only_first) object.emplace_back("only_first", true);
  if (remedy) {
    object.emplace_back("remedy",
                        std::string(kActions.at(static_cast<std::size_t>(remedy.action))));
    object.emplace_back("argument", remedy.argument);
  }
  return object;
}

constexpr std::string_view kAbsentCrcs = "absent_crcs";
constexpr std::string_view kForeignNames = "foreign_names";

Value::Dict to_value(const CountedNote& note) {
  const bool is_of_crcs = note.kind == CountedNote::Kind::absent_crcs;
  Value::List names;
  for (const std::string& name : note.names) names.emplace_back(name);
  return {{"kind", std::string(is_of_crcs ? kAbsentCrcs : kForeignNames)},
          {"file", note.path},
          {"unit", to_value(note.unit)},
          {"members", to_value(note.num_members)},
          {"without_crc", to_value(note.num_without_crc)},
          {"names", std::move(names)}};
}

/// Reads the members of one object of a document.
class Members {
 public:
  Members(const std::string& path, const Value& object) : path_(path), object_(object) {}

  const std::string& text(const char* key) const { return member<std::string>(key, "text"); }
  bool truth(const char* key) const { return member<bool>(key, "true or false"); }
  bool truth_or_absent(const char* key) const { return has(key) && truth(key); }
  const Value::List& list(const char* key) const { return member<Value::List>(key, "a list"); }
  std::uint64_t count(const char* key) const {
    return count(key, member<std::int64_t>(key, "a count"));
  }
  bool has(const char* key) const { return object_.find(key) != nullptr; }

  ByteRange byte_range(const char* key) const {
    std::vector<std::uint64_t> ends;
    for (const Value& end : list(key)) {
      const auto* const number = end.get_if<std::int64_t>();
      ends.push_back(count(key, number == nullptr ? -1 : *number));
    }
    if (ends.size() != 2) refuse(key, "two numbers");
    return {ends[0], ends[1]};
  }

  [[noreturn]] void refuse(const char* key, std::string_view expected) const {
    throw Error::expected(ErrorKind::corruption, {.path = path_}, key, expected,
                          "none, or another value", kLikelyCause);
  }

 private:
  template <class T>
  const T& member(const char* key, std::string_view expected) const {
    const Value* const value = object_.find(key);
    const T* const content = value == nullptr ? nullptr : value->get_if<T>();
    if (content == nullptr) refuse(key, expected);
    return *content;
  }
  std::uint64_t count(const char* key, std::int64_t number) const {
    if (number < 0) refuse(key, "a count");
    return static_cast<std::uint64_t>(number);
  }

  const std::string& path_;
  const Value& object_;
};

FindingOfPart read_finding(const std::string& path, const Value& object) {
  const Members members(path, object);
  FindingOfPart found;
  const std::string& severity = members.text("severity");
  if (severity != "error" && severity != "note") members.refuse("severity", "error or note");
  found.finding = {
      .severity = severity == "error" ? Finding::Severity::error : Finding::Severity::note,
      .rule = members.text("rule"),
      .where = {.path = members.text("file"), .fqn = members.text("name")},
      .expected = members.text("expected"),
      .found = members.text("found")};
  if (members.has("byte_range")) found.finding.where.byte_range = members.byte_range("byte_range");
  const std::uint64_t stage = members.count("stage");
  if (stage > static_cast<std::uint64_t>(Stage::numbers)) members.refuse("stage", "0 to 3");
  found.stage = static_cast<Stage>(stage);
  found.unit = members.count("unit");
  found.is_only_first = members.truth_or_absent("only_first");
  if (members.has("remedy")) {
    const auto action = std::ranges::find(kActions, members.text("remedy"));
    if (action == kActions.end()) members.refuse("remedy", "a known remedy");
    found.finding.remedy = {static_cast<Remedy::Action>(action - kActions.begin()),
                            members.text("argument")};
  }
  return found;
}

CountedNote read_note(const std::string& path, const Value& object) {
  const Members members(path, object);
  const std::string& kind = members.text("kind");
  if (kind != kAbsentCrcs && kind != kForeignNames) members.refuse("kind", "a known kind of note");
  CountedNote note{.kind = kind == kAbsentCrcs ? CountedNote::Kind::absent_crcs
                                               : CountedNote::Kind::foreign_names,
                   .path = members.text("file"),
                   .unit = members.count("unit"),
                   .num_members = members.count("members"),
                   .num_without_crc = members.count("without_crc")};
  for (const Value& name : members.list("names")) {
    if (!name.is<std::string>()) members.refuse("names", "text");
    note.add_name(name.get<std::string>());
  }
  return note;
}

/// Reads `I/N`.
std::pair<int, int> read_index(const Members& members) {
  const std::string& text = members.text("part_of_verify");
  const char* const end = text.data() + text.size();
  int index = -1;
  int num_parts = -1;
  const auto first = std::from_chars(text.data(), end, index);
  if (first.ec == std::errc() && first.ptr != end && *first.ptr == '/') {
    const auto second = std::from_chars(first.ptr + 1, end, num_parts);
    if (second.ec == std::errc() && second.ptr == end && 0 <= index && index < num_parts) {
      return {index, num_parts};
    }
  }
  members.refuse("part_of_verify", "I/N, with I from 0 to N-1");
}

/// Checks that a part is of the checkpoint that is open.
void require_checkpoint(const Members& members, const std::string& path,
                        const formats::CheckpointReader& reader) {
  const auto require = [&](const char* key, const std::string& expected, const std::string& found) {
    if (expected == found) return;
    throw Error::expected(ErrorKind::mismatch, {.path = path}, key, expected,
                          "'" + printable(found) + "'", "is this a part of another checkpoint?");
  };
  const VerifyReport totals = join_parts({}, reader);
  require("checkpoint", reader.path(), members.text("checkpoint"));
  require("format", std::string(reader.format().name()), members.text("format"));
  require("tensors", std::to_string(totals.num_tensors), std::to_string(members.count("tensors")));
  require("pieces", std::to_string(totals.num_pieces), std::to_string(members.count("pieces")));
  require("values", std::to_string(totals.num_values), std::to_string(members.count("values")));
  require("nbytes", std::to_string(totals.nbytes), std::to_string(members.count("nbytes")));
}

PartOfVerify read_part(const PartDocument& document, const formats::CheckpointReader& reader,
                       VerifyOptions::Numbers numbers) {
  const Members members(document.path, document.document);
  PartOfVerify part;
  std::tie(part.index, part.num_parts) = read_index(members);
  require_checkpoint(members, document.path, reader);
  part.numbers = members.truth("finite") ? VerifyOptions::Numbers::must_be_finite
                                         : VerifyOptions::Numbers::any;
  if (part.numbers != numbers) {
    const auto in_words = [](VerifyOptions::Numbers checked) {
      return checked == VerifyOptions::Numbers::any ? "a check without numbers (rule finite)"
                                                    : "a check of numbers (rule finite)";
    };
    throw Error::expected(ErrorKind::mismatch, {.path = document.path}, std::string(kParts),
                          in_words(numbers), in_words(part.numbers),
                          "give the same options to all parts and to the join");
  }
  for (const Value& object : members.list("findings")) {
    part.findings.push_back(read_finding(document.path, object));
  }
  for (const Value& object : members.list("notes")) {
    part.notes.push_back(read_note(document.path, object));
  }
  return part;
}

/// Checks that the documents are the parts of one check, and that they have each part exactly once.
void require_all(const std::vector<PartOfVerify>& parts,
                 const std::vector<PartDocument>& documents) {
  const int num_parts = parts.front().num_parts;
  std::map<int, std::string> path_of;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const std::string& path = documents[i].path;
    if (parts[i].num_parts != num_parts) {
      throw Error::expected(ErrorKind::mismatch, {.path = path}, std::string(kParts),
                            "part of a check in " + std::to_string(num_parts) + " parts, as in " +
                                printable(documents.front().path),
                            "part of a check in " + std::to_string(parts[i].num_parts) + " parts",
                            "give the parts of one check");
    }
    const auto [other, is_new] = path_of.emplace(parts[i].index, path);
    if (!is_new) {
      throw Error::expected(
          ErrorKind::mismatch, {.path = path}, std::string(kParts), "each part once",
          "part " + std::to_string(parts[i].index) + " also in " + printable(other->second),
          "is one part given twice?");
    }
  }
  for (int index = 0; index < num_parts; ++index) {
    if (path_of.contains(index)) continue;
    throw Error::expected(ErrorKind::mismatch, {}, std::string(kParts),
                          "all of " + std::to_string(num_parts) + " parts",
                          "no part with number " + std::to_string(index), "is a part missing?");
  }
}

/// Returns the sums of the notes of all parts.
std::vector<FindingOfPart> sum_notes(const std::vector<PartOfVerify>& parts) {
  std::map<std::tuple<std::uint64_t, CountedNote::Kind, std::string>, CountedNote> sums;
  for (const PartOfVerify& part : parts) {
    for (const CountedNote& note : part.notes) {
      const auto [sum, is_new] = sums.emplace(std::tuple(note.unit, note.kind, note.path), note);
      if (!is_new) sum->second.merge(note);
    }
  }
  std::vector<FindingOfPart> findings;
  for (const auto& [key, note] : sums) {
    if (auto finding = note.finding()) {
      findings.push_back(
          {.finding = std::move(*finding), .stage = Stage::stored_bytes, .unit = note.unit});
    }
  }
  return findings;
}

}  // namespace

bool PartOfVerify::has_errors() const {
  return std::ranges::any_of(findings, [](const FindingOfPart& each) {
    return each.finding.severity == Finding::Severity::error;
  });
}

std::uint64_t pieces_nbytes(const formats::TensorEntry& tensor) {
  std::uint64_t nbytes = 0;
  for (const auto& piece : tensor.pieces) nbytes += nbytes_of(piece.region, tensor.meta.dtype);
  return nbytes;
}

VerifyReport join_parts(const std::vector<PartOfVerify>& parts,
                        const formats::CheckpointReader& reader) {
  std::vector<FindingOfPart> findings = sum_notes(parts);
  for (const PartOfVerify& part : parts) {
    findings.insert(findings.end(), part.findings.begin(), part.findings.end());
  }
  std::ranges::stable_sort(
      findings, {}, [](const FindingOfPart& each) { return std::pair(each.stage, each.unit); });
  std::set<std::string, std::less<>> names;  // with findings of the first two stages
  for (const FindingOfPart& each : findings) {
    if (each.stage <= Stage::stored_bytes) names.insert(each.finding.where.fqn);
  }
  VerifyReport report;
  for (FindingOfPart& each : findings) {
    if (each.is_only_first && names.contains(each.finding.where.fqn)) continue;
    report.findings.push_back(std::move(each.finding));
  }
  std::ranges::stable_sort(report.findings, [](const Finding& a, const Finding& b) {
    return std::tie(a.where.path, a.where.fqn, a.rule) <
           std::tie(b.where.path, b.where.fqn, b.rule);
  });
  std::ranges::stable_partition(report.findings,
                                [](const Finding& finding) { return finding.rule == kRuleOfPart; });
  for (const auto& tensor : reader.contents().tensors) {
    ++report.num_tensors;
    report.num_pieces += static_cast<std::int64_t>(tensor.pieces.size());
    report.nbytes += pieces_nbytes(tensor);
  }
  report.num_values = static_cast<std::int64_t>(reader.contents().values.size());
  return report;
}

Value::Dict part_of_verify_to_value(const PartOfVerify& part,
                                    const formats::CheckpointReader& reader) {
  const VerifyReport totals = join_parts({}, reader);
  Value::List findings;
  for (const FindingOfPart& each : part.findings) findings.emplace_back(to_value(each));
  Value::List notes;
  for (const CountedNote& note : part.notes) notes.emplace_back(to_value(note));
  return {{"part_of_verify", std::to_string(part.index) + "/" + std::to_string(part.num_parts)},
          {"checkpoint", reader.path()},
          {"finite", part.numbers == VerifyOptions::Numbers::must_be_finite},
          {"tensors", totals.num_tensors},
          {"pieces", totals.num_pieces},
          {"values", totals.num_values},
          {"nbytes", to_value(totals.nbytes)},
          {"findings", std::move(findings)},
          {"notes", std::move(notes)}};
}

VerifyReport join_verify_documents(const std::vector<PartDocument>& documents,
                                   const formats::CheckpointReader& reader,
                                   VerifyOptions::Numbers numbers) {
  TESSERA_CHECK(!documents.empty());
  std::vector<PartOfVerify> parts;
  for (const PartDocument& document : documents) {
    parts.push_back(read_part(document, reader, numbers));
  }
  require_all(parts, documents);
  return join_parts(parts, reader);
}

}  // namespace tessera::inspect
