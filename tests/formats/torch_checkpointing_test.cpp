#include "formats/torch_checkpointing.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <string>

#include "formats/torch_checkpointing/files.h"
#include "support/contents_text.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fixtures.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

using test::expect_holds;
using test::open;
using test::pieces_of;
using test::ThrowsError;
using testing::HasSubstr;
namespace stdfs = std::filesystem;

const std::string kValidTorchCheckpointing = test::fixture("torch_checkpointing/valid/");
constexpr const char* kTorchCheckpointingFixtures[] = {
    "fsdp2", "fsdp2_hybrid", "fsdp2_tp_other_forms", "one_rank", "without_metadata"};

/// A copy of a fixture, to damage it.
class Copy {
 public:
  explicit Copy(const std::string& name) {
    stdfs::copy(kValidTorchCheckpointing + name, directory_.path(), stdfs::copy_options::recursive);
    for (const auto& entry : stdfs::recursive_directory_iterator(directory_.path())) {
      stdfs::permissions(entry.path(), stdfs::perms::owner_write, stdfs::perm_options::add);
    }
  }

  std::string operator/(const std::string& name) const { return directory_ / name; }
  const std::string& path() const { return directory_.path(); }

  void copy(const std::string& from, const std::string& to) {
    stdfs::copy_file(from, directory_ / to, stdfs::copy_options::overwrite_existing);
  }
  void write(const std::string& name, const std::string& content) {
    std::ofstream(directory_ / name, std::ios::binary) << content;
  }
  /// Replaces each occurrence of a text in `metadata.pkl` by one of equal length.
  void replace(const std::string& from, const std::string& to) {
    ASSERT_EQ(from.size(), to.size());
    std::string content = read_file(FileSystem::posix(), directory_ / "metadata.pkl", 1 << 20);
    std::size_t found = content.find(from);
    ASSERT_NE(found, std::string::npos) << from;
    for (; found != std::string::npos; found = content.find(from, found)) {
      content.replace(found, from.size(), to);
    }
    write("metadata.pkl", content);
  }
  void expect_refused(ErrorKind kind, const std::string& words) const {
    EXPECT_THAT([&] { open(directory_.path()); }, ThrowsError(kind, words));
  }

 private:
  test::TemporaryDirectory directory_;
};

// Shows F5.
TEST(TorchCheckpointingTest, HoldsWhatTheTrainerHeld) {
  for (const char* const name : kTorchCheckpointingFixtures) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidTorchCheckpointing + name);
    EXPECT_EQ(reader->format(), Format("torch_checkpointing"));
    EXPECT_FALSE(reader->contents().part);
    expect_holds(*reader, kValidTorchCheckpointing + name + ".expect.json");
    std::vector<std::string> errors;
    const auto note_error = [&](const Finding& finding) {
      if (finding.severity == Finding::Severity::error) errors.push_back(finding.found);
    };
    reader->verify(note_error, [](std::uint64_t) {});
    EXPECT_THAT(errors, testing::IsEmpty());
  }
}

// Shows F5.
TEST(TorchCheckpointingTest, PiecesFollowThePlacements) {
  EXPECT_EQ(pieces_of(*open(kValidTorchCheckpointing + "fsdp2"), "model.up.weight"),
            "[0:4, 0:6] on 0, [4:8, 0:6] on 1, [8:10, 0:6] on 2");
  EXPECT_EQ(pieces_of(*open(kValidTorchCheckpointing + "fsdp2"), "model.scale"), "[0:1] on 0");
  EXPECT_EQ(pieces_of(*open(kValidTorchCheckpointing + "fsdp2_hybrid"), "model.up.bias"),
            "[0:5] on 0, [5:10] on 1, [0:5] on 2, [5:10] on 3");
  // The safetensors files do not say where their tensors are: metadata.pkl does.
  const auto cut_twice = open(kValidTorchCheckpointing + "fsdp2_tp_other_forms");
  EXPECT_EQ(pieces_of(*cut_twice, "model.up.bias"),
            "[0:3] on 0, [5:8] on 1, [3:5] on 2, [8:10] on 3");
  EXPECT_EQ(pieces_of(*cut_twice, "model.down.weight"),
            "[0:3, 0:5] on 0, [0:3, 5:10] on 1, [3:6, 0:5] on 2, [3:6, 5:10] on 3");
  EXPECT_EQ(pieces_of(*cut_twice, "optimizer.state.up.bias.exp_avg"),
            "[0:3] on 0, [5:8] on 1, [3:5] on 2, [8:10] on 3");
}

// Shows F5.
TEST(TorchCheckpointingTest, KeysAreThoseOfTheStateDicts) {
  for (const std::string name : {"fsdp2", "fsdp2_tp_other_forms"}) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidTorchCheckpointing + name);
    const CheckpointContents& contents = reader->contents();
    EXPECT_EQ(contents.find_tensor("model.up.weight")->key_path,
              (KeyPath{std::string("model"), std::string("up.weight")}));
    EXPECT_EQ(contents.find_tensor("optimizer.state.up.weight.exp_avg")->key_path,
              (KeyPath{std::string("optimizer"), std::string("state"), std::string("up.weight"),
                       std::string("exp_avg")}));
    EXPECT_THAT(contents.find_tensor("rng")->key_path, testing::IsEmpty());
  }
}

