#include "formats/numbered_names.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "support/temporary_directory.h"

namespace tessera::formats {
namespace {

TEST(NumberedNamesTest, ANumberBehindOneOfTheWordsCounts) {
  struct Case {
    std::string name;
    std::uint64_t number;
    std::string series;
  };
  for (const Case& c :
       {Case{"consolidated.01.pth", 1, "consolidated.#.pth"}, Case{"tp_rank_00", 0, "tp_rank_#"},
        Case{"model-shard3.pt", 3, "model-shard#.pt"},
        Case{"reshard-model_part-2.pt", 2, "reshard-model_part-#.pt"},
        Case{"model-2-of-3.safetensors", 2, "model-#-of-3.safetensors"},
        Case{"a_1_of_2_rank_7.pt", 7, "a_1_of_2_rank_#.pt"},
        Case{"model_tp1.pt", 1, "model_tp#.pt"},
        Case{"pytorch_model_tp_2.bin", 2, "pytorch_model_tp_#.bin"},
        Case{"model-00000-TP-001.safetensors", 1, "model-00000-TP-#.safetensors"},
        Case{"model1-mp2.safetensors", 1, "model#-mp2.safetensors"},
        Case{"__12.metadata", 12, "__#.metadata"}}) {
    SCOPED_TRACE(c.name);
    const auto found = numbered_name(c.name);
    ASSERT_TRUE(found);
    EXPECT_EQ(found->number, c.number);
    EXPECT_EQ(found->series, c.series);
  }
  EXPECT_EQ(numbered_name("model-2-of-3.pt")->count, 3U);
  for (const std::string name : {"model.pt", "step_100.pt", "frank_1.pt", "shard.pt", "part.x1.y",
                                 "rank_99999999999999999999.pt", "rng_state_0.pth", "0", "http1.pt",
                                 "app_2.pt", "model_ep3.pt", ""}) {
    EXPECT_FALSE(numbered_name(name)) << name;
  }
}

class NamesBesideTest : public ::testing::Test {
 protected:
  void put(const std::string& name) { FileSystem::posix().create(tmp_ / name)->close(); }
  std::string part_of(const std::string& name) {
    const auto part = part_by_names_beside(FileSystem::posix(), tmp_ / name);
    return part ? part_in_words(*part) : "";
  }

