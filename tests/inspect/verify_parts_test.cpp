#include "inspect/verify_parts.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "base/json.h"
#include "support/error_matchers.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "tessera/formats/detect.h"

namespace tessera::inspect {
namespace {

namespace stdfs = std::filesystem;
using formats::CheckpointReader;
using formats::CountedNote;
using formats::Finding;
using test::MemoryCheckpoint;
using test::ThrowsError;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

const VerifyOptions kWithNumbers{.numbers = VerifyOptions::Numbers::must_be_finite};

// Returns a report as lines: first the counts, then one line for each finding.
std::vector<std::string> lines_of(const VerifyReport& report) {
  std::vector<std::string> lines{
      std::to_string(report.num_tensors) + " " + std::to_string(report.num_pieces) + " " +
      std::to_string(report.num_values) + " " + std::to_string(report.nbytes)};
  for (const Finding& finding : report.findings) {
    const bool is_error = finding.severity == Finding::Severity::error;
    lines.push_back((is_error ? "error: " : "note: ") + finding_to_string(finding) +
                    finding.remedy.argument);
  }
  return lines;
}

// Returns the documents of `verify --part`, written as text and read back.
std::vector<PartDocument> documents_of(const CheckpointReader& reader, const VerifyOptions& options,
                                       int num_parts) {
  std::vector<PartDocument> documents;
  for (int i = 0; i < num_parts; ++i) {
    const PartOfVerify part = verify_part(reader, options, i, num_parts);
    Value::Dict object = part_of_verify_to_value(part, reader);
    object.emplace_back("format", std::string(reader.format().name()));
    const std::string path = "part-" + std::to_string(i);
    documents.push_back(
        {path, value_from_json(parse_json(value_to_json(Value(object)), path), path)});
  }
  std::ranges::reverse(documents);  // the order does not matter
  return documents;
}

std::unique_ptr<CheckpointReader> open_or_null(const std::string& path) {
  try {
    return formats::open_checkpoint(FileSystem::posix(), path);
  } catch (const Error&) {
    return nullptr;
  }
}

// Returns the paths of all fixtures of these formats, valid and invalid.
std::vector<std::string> fixtures() {
  std::vector<std::string> paths;
  const stdfs::path root(test::fixture(""));
  for (const char* format : {"bin", "dcp", "deepspeed", "megatron", "native", "rank_files",
                             "safetensors", "torch_checkpointing", "torch_zip"}) {
    for (const auto& kind : stdfs::directory_iterator(root / format)) {
      if (!kind.is_directory()) continue;
      for (const auto& entry : stdfs::directory_iterator(kind)) paths.push_back(entry.path());
    }
  }
  std::ranges::sort(paths);
  return paths;
}

// Returns options that also check numbers; default options if that check throws, because a tensor
// cannot be read at all (its file is missing, or has pickle calls that Tessera refuses).
VerifyOptions options_for(const CheckpointReader& reader) {
  try {
    verify(reader, kWithNumbers);
    return kWithNumbers;
  } catch (const Error& error) {
    EXPECT_NE(error.kind(), ErrorKind::io);
    return {};
  }
}

TEST(VerifyPartsTest, PartsOfEveryFixtureJoinToTheReportOfOneProcess) {
  int num_opened = 0;
  int num_with_findings = 0;
  for (const std::string& path : fixtures()) {
    const auto reader = open_or_null(path);
    if (!reader) continue;
    ++num_opened;
    const VerifyOptions options = options_for(*reader);
    const VerifyReport whole = verify(*reader, options);
    num_with_findings += whole.findings.empty() ? 0 : 1;
    for (const int num_parts : {1, 2, 5}) {
      SCOPED_TRACE(path + " in " + std::to_string(num_parts));
      EXPECT_EQ(lines_of(join_verify_documents(documents_of(*reader, options, num_parts), *reader,
                                               options.numbers)),
                lines_of(whole));
    }
  }
  EXPECT_GT(num_opened, 80);
  EXPECT_GT(num_with_findings, 30);
}

// Returns the bytes that a check reports to have read.
std::uint64_t nbytes_read(const CheckpointReader& reader, int index, int num_parts) {
  std::atomic<std::uint64_t> nbytes = 0;
  VerifyOptions options;
  options.scan.progress = [&](std::uint64_t n) { nbytes += n; };
  verify_part(reader, options, index, num_parts);
  return nbytes;
}

TEST(VerifyPartsTest, EveryByteIsReadByOnePart) {
  for (const char* name : {"dcp/valid/fsdp2_adamw", "native/v1/small", "safetensors/valid/sharded",
                           "torch_zip/valid/training_state.pt", "rank_files/valid/fsdp2"}) {
    SCOPED_TRACE(name);
    const auto reader = formats::open_checkpoint(FileSystem::posix(), test::fixture(name));
    const std::uint64_t whole = nbytes_read(*reader, 0, 1);
    std::vector<std::uint64_t> parts;
    for (int i = 0; i < 3; ++i) parts.push_back(nbytes_read(*reader, i, 3));
    EXPECT_EQ(parts[0] + parts[1] + parts[2], whole);
    EXPECT_LT(*std::ranges::max_element(parts), whole) << "one part has read everything";
  }
}

// Joins parts of an empty checkpoint.
VerifyReport join(std::vector<PartOfVerify> parts) {
  return join_parts(parts, MemoryCheckpoint());
}

Finding finding(const std::string& fqn, const std::string& rule) {
  return {.severity = Finding::Severity::error,
          .rule = rule,
          .where = {"p", fqn, {}},
          .expected = "",
          .found = ""};
}

TEST(VerifyPartsTest, AValueWithAnEarlierFindingInAnotherPartIsReportedOnce) {
  using Stage = FindingOfPart::Stage;
  PartOfVerify first{.index = 0, .num_parts = 2};
  first.findings = {
      {.finding = finding("step", "value"), .stage = Stage::values, .is_only_first = true},
      {.finding = finding("other", "value"), .stage = Stage::values, .is_only_first = true}};
  PartOfVerify second{.index = 1, .num_parts = 2};
  second.findings = {{.finding = finding("step", "checksum"), .stage = Stage::stored_bytes}};
  const VerifyReport report = join({first, second});
  std::vector<std::string> rules;
  for (const Finding& each : report.findings) rules.push_back(each.where.fqn + ":" + each.rule);
  EXPECT_THAT(rules, ElementsAre("other:value", "step:checksum"));
}

TEST(VerifyPartsTest, CountsAndNamesOfNotesAreThoseOfAllParts) {
  const auto part = [](int index, std::uint64_t num_members, std::uint64_t num_without_crc,
                       std::set<std::string> names) {
    PartOfVerify result{.index = index, .num_parts = 2};
    result.notes = {{.kind = CountedNote::Kind::absent_crcs,
                     .path = "p",
                     .unit = 9,
                     .num_members = num_members,
                     .num_without_crc = num_without_crc},
                    {.kind = CountedNote::Kind::foreign_names,
                     .path = "p",
                     .unit = 9,
                     .names = std::move(names)}};
    return result;
  };
  const VerifyReport report = join({part(0, 10, 0, {"b.B"}), part(1, 5, 2, {"a.A", "b.B"})});
  ASSERT_EQ(report.findings.size(), 2U);
  EXPECT_EQ(report.findings[0].expected, "a CRC-32 for each of 15 members");
  EXPECT_EQ(report.findings[0].found, "none for 2");
  EXPECT_EQ(report.findings[1].found, "a.A, b.B; nothing was executed");
  EXPECT_THAT(join({part(0, 10, 0, {}), part(1, 5, 0, {})}).findings, IsEmpty());
}

TEST(VerifyPartsTest, RefusesPartsThatAreNotAllPartsOfThisCheck) {
  MemoryCheckpoint checkpoint;
  checkpoint.add({"t", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  const auto documents = documents_of(checkpoint, {}, 2);
  const auto any = VerifyOptions::Numbers::any;
  const auto join_all = [&](std::vector<PartDocument> parts) {
    return
        [&checkpoint, parts = std::move(parts)] { join_verify_documents(parts, checkpoint, any); };
  };
  EXPECT_THAT(join_all({documents[0]}), ThrowsError(ErrorKind::mismatch, "no part with number 0"));
  EXPECT_THAT(join_all({documents[0], documents[0]}),
              ThrowsError(ErrorKind::mismatch, "is one part given twice?"));
  EXPECT_THAT(join_all({documents[0], documents_of(checkpoint, {}, 3)[0]}),
              ThrowsError(ErrorKind::mismatch, "found part of a check in 3"));
  EXPECT_THAT(join_all({documents_of(checkpoint, kWithNumbers, 1)[0]}),
              ThrowsError(ErrorKind::mismatch, "rule finite"));
  checkpoint.add({"u", DType::float32, {1}}, test::bytes_of<float>({1}));
  EXPECT_THAT(join_all(documents),
              ThrowsError(ErrorKind::mismatch, "tensors: expected 2, found '1'"));
}

TEST(VerifyPartsTest, RefusesDocumentsOfAnotherKind) {
  const MemoryCheckpoint checkpoint;
  const Value whole = documents_of(checkpoint, {}, 1).front().document;
  const auto with = [&](const std::string& key, Value content) {
    Value::Dict object = *whole.get_if<Value::Dict>();
    std::erase_if(object, [&](const auto& member) { return member.first == Value(key); });
    object.emplace_back(key, std::move(content));
    return [&checkpoint, document = Value(std::move(object))] {
      join_verify_documents({{"part", document}}, checkpoint, VerifyOptions::Numbers::any);
    };
  };
  const auto refuses = [](const std::string& member) {
    return ThrowsError(ErrorKind::corruption, "part: " + member + ": expected");
  };
  EXPECT_THAT(with("part_of_verify", Value("1/1")), refuses("part_of_verify"));
  EXPECT_THAT(with("part_of_verify", Value("0/")), refuses("part_of_verify"));
  EXPECT_THAT(with("tensors", Value(-1)), refuses("tensors"));
  EXPECT_THAT(with("findings", Value("none")), refuses("findings"));
  EXPECT_THAT(with("findings", Value(Value::List{Value(3)})), refuses("severity"));
  EXPECT_THAT(with("notes", Value(Value::List{Value(Value::Dict{{"kind", "x"}})})),
              refuses("kind"));
}

}  // namespace
}  // namespace tessera::inspect
