#include "formats/rank_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "formats/rank_files/file_names.h"
#include "formats/rank_files/rank_contents.h"
#include "support/contents_text.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
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

const std::string kValidRankFiles = test::fixture("rank_files/valid/");
constexpr const char* kRankFilesFixtures[] = {"fsdp1",
                                              "fsdp1_gpu_hybrid",
                                              "fsdp1_sharded_tensor",
                                              "fsdp1_sharded_tensor_torch2.15",
                                              "fsdp1_sharded_tensor_torch2.2",
                                              "fsdp1_sharded_tensor_torch2.4",
                                              "fsdp1_torch2.2",
                                              "fsdp1_torch2.4",
                                              "fsdp2",
                                              "fsdp2_hybrid",
                                              "fsdp2_torch2.15",
                                              "fsdp2_tp"};

/// A copy of the fixture `fsdp2` of three ranks, to damage it.
class RankFilesTest : public testing::Test {
 protected:
  RankFilesTest() {
    for (const auto& entry : stdfs::directory_iterator(kValidRankFiles + "fsdp2")) {
      const std::string copy = directory_ / entry.path().filename().string();
      stdfs::copy(entry.path(), copy);
      stdfs::permissions(copy, stdfs::perms::owner_write, stdfs::perm_options::add);
    }
  }

  static std::string file(const std::string& item, int rank, int num_ranks = 3) {
    return item + "_world_size_" + std::to_string(num_ranks) + "_rank_" + std::to_string(rank) +
           ".pt";
  }
  void copy(const std::string& from, const std::string& to) {
    stdfs::copy_file(from, directory_ / to, stdfs::copy_options::overwrite_existing);
  }
  void expect_refused(ErrorKind kind, const std::string& words) {
    EXPECT_THAT([&] { open(directory_.path()); }, ThrowsError(kind, words));
  }

  test::TemporaryDirectory directory_;
};

/// Two ranks with a `model.w` each. The keys of the outermost dict are not in the order of names.
test::MemoryCheckpoint with_own_tensors() {
  test::MemoryCheckpoint checkpoint("source", 2);
  checkpoint.add_value("optim.lr", Value(0.1)).key_path = {"optim", "lr"};
  const auto add = [&](const std::string& name, KeyPath path, int rank) -> TensorEntry& {
    TensorEntry& tensor = checkpoint.add({name, DType::float32, {1}}, test::bytes_of<float>({1}),
                                         {{Box{{0}, {1}}, rank}});
    tensor.key_path = std::move(path);
    return tensor;
  };
  add("model.w", {"model", "w"}, 0).dict_order = 2;
  add("per_rank.1.model.w", {"per_rank", "1", "model", "w"}, 1).dict_order = 3;
  return checkpoint;
}

std::set<std::string> names_of_files(const CheckpointContents& contents) {
  return rank_files::RankContents(contents, {Value(0.1)}, {}, "destination").names();
}

TEST(RankFilesWriterTest, TheOrderIsLostWhereRanksHaveSeveralFiles) {
  test::MemoryCheckpoint checkpoint = with_own_tensors();
  const CheckpointContents& contents = checkpoint.contents();
  EXPECT_TRUE(names_of_files(contents).contains("model_world_size_2_rank_1.pt"));
  EXPECT_TRUE(rank_files::outermost_changes(contents).reorders_keys);
}

// The alias would go into the file without an item's name, its tensor into the model's file.
TEST(RankFilesWriterTest, ATieOfARanksOwnTensorPutsAllInOneFile) {
  test::MemoryCheckpoint checkpoint = with_own_tensors();
  checkpoint.add_alias("per_rank.1.model.b", "per_rank.1.model.w");
  const CheckpointContents& contents = checkpoint.contents();
  EXPECT_EQ(names_of_files(contents),
            (std::set<std::string>{"world_size_2_rank_0.pt", "world_size_2_rank_1.pt"}));
  EXPECT_FALSE(rank_files::outermost_changes(contents).reorders_keys);
}

