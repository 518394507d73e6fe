#include "formats/rank_files.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "formats/rank_files/file_names.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"

namespace tessera::formats {
namespace {

using test::expect_holds;
using test::ThrowsError;
using testing::HasSubstr;
namespace stdfs = std::filesystem;

const std::string kValid = std::string(TESSERA_FIXTURES) + "/rank_files/valid/";
constexpr const char* kFixtures[] = {"fsdp1", "fsdp1_sharded_tensor", "fsdp2", "fsdp2_hybrid",
                                     "fsdp2_tp"};

std::unique_ptr<CheckpointReader> open(const std::string& path) {
  return open_checkpoint(FileSystem::posix(), path);
}

/// Returns `[0:4, 0:6] on 0, …` for the pieces of a tensor.
std::string pieces_of(const CheckpointReader& reader, const std::string& fqn) {
  std::string text;
  for (const Piece& piece : reader.contents().find_tensor(fqn)->pieces) {
    text += (text.empty() ? "" : ", ") + region_to_string(piece.region) + " on " +
            std::to_string(piece.rank);
  }
  return text;
}

/// A copy of the fixture `fsdp2` of three ranks, to damage it.
class RankFilesTest : public testing::Test {
 protected:
  RankFilesTest() {
    for (const auto& entry : stdfs::directory_iterator(kValid + "fsdp2")) {
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

// Shows F1.
TEST_F(RankFilesTest, HoldsWhatTheTrainerHeld) {
  for (const char* const name : kFixtures) {
    SCOPED_TRACE(name);
    const auto reader = open(kValid + name);
    EXPECT_EQ(reader->format(), Format("rank_files"));
    EXPECT_FALSE(reader->contents().part);
    expect_holds(*reader, kValid + name + ".expect.json");
  }
}

// Shows F1.
TEST_F(RankFilesTest, PiecesFollowThePlacements) {
  const auto uneven = open(kValid + "fsdp2");
  EXPECT_EQ(pieces_of(*uneven, "model.up.weight"),
            "[0:4, 0:6] on 0, [4:8, 0:6] on 1, [8:10, 0:6] on 2");
  EXPECT_EQ(pieces_of(*uneven, "model.scale"), "[0:1] on 0");
  EXPECT_EQ(pieces_of(*open(kValid + "fsdp2_hybrid"), "model.up.bias"),
            "[0:5] on 0, [5:10] on 1, [0:5] on 2, [5:10] on 3");
  const auto cut_twice = open(kValid + "fsdp2_tp");
  EXPECT_EQ(pieces_of(*cut_twice, "model.up.bias"),
            "[0:3] on 0, [5:8] on 1, [3:5] on 2, [8:10] on 3");
  EXPECT_EQ(pieces_of(*cut_twice, "model.down.weight"),
            "[0:3, 0:5] on 0, [0:3, 5:10] on 1, [3:6, 0:5] on 2, [3:6, 5:10] on 3");
  EXPECT_EQ(pieces_of(*open(kValid + "fsdp1"), "optim.state.3.exp_avg"), "[0:3] on 0, [3:60] on 1");
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
  const std::string other = kValid + "fsdp2_hybrid/";
  copy(other + file("model", 1, 4), file("model", 1));
  expect_refused(ErrorKind::corruption,
                 "model.down.bias: mesh: expected [3], as on rank 0, found [2, 2]");
  copy(other + file("model", 0, 4), file("model", 0, 4));
  expect_refused(ErrorKind::unsupported, "found files of 3 and of 4 ranks");
}

// Shows F1.
TEST_F(RankFilesTest, AFileOfAnotherRankIsRefused) {
  copy(directory_ / file("model", 0), file("model", 1));
  expect_refused(ErrorKind::corruption, "expected what rank 1 saved");
}

// Shows F1.
TEST_F(RankFilesTest, DifferentItemsHaveAsManyRanks) {
  for (int rank = 0; rank < 3; ++rank) stdfs::remove(directory_ / file("extra_state", rank));
  copy(kValid + "fsdp1/" + file("extra_state", 0, 2), file("extra_state", 0, 2));
  copy(kValid + "fsdp1/" + file("extra_state", 1, 2), file("extra_state", 1, 2));
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