  test::TemporaryDirectory tmp_;
};

TEST_F(NamesBesideTest, AFileIsAPartOnlyBesideOthers) {
  put("consolidated.00.pth");
  put("params.json");
  EXPECT_EQ(part_of("consolidated.00.pth"), "");
  put("consolidated.01.pth");
  EXPECT_EQ(part_of("consolidated.00.pth"),
            "one rank of 2: rank 0, as the names of the files beside it say");
}

TEST_F(NamesBesideTest, AFileOfMetaThatIsNotTheFirstIsAPartAlone) {
  for (const std::string number : {"1", "10"}) {
    const std::string name = number.size() == 1 ? "0" + number : number;
    const std::string file = "consolidated." + name + ".pth";
    put(file);
    EXPECT_EQ(part_of(file), "one rank of several: rank " + number + ", as its name says");
    FileSystem::posix().remove_all(tmp_ / file);
  }
}

TEST_F(NamesBesideTest, AFileWhoseNameSaysHowManyThereAreIsAPartAlone) {
  struct Case {
    std::string name;
    std::string part;
  };
  for (const Case& c :
       {Case{"model-1-of-3.pt", "one file of 3: file 1, as its name says"},
        Case{"weights-part-03-of-03.pt", "one file of 3: file 3, as its name says"},
        Case{"model_rank_0-of-4.pt", "one rank of 4: rank 0, as its name says"},
        Case{"m_pp-rank-0-of-1_tp-rank-0-of-2.pt", "one rank of 2: rank 0, as its name says"},
        Case{"m_pp-rank-1-of-2_tp-rank-0-of-2.pt",
             "one rank of 4: numbers 1 and 0, as its name says"},
        Case{"model_tp-1-of-2.pt", "one rank of 2: rank 1, as its name says"},
        Case{"model0-mp2.safetensors", "one file of 2: file 0, as its name says"},
        Case{"model0-mp1.safetensors", ""}, Case{"model-1-of-1.pt", ""},
        Case{"version-4-of-3.pt", ""}, Case{"epoch-3-of-10.pt", ""}}) {
    SCOPED_TRACE(c.name);
    put(c.name);
    EXPECT_EQ(part_of(c.name), c.part);
    FileSystem::posix().remove_all(tmp_ / c.name);
  }
}

TEST_F(NamesBesideTest, TheMetadataOfOneRankIsAPartAloneAndBesideAGap) {
  put("__1.metadata");
  EXPECT_EQ(part_of("__1.metadata"), "one rank of several: rank 1, as its name says");
  put("__3.metadata");
  EXPECT_EQ(part_of("__1.metadata"),
            "one rank of 4: rank 1, as the names of the files beside it say");
  std::filesystem::remove(tmp_ / "__1.metadata");
  std::filesystem::remove(tmp_ / "__3.metadata");
  put("__0.metadata");
  EXPECT_EQ(part_of("__0.metadata"), "");
}

TEST_F(NamesBesideTest, TheNumbersMustBeThoseOfParts) {
  for (const std::string name : {"lora_rank_8.pt", "lora_rank_16.pt", "x-shard1.pt", "x-shard2.pt",
                                 "y_rank_01.pt", "y_rank_03.pt", "m-1-of-3.pt", "m-3-of-3.pt"}) {
    put(name);
  }
  EXPECT_EQ(part_of("lora_rank_8.pt"), "");
  EXPECT_EQ(part_of("x-shard2.pt"),
            "one file of 2: file 2, as the names of the files beside it say");
  EXPECT_EQ(part_of("y_rank_01.pt"),
            "one rank of 3: rank 1, as the names of the files beside it say");
  EXPECT_EQ(part_of("m-3-of-3.pt"),
            "one file of 3: file 3, as the names of the files beside it say");
}

TEST_F(NamesBesideTest, NumbersOfParallelRanksBeginWith0) {
  for (const std::string name : {"model_tp1.pt", "model_tp2.pt", "base_tp0.pt", "base_tp8.pt"}) {
    put(name);  // how many ranks trained it
  }
  EXPECT_EQ(part_of("model_tp1.pt"), "");
  EXPECT_EQ(part_of("base_tp8.pt"), "");
  put("model_tp0.pt");
  EXPECT_EQ(part_of("model_tp1.pt"),
            "one rank of 3: rank 1, as the names of the files beside it say");
  for (const std::string name : {"model_tp0_pp0.pt", "model_tp0_pp1.pt", "model_tp1_pp0.pt",
                                 "model_tp1_pp1.pt", "optimizer_tp0_pp0_zo0.pt"}) {
    put(name);  // as InternLM and others write them
  }
  EXPECT_EQ(part_of("model_tp1_pp0.pt"),
            "one rank of 4: numbers 1 and 0, as the names of the files beside it say");
  EXPECT_EQ(part_of("optimizer_tp0_pp0_zo0.pt"), "");
}

TEST_F(NamesBesideTest, EachNumberInANameCounts) {
  put("tp_rank_00_pp_rank_000.pt");
  put("tp_rank_01_pp_rank_000.pt");
  EXPECT_EQ(part_of("tp_rank_01_pp_rank_000.pt"),
            "one rank of 2: rank 1, as the names of the files beside it say");
  put("tp_rank_00_pp_rank_001.pt");
  put("tp_rank_01_pp_rank_001.pt");
  put("tp_rank_02_pp_rank_000.pt");
  put("tp_rank_02_pp_rank_001.pt");
  EXPECT_EQ(part_of("tp_rank_02_pp_rank_000.pt"),
            "one rank of 6: numbers 2 and 0, as the names of the files beside it say");
}

TEST_F(NamesBesideTest, AllFilesOfAGridAreOneSeriesWithDifferentNumbers) {
  std::vector<std::string> names;
  for (int i = 0; i < 22; ++i) {
    names.push_back("ep_rank_" + std::to_string(i % 2) + "_pp_rank_" + std::to_string(i / 2) +
                    ".pt");
  }
  for (const std::string& name : names) put(name);
  std::set<std::string> series;
  std::set<std::uint64_t> numbers;
  for (const std::string& name : names) {
    const auto part = part_by_names_beside(FileSystem::posix(), tmp_ / name);
    ASSERT_TRUE(part);
    series.insert(part->series);
    numbers.insert(part->number);
  }
  EXPECT_EQ(series, std::set<std::string>{tmp_ / "ep_rank_#_pp_rank_#.pt"});
  EXPECT_EQ(numbers.size(), names.size());
}

TEST_F(NamesBesideTest, FoldersOfRanksTellOfTheirFiles) {
  FileSystem::posix().make_directory(tmp_ / "tp_rank_00");
  put("tp_rank_00/model.ckpt");
  EXPECT_EQ(part_of("tp_rank_00/model.ckpt"), "");
  FileSystem::posix().make_directory(tmp_ / "tp_rank_01");
  EXPECT_EQ(part_of("tp_rank_00/model.ckpt"),
            "one rank of 2: rank 0, as the names of the folders beside its own say");
}

}  // namespace
}  // namespace tessera::formats