// A reader would take `optim` for the dict of the entries in the file of `optim`.
TEST(RankFilesWriterTest, AnEntryBesideItsFilePutsAllInOneFile) {
  test::MemoryCheckpoint checkpoint("source", 2);
  checkpoint.add({"optim.x", DType::float32, {1}}, test::bytes_of<float>({1})).key_path = {
      "optim.x"};
  EXPECT_TRUE(rank_files::RankContents(checkpoint.contents(), {}, {}, "destination")
                  .names()
                  .contains("optim_world_size_2_rank_0.pt"));
  checkpoint.add_value("optim", Value(0.1)).key_path = {"optim"};
  EXPECT_EQ(names_of_files(checkpoint.contents()),
            (std::set<std::string>{"world_size_2_rank_0.pt", "world_size_2_rank_1.pt"}));
}

// Shows F1.
TEST_F(RankFilesTest, HoldsWhatTheTrainerHeld) {
  for (const char* const name : kRankFilesFixtures) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidRankFiles + name);
    EXPECT_EQ(reader->format(), Format("rank_files"));
    EXPECT_FALSE(reader->contents().part);
    expect_holds(*reader, kValidRankFiles + name + ".expect.json");
  }
}

// Shows F1.
TEST_F(RankFilesTest, PiecesFollowThePlacements) {
  const auto uneven = open(kValidRankFiles + "fsdp2");
  EXPECT_EQ(pieces_of(*uneven, "model.up.weight"),
            "[0:4, 0:6] on 0, [4:8, 0:6] on 1, [8:10, 0:6] on 2");
  EXPECT_EQ(pieces_of(*uneven, "model.scale"), "[0:1] on 0");
  EXPECT_EQ(pieces_of(*open(kValidRankFiles + "fsdp2_hybrid"), "model.up.bias"),
            "[0:5] on 0, [5:10] on 1, [0:5] on 2, [5:10] on 3");
  const auto cut_twice = open(kValidRankFiles + "fsdp2_tp");
  EXPECT_EQ(pieces_of(*cut_twice, "model.up.bias"),
            "[0:3] on 0, [5:8] on 1, [3:5] on 2, [8:10] on 3");
  EXPECT_EQ(pieces_of(*cut_twice, "model.down.weight"),
            "[0:3, 0:5] on 0, [0:3, 5:10] on 1, [3:6, 0:5] on 2, [3:6, 5:10] on 3");
  EXPECT_EQ(pieces_of(*open(kValidRankFiles + "fsdp1"), "optim.state.3.exp_avg"),
            "flat[0:3] on 0, flat[3:60] on 1");
}

// Shows F1, E13.
TEST_F(RankFilesTest, WhatDiffersBetweenRanksKeepsAllItsValues) {
  const auto reader = open(directory_.path());
  const CheckpointContents& contents = reader->contents();
  ASSERT_NE(contents.find_tensor("per_rank.2.extra_state.rng.cpu"), nullptr);
  EXPECT_EQ(contents.find_tensor("per_rank.0.extra_state.rng.cpu"), nullptr);
  ASSERT_EQ(contents.opening_findings.size(), 1u);
  EXPECT_EQ(contents.opening_findings[0].severity, Finding::Severity::note);
  EXPECT_THAT(contents.opening_findings[0].found, HasSubstr("'extra_state.rng.cpu'"));
}

TEST_F(RankFilesTest, ACheckTellsWhatDiffersBetweenRanks) {
  const auto reader = open(directory_.path());
  const std::string note = finding_to_string(reader->contents().opening_findings.at(0));
  std::vector<std::string> found;
  reader->verify([&](const Finding& finding) { found.push_back(finding_to_string(finding)); },
                 [](std::uint64_t) {});
  EXPECT_EQ(std::ranges::count(found, note), 1);
}

/// Saves one state dict for each rank, as `rank<N>.pt`, and opens them as one checkpoint.
std::unique_ptr<CheckpointReader> open_saved(
    const test::TemporaryDirectory& directory,
    const std::vector<std::function<void(test::MemoryCheckpoint&)>>& ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    test::MemoryCheckpoint saved;
    ranks[rank](saved);
    std::vector<Value> values;
    for (std::size_t v = 0; v < saved.contents().values.size(); ++v) {
      values.push_back(saved.read_value(v));
    }
    const auto writer =
        create_checkpoint(FileSystem::posix(), directory / ("rank" + std::to_string(rank) + ".pt"),
                          saved.contents(), std::move(values), {.format = Format::torch_zip});
    test::copy_checkpoint(saved, *writer);
  }
  return open(directory.path());
}