// Shows F5.
TEST(TorchCheckpointingTest, AnEmptyDictIsAValue) {
  const Copy copy("fsdp2");
  for (const char* const rank : {"0", "1", "2"}) {
    const std::string file = copy / (std::string("loader_") + rank + ".pt");
    stdfs::remove(file);
    create_checkpoint(FileSystem::posix(), file, {}, {}, {.format = Format::torch_zip})->commit();
  }
  const auto reader = open(copy.path());
  const auto& values = reader->contents().values;
  const auto loader = std::ranges::find(values, "loader", &ValueEntry::name);
  ASSERT_NE(loader, values.end());
  EXPECT_EQ(reader->read_value(static_cast<std::size_t>(loader - values.begin())),
            Value(Value::Dict{}));
}

// Shows F5.
TEST(TorchCheckpointingTest, AMissingRankIsNamed) {
  const Copy listed("fsdp2_tp_other_forms");
  stdfs::remove(listed / "rank_2/optimizer.pt");
  listed.expect_refused(ErrorKind::corruption,
                        "expected 'rank_2/optimizer.pt' of rank 2, as metadata.pkl says");
  const Copy unlisted("fsdp2");
  stdfs::remove(unlisted / "loader_1.pt");
  unlisted.expect_refused(ErrorKind::corruption, "ranks 0 to 2 for 'loader', found none of rank 1");
  const Copy without("without_metadata");
  stdfs::remove(without / "optimizer_0.pt");
  without.expect_refused(ErrorKind::corruption,
                         "ranks 0 to 1 for 'optimizer', found none of rank 0");
}

// Shows F5.
TEST(TorchCheckpointingTest, AnItemOfRankZeroAloneIsNoted) {
  const Copy copy("fsdp2");
  stdfs::remove(copy / "loader_1.pt");
  stdfs::remove(copy / "loader_2.pt");
  const auto reader = open(copy.path());
  const auto& findings = reader->contents().opening_findings;
  ASSERT_FALSE(findings.empty());
  EXPECT_THAT(finding_to_string(findings[0]),
              HasSubstr("ranks 0 to 2 for 'loader', found only the file of rank 0"));
}

// Shows F5.
TEST(TorchCheckpointingTest, FilesOfAnotherSaveAreRefused) {
  Copy other_rank("fsdp2");
  other_rank.copy(other_rank / "model_0.pt", "model_1.pt");
  other_rank.expect_refused(ErrorKind::corruption, "model_1.pt: down.bias: part of rank 1");
  Copy other_mesh("fsdp2");
  other_mesh.copy(kValidTorchCheckpointing + "fsdp2_hybrid/optimizer_1.pt", "optimizer_1.pt");
  other_mesh.expect_refused(ErrorKind::corruption, "as metadata.pkl says");
  Copy more_ranks("fsdp2");
  more_ranks.copy(kValidTorchCheckpointing + "fsdp2_hybrid/model_3.pt", "model_3.pt");
  more_ranks.expect_refused(ErrorKind::corruption,
                            "ranks 0 to 2, as metadata.pkl says, found "
                            "'model_3.pt' (left by another save?)");
  Copy other_model("fsdp2");
  for (const char* const rank : {"0", "1", "2"}) {
    other_model.copy(other_model / (std::string("rng_") + rank + ".pt"),
                     std::string("model_") + rank + ".pt");
  }
  other_model.expect_refused(ErrorKind::corruption, "found no file that has it");
  Copy other_dtype("fsdp2");
  other_dtype.replace("torch.float32", "torch.float64");
  other_dtype.expect_refused(ErrorKind::corruption,
                             "dtype: expected torch.float64, as metadata.pkl");
}

// Shows F5.
TEST(TorchCheckpointingTest, MetadataThatTesseraDoesNotKnowIsRefused) {
  Copy version("fsdp2");
  version.replace("2.0", "3.0");
  version.expect_refused(ErrorKind::unsupported, "version: expected 2.0, found str '3.0'");
  Copy placement("fsdp2");
  placement.replace("Shard\x94", "Sharp\x94");
  placement.expect_refused(ErrorKind::unsupported, "found 'Sharp'");
  Copy form("fsdp2_tp_other_forms");
  form.replace("SafetensorsSerialization", "SafetensorsSerialisation");
  form.expect_refused(ErrorKind::unsupported, "found 'SafetensorsSerialisation'");
  Copy type("fsdp2_tp_other_forms");  // a metadata type that a program has added
  type.replace("DTensorShardingMetadata", "EtensorShardingMetadata");
  const auto reader = open(type.path());
  EXPECT_NE(reader->contents().find_tensor("per_rank.1.model.up.bias"), nullptr);
  EXPECT_THAT(finding_to_string(reader->contents().opening_findings.at(0)),
              HasSubstr("found 'EtensorShardingMetadata'"));
}