void add_byte(test::MemoryCheckpoint& saved, const KeyPath& path) {
  saved.add({spell(path), DType::uint8, {1}}, test::bytes_of<std::uint8_t>({1})).key_path = path;
}

// Shows F1.
TEST(RankFilesNotesTest, ZerosOfDifferentSignAreKept) {
  const test::TemporaryDirectory directory;
  const auto reader =
      open_saved(directory, {[](auto& saved) { saved.add_value("v", Value::Tuple{{0.0}}); },
                             [](auto& saved) { saved.add_value("v", Value::Tuple{{-0.0}}); },
                             [](auto& saved) { saved.add_value("v", Value::Tuple{{0.0}}); }});
  const auto& values = reader->contents().values;
  ASSERT_EQ(values.size(), 2u);
  EXPECT_EQ(values[0].name, "per_rank.1.v");
  EXPECT_EQ(value_to_string(reader->read_value(0)), "(-0.0,)");
  EXPECT_EQ(value_to_string(reader->read_value(1)), "(0.0,)");
}

// Shows F1.
TEST(RankFilesNotesTest, AValueInPlaceOfADictIsThatRanksOwn) {
  const test::TemporaryDirectory directory;
  const auto reader =
      open_saved(directory, {[](auto& saved) {
                               add_byte(saved, {"sampler", "state"});
                             },
                             [](auto& saved) { saved.add_value("sampler", Value()); }});
  const CheckpointContents& contents = reader->contents();
  ASSERT_EQ(contents.tensors.size(), 1U);
  EXPECT_EQ(contents.tensors[0].meta.fqn, "sampler.state");
  ASSERT_EQ(contents.values.size(), 1U);
  EXPECT_EQ(contents.values[0].name, "per_rank.1.sampler");
  EXPECT_EQ(contents.opening_findings.size(), 2U);
}

// Shows F1. Such as the best loss, None on a rank that has none yet.
TEST(RankFilesNotesTest, AValueInPlaceOfATensorIsThatRanksOwn) {
  const test::TemporaryDirectory directory;
  const auto reader = open_saved(directory, {[](auto& saved) { saved.add_value("best", Value()); },
                                             [](auto& saved) { add_byte(saved, {"best"}); },
                                             [](auto& saved) { saved.add_value("best", Value(3)); },
                                             [](auto& saved) { add_byte(saved, {"best"}); }});
  const CheckpointContents& contents = reader->contents();
  EXPECT_EQ(pieces_of(*reader, "best"), "[0:1] on 1, [0:1] on 3");
  ASSERT_EQ(contents.values.size(), 2U);
  EXPECT_EQ(contents.values[0].name, "per_rank.0.best");
  EXPECT_EQ(contents.values[1].name, "per_rank.2.best");
  EXPECT_EQ(value_to_string(reader->read_value(1)), "3");
  ASSERT_EQ(contents.opening_findings.size(), 1U);
  EXPECT_EQ(contents.opening_findings[0].severity, Finding::Severity::note);
  EXPECT_THAT(contents.opening_findings[0].found,
              HasSubstr("1 name with a value on some ranks, such as 'best'"));
}

// Shows F1, E13. An ordinary tensor without elements is no part of `a`.
TEST(RankFilesNotesTest, AnEmptyTensorIsNotTiedToOneWithElements) {
  const test::TemporaryDirectory directory;
  const auto reader =
      open_saved(directory, {[](auto& saved) {
                               add_byte(saved, {"a"});
                               saved.add_alias("b", "a");
                             },
                             [](auto& saved) {
                               add_byte(saved, {"a"});
                               saved.add({"b", DType::uint8, {0}}, test::Bytes{}).key_path = {"b"};
                             }});
  const CheckpointContents& contents = reader->contents();
  EXPECT_TRUE(contents.aliases.empty());
  EXPECT_EQ(pieces_of(*reader, "b"), "[0:1] on 0");
  const TensorEntry* const own = contents.find_tensor("per_rank.1.b");
  ASSERT_NE(own, nullptr);
  EXPECT_EQ(own->meta.shape, Shape{0});
}

// Shows F1.
TEST(RankFilesNotesTest, WhatRanksNestOrTieDifferentlyIsNoted) {
  struct Case {
    std::function<void(test::MemoryCheckpoint&)> on_rank_0;
    std::function<void(test::MemoryCheckpoint&)> on_rank_1;
    const char* note;
  };
  const auto two = [](auto& saved) {
    add_byte(saved, {"a"});
    add_byte(saved, {"b"});
  };
  const std::vector<Case> cases = {
      {two,
       [](auto& saved) {
         add_byte(saved, {"a"});
         saved.add_alias("b", "a");
       },
       "1 name tied on some ranks only, such as 'b'"},
      {[](auto& saved) {
         add_byte(saved, {"d", *dict_key(0), "w"});
       },
       [](auto& saved) {
         add_byte(saved, {"d", "0", "w"});
       },
       "such as 'd.0.w' on rank 1 (the key of the lowest"},
      {[](auto& saved) {
         add_byte(saved, {"l", 0});
       },
       [](auto& saved) {
         add_byte(saved, {"l", 0});
         add_byte(saved, {"l", 1});
       },
       "1 list with other lengths on some ranks, such as 'l'"},
      {[](auto& saved) { add_byte(saved, {"a"}); },
       [](auto& saved) {
         add_byte(saved, {"a"});
         saved.add_value("d", Value(1)).key_path = {"d", "b"};
         saved.contents_for_change().values.back().name = "d.b";
       },
       "1 name on some ranks only, such as 'd.b' (read as"},
      {[](auto& saved) { saved.add_value("d", Value::Dict{}); },
       [](auto& saved) {
         add_byte(saved, {"d", "b"});
       },
       "2 names on some ranks only, such as 'd'"},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(each.note);
    const test::TemporaryDirectory directory;
    const auto reader = open_saved(directory, {each.on_rank_0, each.on_rank_1});
    const auto& findings = reader->contents().opening_findings;
    ASSERT_EQ(findings.size(), 1u);
    EXPECT_EQ(findings[0].severity, Finding::Severity::note);
    EXPECT_THAT(findings[0].found, HasSubstr(each.note));
  }
  const test::TemporaryDirectory directory;
  EXPECT_TRUE(open_saved(directory, {two, two})->contents().opening_findings.empty());
}

// Shows F1, E7.
TEST(RankFilesRefusalTest, RefusesADictInPlaceOfATensor) {
  const test::TemporaryDirectory directory;
  EXPECT_THAT(
      [&] {
        open_saved(directory, {[](auto& saved) { add_byte(saved, {"d"}); },
                               [](auto& saved) {
                                 add_byte(saved, {"d", "b"});
                               }});
      },
      ThrowsError(ErrorKind::corruption,
                  "rank0.pt: d: entries of ranks: expected a dict or a list, as on rank 1, found a "
                  "tensor"));
}

// Shows F1, E7. Values, and tensors.
TEST(RankFilesRefusalTest, RefusesAKeyThatIsTakenByEntriesOfRanks) {
  using Save = std::function<void(test::MemoryCheckpoint&, int rank)>;
  const std::vector<Save> cases = {
      [](auto& saved, int rank) {
        saved.add_value("per_rank.1.v", Value(7)).key_path = {"per_rank", "1", "v"};
        saved.add_value("v", Value(rank));
      },
      [](auto& saved, int rank) {
        add_byte(saved, {"per_rank", "1", "v"});
        saved.add({"v", DType::int32, {1}}, test::bytes_of<int>({rank}));
      },
  };
  for (const Save& save : cases) {
    const test::TemporaryDirectory directory;
    EXPECT_THAT(
        [&] {
          open_saved(directory,
                     {[&](auto& saved) { save(saved, 0); }, [&](auto& saved) { save(saved, 1); }});
        },
        ThrowsError(ErrorKind::unsupported,
                    ": per_rank.1.v: names: expected one entry of this name, found two"));
  }
}

// Shows F1, E2, E3.
TEST(RankFilesRefusalTest, RefusesEveryInvalidCheckpoint) {
  test::expect_invalid_fixtures_refused("rank_files", open);
}

// Shows F1.
TEST_F(RankFilesTest, AMissingRankIsNamed) {
  stdfs::remove(directory_ / file("optim", 1));
  expect_refused(ErrorKind::corruption, "ranks 0 to 2 for 'optim', found none of rank 1");
  stdfs::remove(directory_ / file("optim", 0));
  stdfs::remove(directory_ / file("optim", 2));
  EXPECT_EQ(open(directory_.path())->contents().find_tensor("optim.state.0.step"), nullptr);
}