// Shows F5, E3.
TEST(TorchCheckpointingTest, HostileMetadataRunsNothingAndLeavesTheFolderNever) {
  Copy outside("fsdp2_tp_other_forms");
  outside.replace("rank_1/optimizer.pt", "../k_1/optimizer.pt");
  outside.expect_refused(ErrorKind::corruption, "found '../k_1/optimizer.pt'");
  Copy link("fsdp2_tp_other_forms");
  const test::TemporaryDirectory elsewhere;
  stdfs::rename(link / "rank_1/optimizer.pt", elsewhere / "optimizer.pt");
  stdfs::remove(link / "rank_1");
  stdfs::create_directory_symlink(elsewhere.path(), link / "rank_1");
  link.expect_refused(ErrorKind::corruption, "rank_1/optimizer.pt");

  const test::TemporaryDirectory marks;
  const std::string mark = marks / "ran";
  const std::vector<std::pair<std::string, std::string>> contents = {
      {"cos\nsystem\n(S'touch " + mark + "'\ntR.", "a dict, found os.system(...)"},
      {"(dS'version'\nS'2.0'\nsS'world_size'\nI3\nsS'metadata'\ncos\nsystem\n(S'touch " + mark +
           "'\ntRs.",
       "metadata: expected a dict, found os.system(...)"},
      {"(dS'version'\nS'2.0'\nsS'world_size'\nI-3\nsS'metadata'\n(ds.", "expected 1 to 1048576"},
      {"(dS'version'\nS'2.0'\nsS'world_size'\nI3\nsS'metadata'\n(dS'model'\n(dS'nested_path_to_"
       "metadata'\n(dsS'rank_to_layout_info'\n(dsss.",
       "rank_to_layout_info: expected an entry for each of 3 ranks, found 0"},
      {"(dS'version'\nS'2.0'\nsS'world_size'\nI3\nsS'metadata'\n(dS'model'\n(dS'nested_path_to_"
       "metadata'\n(dS'[\"w\"]'\n(l(dS'ranks'\n(I9\nlsassss.",
       "expected 0 to 2, found 9"},
      {"(dS'version'\nS'2.0'\ns.", "expected the key 'world_size', found none"},
      {"", "metadata.pkl"},
  };
  for (const auto& [content, words] : contents) {
    Copy copy("fsdp2");
    copy.write("metadata.pkl", content);
    SCOPED_TRACE(content);
    EXPECT_THAT([&] { open(copy.path()); }, ThrowsError(ErrorKind::corruption, words));
    EXPECT_FALSE(stdfs::exists(mark));
  }
}

// Shows F5.
TEST(TorchCheckpointingTest, NumbersThatMayBeStepsAreRefused) {
  const Copy copy("without_metadata");
  for (const char* const item : {"model", "optimizer"}) {
    for (const char* const rank : {"_0.pt", "_1.pt"})
      stdfs::remove(copy / (item + std::string(rank)));
  }
  copy.expect_refused(ErrorKind::unsupported, "the numbers in the names may be steps");
}

// Shows F5.
TEST(TorchCheckpointingTest, NamesSayItemAndRank) {
  const auto parsed = [](std::string_view name) -> std::string {
    const auto found = torch_checkpointing::parse_default_name(name);
    return found ? found->item + " " + std::to_string(found->rank) : "none";
  };
  const std::map<std::string, std::string> expected = {
      {"model_0.pt", "model 0"},
      {"train_state_12.pt", "train_state 12"},
      {"model_007.pt", "none"},
      {"model.pt", "none"},
      {"_1.pt", "none"},
      {"12.pt", "none"},
      {"model_world_size_2_rank_1.pt", "none"},
      {"rank_1.pt", "none"},
      {"model_1.safetensors", "none"},
      {"model_99999999999999999999.pt", "none"},
  };
  for (const auto& [name, words] : expected) EXPECT_EQ(parsed(name), words) << name;
}

// Shows F5, E4.
TEST(TorchCheckpointingTest, ItsFilesAreThoseOfTheRanks) {
  const std::string path = kValidTorchCheckpointing + "fsdp2_tp_other_forms";
  const std::vector<std::string> names = FileSystem::posix().list_directory(path);
  const FormatDriver& driver = driver_of(Format("torch_checkpointing"));
  const std::vector<std::string> files = open(path)->data_files();
  EXPECT_EQ(files.size(), 20u);
  const auto own = driver.own_files(FileSystem::posix(), path, names, {files.begin(), files.end()});
  EXPECT_EQ(own.size(), 21u);  // also metadata.pkl and rank_0, …, which have a file in them
  EXPECT_TRUE(driver.is_one_of_several(FileSystem::posix(), path + "/rng_2.pt"));
}

}  // namespace
}  // namespace tessera::formats