// Shows F1.
TEST_F(RankFilesTest, FilesOfAnotherSaveAreRefused) {
  const std::string other = kValidRankFiles + "fsdp2_hybrid/";
  copy(other + file("model", 1, 4), file("model", 1));
  expect_refused(ErrorKind::corruption,
                 "model.down.bias: mesh: expected [3], as on rank 0, found [2, 2]");
  copy(other + file("model", 0, 4), file("model", 0, 4));
  expect_refused(ErrorKind::unsupported, "found files of 3 and of 4 ranks");
}

// Shows F1.
TEST_F(RankFilesTest, AFileOfAnotherRankIsRefused) {
  copy(directory_ / file("model", 0), file("model", 1));
  expect_refused(ErrorKind::corruption, "expected a part that rank 1 saved");
}

// Shows F1.
TEST_F(RankFilesTest, DifferentItemsHaveAsManyRanks) {
  for (int rank = 0; rank < 3; ++rank) stdfs::remove(directory_ / file("extra_state", rank));
  copy(kValidRankFiles + "fsdp1/" + file("extra_state", 0, 2), file("extra_state", 0, 2));
  copy(kValidRankFiles + "fsdp1/" + file("extra_state", 1, 2), file("extra_state", 1, 2));
  expect_refused(ErrorKind::corruption, "2 ranks for 'model', as for 'extra_state', found 3");
}

// Shows F1.
TEST_F(RankFilesTest, NamesSayItemAndRank) {
  const auto parsed = [](std::string_view name) -> std::string {
    const auto file = rank_files::parse_file_name(name);
    if (!file) return "none";
    return file->item + " " + std::to_string(file->rank) + " of " +
           (file->num_ranks ? std::to_string(*file->num_ranks) : "?");
  };
  const std::map<std::string, std::string> expected = {
      {"model_world_size_8_rank_3.pt", "model 3 of 8"},
      {"rank0.pt", " 0 of ?"},
      {"ep0-ba100-rank12.pt", "ep0-ba100 12 of ?"},
      {"model_0000999.rank_0.pth", "model_0000999 0 of ?"},
      {"optim.rank-1.ckpt", "optim 1 of ?"},
      {"zero_pp_rank_0_mp_rank_00_optim_states.pt", "none"},
      {"mp_rank_00_model_states.pt", "none"},
      {"frank0.pt", "none"},
      {"rank.pt", "none"},
      {"rank_99999999999999999999.pt", "none"},
      {"rng_state_0.pth", "none"},
      {"model_world_size_0_rank_0.pt", "none"},
  };
  for (const auto& [name, words] : expected) EXPECT_EQ(parsed(name), words) << name;
}

// Shows F1.
TEST_F(RankFilesTest, SeveralSavesInOneFolderAreRefused) {
  for (int rank = 0; rank < 3; ++rank) {
    copy(directory_ / file("model", rank), "step100-rank" + std::to_string(rank) + ".pt");
  }
  expect_refused(ErrorKind::unsupported, "expected the files of one save, found 'extra_state'");
}

// Shows F1.
TEST_F(RankFilesTest, OneItemWithoutAKnownNameKeepsItsNames) {
  test::TemporaryDirectory other;
  for (int rank = 0; rank < 3; ++rank) {
    stdfs::copy(directory_ / file("model", rank), other / ("rank" + std::to_string(rank) + ".pt"));
  }
  EXPECT_EQ(pieces_of(*open(other.path()), "up.bias"), "[0:4] on 0, [4:8] on 1, [8:10] on 2");
}

// Shows F1, E4.
TEST_F(RankFilesTest, ItsFilesAreThoseOfTheRanks) {
  std::ofstream(directory_ / "config.json") << "{}";
  std::vector<std::string> names = FileSystem::posix().list_directory(directory_.path());
  const FormatDriver& driver = driver_of(Format("rank_files"));
  EXPECT_EQ(driver.own_files(FileSystem::posix(), directory_.path(), names, {}).size(), 9u);
  EXPECT_TRUE(driver.is_one_of_several(FileSystem::posix(), directory_ / file("model", 2)));
  EXPECT_EQ(open(directory_.path())->data_files().size(), 9u);
}

}  // namespace
}  // namespace tessera::formats
