#include "formats/megatron.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "formats/megatron/cuts_by_name.h"
#include "formats/megatron/flat_buffers.h"
#include "formats/megatron/model_parts.h"
#include "formats/megatron/rank_folders.h"
#include "support/contents_text.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fixtures.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/format_driver.h"
#include "tessera/layout/region.h"

namespace tessera::formats {
namespace {

using megatron::Cut;
using megatron::cut_of;
using test::expect_holds;
using test::notes_of;
using test::open;
using test::pieces_of;
using test::ThrowsError;
using testing::ElementsAre;
using testing::HasSubstr;
namespace stdfs = std::filesystem;

const std::string kMegatron = test::fixture("megatron/");
const std::string kValidMegatron = kMegatron + "valid/";
constexpr const char* kIteration = "/iter_0000003";
constexpr const char* kMegatronFixtures[] = {"tp2",
                                             "tp2_pp2",
                                             "tp2_fp16",
                                             "pp2_vpp2_bf16",
                                             "tp2_pp2_distributed_bf16",
                                             "dp2_distributed",
                                             "tp2_ep2_experts",
                                             "pp2_ep2_experts_distributed_bf16"};

// Shows F3.
TEST(MegatronTest, HoldsWhatTheTrainerHeld) {
  for (const char* const name : kMegatronFixtures) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidMegatron + name + kIteration);
    EXPECT_EQ(reader->format(), Format("megatron"));
    EXPECT_FALSE(reader->contents().part);
    expect_holds(*reader, kValidMegatron + name + ".expect.json");
  }
}

TEST(MegatronTest, TheFolderOfTheRunIsItsNewestCheckpoint) {
  const auto reader = open(kValidMegatron + "tp2");
  expect_holds(*reader, kValidMegatron + "tp2.expect.json");
  EXPECT_EQ(reader->piece_storage(0, 0).file, "iter_0000003/mp_rank_00/model_optim_rng.pt");
  EXPECT_EQ(open(kValidMegatron + "tp2" + kIteration)->piece_storage(0, 0).file,
            "mp_rank_00/model_optim_rng.pt");
}

// Shows F3.
TEST(MegatronTest, EachTensorRankHasItsPart) {
  const auto reader = open(kValidMegatron + "tp2_pp2");
  EXPECT_EQ(reader->contents().world_size, 4);
  EXPECT_EQ(pieces_of(*reader, "model.embedding.word_embeddings.weight"),
            "[0:10, 0:8] on 0, [10:20, 0:8] on 1");
  // Each rank has its part of the gate, then its part of the up projection.
  EXPECT_EQ(pieces_of(*reader, "model.decoder.layers.1.mlp.linear_fc1.weight"),
            "[0:6, 0:8] on 2, [12:18, 0:8] on 2, [6:12, 0:8] on 3, [18:24, 0:8] on 3");
  EXPECT_EQ(pieces_of(*reader, "model.decoder.layers.1.mlp.linear_fc2.weight"),
            "[0:8, 0:6] on 2, [0:8, 6:12] on 3");
  EXPECT_EQ(pieces_of(*reader, "optim.state.decoder.layers.1.mlp.linear_fc2.weight.exp_avg"),
            "[0:8, 0:6] on 2, [0:8, 6:12] on 3");
  EXPECT_EQ(pieces_of(*reader, "model.decoder.final_layernorm.weight"), "[0:8] on 2, [0:8] on 3");
}

// The layers of a virtual pipeline: chunk 0 of both stages, then chunk 1 of both stages.
TEST(MegatronTest, LayersHaveTheirNumbersInTheWholeModel) {
  const auto reader = open(kValidMegatron + "pp2_vpp2_bf16");
  for (const auto& [layer, rank] : {std::pair("0", "0"), {"1", "1"}, {"2", "0"}, {"3", "1"}}) {
    EXPECT_EQ(pieces_of(*reader, "model.decoder.layers." + std::string(layer) +
                                     ".self_attention.linear_proj.weight"),
              "[0:8, 0:8] on " + std::string(rank));
  }
  EXPECT_EQ(pieces_of(*reader, "model.decoder.layers.4.self_attention.linear_proj.weight"), "none");
}

TEST(MegatronTest, ExpertsHaveTheirNumbersInTheWholeModel) {
  const auto reader = open(kValidMegatron + "tp2_ep2_experts");
  EXPECT_EQ(
      pieces_of(*reader, "model.decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight"),
      "[0:8, 0:3] on 2, [0:8, 3:6] on 3");
  EXPECT_EQ(pieces_of(*reader, "model.decoder.layers.0.mlp.router.weight"),
            "[0:4, 0:8] on 0, [0:4, 0:8] on 1, [0:4, 0:8] on 2, [0:4, 0:8] on 3");
}

/// Returns the keys of `model` (tensors, aliases and values) in their order.
std::vector<std::string> keys_of_model(const CheckpointContents& contents) {
  std::vector<std::pair<std::uint32_t, std::string>> keys;
  const auto add = [&](const std::string& name, std::uint32_t order) {
    if (name.starts_with("model.")) keys.emplace_back(order, name);
  };
  for (const TensorEntry& tensor : contents.tensors) add(tensor.meta.fqn, tensor.dict_order);
  for (const Alias& alias : contents.aliases) add(alias.fqn, alias.dict_order);
  for (const ValueEntry& value : contents.values) add(value.name, value.dict_order);
  std::ranges::sort(keys);
  std::vector<std::string> names;
  for (auto& [order, name] : keys) names.push_back(std::move(name));
  return names;
}

// Tensors and values together have one order: that of the first rank's file.
TEST(MegatronTest, KeysKeepTheOrderOfTheFirstRank) {
  for (const char* const name : {"tp2", "tp2_fp16"}) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidMegatron + name + kIteration);
    const auto file = open(kValidMegatron + name + kIteration + "/mp_rank_00/model_optim_rng.pt");
    EXPECT_EQ(keys_of_model(reader->contents()), keys_of_model(file->contents()));
  }
  // Every entry has a place in the order. An entry without one would come first.
  for (const char* const name : kMegatronFixtures) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidMegatron + name + kIteration);
    const CheckpointContents& contents = reader->contents();
    const auto has_order = [](const auto& entry) { return entry.dict_order > 0; };
    EXPECT_TRUE(std::ranges::all_of(contents.tensors, has_order));
    EXPECT_TRUE(std::ranges::all_of(contents.aliases, has_order));
    EXPECT_TRUE(std::ranges::all_of(contents.values, has_order));
  }
}

TEST(MegatronTest, SaysThatTheModelsCopiesAreLeftOut) {
  EXPECT_THAT(notes_of(*open(kValidMegatron + "pp2_vpp2_bf16")),
              testing::Contains(HasSubstr("copies: 53 parameters also in the dtype of the model")));
}

// Shows F3, E3.
TEST(MegatronTest, RefusesEveryInvalidCheckpoint) {
  test::expect_invalid_fixtures_refused("megatron", open);
}

/// A copy of a fixture, to change it.
class MegatronFolderTest : public testing::Test {
 protected:
  void copy(const std::string& fixture) {
    stdfs::copy(kValidMegatron + fixture, directory_.path(), stdfs::copy_options::recursive);
    for (const auto& entry : stdfs::recursive_directory_iterator(directory_.path())) {
      stdfs::permissions(entry.path(), stdfs::perms::owner_write, stdfs::perm_options::add);
    }
  }
  std::string within(const std::string& name) const {
    return directory_ / ("iter_0000003/" + name);
  }
  std::string message() const {
    try {
      open(directory_.path());
    } catch (const Error& error) {
      return std::string(to_string(error.kind())) + ": " + error.what();
    }
    return "accepted";
  }

  test::TemporaryDirectory directory_;
};

TEST_F(MegatronFolderTest, RefusesAFileInTheFolderOfAnotherRank) {
  copy("tp2");
  stdfs::rename(within("mp_rank_00"), within("other"));
  stdfs::rename(within("mp_rank_01"), within("mp_rank_00"));
  stdfs::rename(within("other"), within("mp_rank_01"));
  EXPECT_THAT(message(), HasSubstr("mp_rank_00/model_optim_rng.pt: args.rank: folder of a rank: "
                                   "expected a file that tensor rank 0 of 2 saved, found the file "
                                   "of rank 1"));
}

// Stages and expert ranks have rising ranks in both of Megatron's orders.
TEST_F(MegatronFolderTest, RefusesSwappedStagesAndSwappedExpertRanks) {
  for (const char* const fixture : {"pp2_vpp2_bf16", "tp2_ep2_experts"}) {
    SCOPED_TRACE(fixture);
    stdfs::remove_all(directory_.path());
    copy(fixture);
    stdfs::rename(within("mp_rank_00_000"), within("other"));
    stdfs::rename(within("mp_rank_00_001"), within("mp_rank_00_000"));
    stdfs::rename(within("other"), within("mp_rank_00_001"));
    EXPECT_THAT(message(),
                HasSubstr("mp_rank_00_001/model_optim_rng.pt: args.rank: folder of a rank: "
                          "expected a rank above " +
                          std::string(fixture[0] == 'p' ? "1" : "2") +
                          ", that of mp_rank_00_000/model_optim_rng.pt, found the file of rank 0"));
  }
}

TEST_F(MegatronFolderTest, RefusesTheFileOfOneRankInTwoFolders) {
  copy("tp2_pp2");
  stdfs::copy_file(within("mp_rank_00_000/model_optim_rng.pt"),
                   within("mp_rank_00_001/model_optim_rng.pt"),
                   stdfs::copy_options::overwrite_existing);
  EXPECT_THAT(
      message(),
      HasSubstr("expected a rank's file in one folder only, found the file of rank 0, which "
                "is also in mp_rank_00_000/model_optim_rng.pt"));
}

// Converters write rank 0 into all files (`args.rank`).
TEST_F(MegatronFolderTest, SaysThatAllFilesNameOneRank) {
  copy("tp2");
  stdfs::copy_file(within("mp_rank_00/model_optim_rng.pt"), within("mp_rank_01/model_optim_rng.pt"),
                   stdfs::copy_options::overwrite_existing);
  EXPECT_THAT(notes_of(*open(within(""))),
              testing::Contains(HasSubstr("ranks: 0 in all files (so this reader cannot notice")));
}

TEST_F(MegatronFolderTest, AMissingRankIsNamed) {
  copy("tp2_pp2");
  stdfs::remove_all(within("mp_rank_01_000"));
  EXPECT_THAT(message(),
              HasSubstr("corruption: " + directory_.path() +
                        "/iter_0000003: folders of ranks: expected one folder of each rank, "
                        "found none of tensor rank 1, pipeline stage 0"));
}

TEST_F(MegatronFolderTest, AMissingLastStageIsNamed) {
  copy("tp2_pp2");
  stdfs::remove_all(within("mp_rank_00_001"));
  stdfs::remove_all(within("mp_rank_01_001"));
  EXPECT_THAT(message(), HasSubstr("args.pipeline_model_parallel_size: folders of ranks: expected "
                                   "2, found 1, as the names of the folders show"));
}

TEST_F(MegatronFolderTest, AMissingFileIsNamed) {
  copy("tp2");
  stdfs::remove(within("mp_rank_01/model_optim_rng.pt"));
  EXPECT_THAT(message(), HasSubstr("mp_rank_01: files of ranks: expected model_optim_rng.pt, found "
                                   "none"));
}

TEST_F(MegatronFolderTest, FoldersOfTwoSavesAreRefused) {
  copy("tp2");
  stdfs::rename(within("mp_rank_01"), within("mp_rank_01_000"));
  EXPECT_THAT(message(), HasSubstr("expected names with 1 number, as 'mp_rank_00', found "
                                   "'mp_rank_01_000'"));
}

TEST_F(MegatronFolderTest, ARankOfAnotherModelIsRefused) {
  copy("tp2");
  stdfs::copy(kValidMegatron + "tp2_pp2/iter_0000003/mp_rank_01_000/model_optim_rng.pt",
              within("mp_rank_01/model_optim_rng.pt"), stdfs::copy_options::overwrite_existing);
  EXPECT_THAT(message(), testing::StartsWith("corruption: "));
}

/// Returns the error that reading the value `optim` throws; `none` if there is no error.
std::string refusal_of_optimizer(const CheckpointReader& reader) {
  const auto& values = reader.contents().values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].name != "optim") continue;
    try {
      reader.read_value(i);
    } catch (const Error& error) {
      return std::string(to_string(error.kind())) + ": " + error.what();
    }
  }
  return "none";
}

/// Returns the errors that a check finds.
std::vector<std::string> errors_in(const CheckpointReader& reader) {
  std::vector<std::string> errors;
  const auto add = [&](const Finding& finding) {
    if (finding.severity == Finding::Severity::error) errors.push_back(finding_to_string(finding));
  };
  reader.verify(add, [](std::uint64_t) {});
  return errors;
}

TEST_F(MegatronFolderTest, ACheckFindsThatADistributedOptimizersFileIsMissing) {
  copy("tp2_pp2_distributed_bf16");
  EXPECT_THAT(errors_in(*open(directory_.path())), testing::IsEmpty());
  stdfs::remove(within("mp_rank_01_000/distrib_optim.pt"));
  EXPECT_THAT(errors_in(*open(directory_.path())),
              ElementsAre(HasSubstr("optim: structure: expected the optimizer state of the model's "
                                    "parameters, found state of unknown parameters in "
                                    "mp_rank_01_000/model_optim_rng.pt: the state is in no file")));
}

TEST_F(MegatronFolderTest, ANoteSaysThatTheExactWeightsAreNotRead) {
  const auto found_by = [](const CheckpointReader& reader) {
    std::vector<std::string> found;
    for (const Finding& each : reader.contents().opening_findings) {
      if (each.expected == "the fp32 weights of the optimizer") found.push_back(each.found);
    }
    return found;
  };
  copy("tp2_pp2_distributed_bf16");
  EXPECT_THAT(found_by(*open(directory_.path())), testing::IsEmpty());
  stdfs::remove(within("mp_rank_01_000/distrib_optim.pt"));
  EXPECT_THAT(found_by(*open(directory_.path())),
              ElementsAre(testing::AllOf(HasSubstr("the state is in no file"),
                                         HasSubstr(" are read from the model, in its dtype"))));
}

TEST_F(MegatronFolderTest, ACheckFindsTheStateOfOtherWeights) {
  copy("tp2_pp2_distributed_bf16");
  stdfs::copy(within("mp_rank_00_000/distrib_optim.pt"), within("mp_rank_01_000/distrib_optim.pt"),
              stdfs::copy_options::overwrite_existing);
  EXPECT_THAT(errors_in(*open(directory_.path())),
              ElementsAre(HasSubstr("the fp32 weights differ from the model's")));
}

TEST_F(MegatronFolderTest, ACheckFindsAnotherFileInThePlaceOfTheVectors) {
  copy("tp2_pp2_distributed_bf16");
  stdfs::copy(within("mp_rank_00_000/model_optim_rng.pt"),
              within("mp_rank_00_000/distrib_optim.pt"), stdfs::copy_options::overwrite_existing);
  EXPECT_THAT(errors_in(*open(directory_.path())),
              ElementsAre(HasSubstr("no vectors of the distributed optimizer are in "
                                    "mp_rank_00_000/distrib_optim.pt")));
}

TEST_F(MegatronFolderTest, StateInAnUnknownOrderIsNoErrorOfACheck) {
  EXPECT_THAT(errors_in(*open(kMegatron + "invalid/vectors_of_older_version")), testing::IsEmpty());
}

TEST_F(MegatronFolderTest, ACheckFindsWhatIsMissingBehindStateInAnUnknownOrder) {
  stdfs::copy(kMegatron + "invalid/vectors_of_older_version", directory_.path(),
              stdfs::copy_options::recursive);
  stdfs::remove(directory_ / "mp_rank_01/distrib_optim.pt");
  EXPECT_THAT(errors_in(*open(directory_.path())),
              ElementsAre(HasSubstr("mp_rank_01/model_optim_rng.pt: the state is in no file")));
}

TEST_F(MegatronFolderTest, AStateInNoRanksFileIsAnErrorOfACheck) {
  EXPECT_THAT(errors_in(*open(kMegatron + "invalid/vectors_empty")),
              ElementsAre(HasSubstr("found no state of 'decoder.final_layernorm.weight'")));
}

TEST_F(MegatronFolderTest, WithoutTheDistributedOptimizersFilesTheWeightsAreRead) {
  copy("tp2_pp2_distributed_bf16");
  for (const char* const rank : {"00_000", "00_001", "01_000", "01_001"}) {
    stdfs::remove(within(std::string("mp_rank_") + rank + "/distrib_optim.pt"));
  }
  const auto reader = open(directory_.path());
  EXPECT_THAT(refusal_of_optimizer(*reader), HasSubstr("distrib_optim.pt was not copied?"));
  const TensorEntry* const weights =
      reader->contents().find_tensor("model.embedding.word_embeddings.weight");
  ASSERT_NE(weights, nullptr);
  EXPECT_EQ(weights->meta.dtype, DType::bfloat16);
}

// Shows F3.
TEST_F(MegatronFolderTest, VectorsOfOtherWeightsAreNotTaken) {
  copy("tp2_pp2_distributed_bf16");
  stdfs::copy(within("mp_rank_00_000/distrib_optim.pt"), within("mp_rank_01_000/distrib_optim.pt"),
              stdfs::copy_options::overwrite_existing);
  EXPECT_THAT(refusal_of_optimizer(*open(directory_.path())),
              HasSubstr("no known order of the parameters fits buffer 0"));
}

TEST_F(MegatronFolderTest, StateOfALayerWiseOptimizerIsNotRead) {
  copy("tp2");
  std::ofstream(within("mp_rank_00/layer_wise_optimizer_0.pt")) << "x";
  EXPECT_THAT(refusal_of_optimizer(*open(directory_.path())), HasSubstr("layer-wise optimizer"));
}

TEST_F(MegatronFolderTest, ItsFoldersAreThoseOfMegatron) {
  copy("tp2");
  std::ofstream(within("notes.txt")) << "x";
  stdfs::create_directory(directory_ / "iter_0000002");
  const FileSystem& fs = FileSystem::posix();
  const FormatDriver& driver = driver_of(Format("megatron"));
  const std::string folder = directory_ / "iter_0000003";
  EXPECT_THAT(driver.own_files(fs, folder, fs.list_directory(folder), {}),
              ElementsAre("mp_rank_00", "mp_rank_01"));
  const std::string run = directory_.path();
  EXPECT_THAT(driver.own_files(fs, run, fs.list_directory(run),
                               {folder + "/mp_rank_00/model_optim_rng.pt"}),
              ElementsAre("iter_0000003", "latest_checkpointed_iteration.txt"));
}

TEST(MegatronNamesTest, RulesKnowMegatronsLayers) {
  EXPECT_EQ(cut_of("decoder.layers.0.self_attention.linear_qkv.weight"), Cut::first_dimension);
  EXPECT_EQ(cut_of("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight"), Cut::whole);
  EXPECT_EQ(cut_of("decoder.layers.0.mlp.linear_fc2.weight"), Cut::second_dimension);
  EXPECT_EQ(cut_of("decoder.layers.0.mlp.linear_fc2.bias"), Cut::whole);
  EXPECT_EQ(cut_of("decoder.layers.0.mlp.experts.linear_fc1.weight12"), Cut::first_dimension);
  EXPECT_EQ(cut_of("decoder.layers.0.mlp.experts.weight1"), Cut::not_joined);
  EXPECT_EQ(cut_of("decoder.layers.0.mixer.norm.weight"), Cut::not_joined);
  EXPECT_EQ(cut_of("language_model.encoder.layers.0.self_attention.dense.weight"),
            Cut::second_dimension);
  EXPECT_EQ(cut_of("language_model.encoder.layers.0.mlp.dense_h_to_4h.bias"), Cut::first_dimension);
  EXPECT_EQ(cut_of("lm_head.dense.weight"), Cut::no_rule);
  EXPECT_EQ(cut_of("decoder.layers.0.mlp.shared_experts.linear_fc1.weight"), Cut::first_dimension);
}

TEST(MegatronNamesTest, NumbersOfLayersAndExpertsAreFound) {
  EXPECT_EQ(megatron::layer_in("decoder.layers.12.mlp")->with(3), "decoder.layers.3.mlp");
  EXPECT_FALSE(megatron::layer_in("decoder.mylayers.12.mlp"));
  EXPECT_FALSE(megatron::layer_in("decoder.layers.x.mlp"));
  EXPECT_EQ(megatron::expert_in("mlp.experts.local_experts.1.linear_fc1.weight")->with(9),
            "mlp.experts.local_experts.9.linear_fc1.weight");
  EXPECT_EQ(megatron::expert_in("mlp.experts.linear_fc1.weight1")->with(9),
            "mlp.experts.linear_fc1.weight9");
  EXPECT_FALSE(megatron::expert_in("mlp.experts.weight1"));
  EXPECT_FALSE(megatron::expert_in("mlp.shared_experts.linear_fc1.weight"));
  EXPECT_EQ(megatron::second_of_perceptron("mlp.experts.linear_fc1.weight3"),
            "mlp.experts.linear_fc2.weight3");
  EXPECT_EQ(megatron::second_of_perceptron("mlp.linear_fc1.bias"), "mlp.linear_fc2.weight");
  EXPECT_FALSE(megatron::second_of_perceptron("mlp.linear_fc2.bias"));
}

TEST(MegatronNamesTest, APartThatCannotBeCutSoIsRefused) {
  EXPECT_FALSE(megatron::join(Cut::second_dimension, 1, 2, {4}));
  EXPECT_FALSE(megatron::join(Cut::first_dimension, 2, 2, {3, 4}));
  EXPECT_FALSE(megatron::join(Cut::first_dimension, 1, 4, {std::int64_t{1} << 62, 4}));
  EXPECT_EQ(megatron::join(Cut::first_dimension, 1, 3, {4, 5})->whole, (Shape{12, 5}));
}

TEST(MegatronNamesTest, EachRankHasAPartOfEachMatrix) {
  const auto pieces = megatron::join(Cut::first_dimension, 3, 2, {6, 4})->pieces_of(1);
  ASSERT_EQ(pieces.size(), 3U);
  EXPECT_EQ(pieces[2].region, (Box{{10, 0}, {2, 4}}));
  EXPECT_EQ(pieces[2].begin, 16);
}

TEST(MegatronNamesTest, FoldersOfRanksAreInOrder) {
  const auto folders = megatron::find_rank_folders(
      {"mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001", "other"}, "x",
      megatron::SecondNumber::expert);
  EXPECT_THAT(folders.names,
              ElementsAre("mp_rank_00_000", "mp_rank_01_000", "mp_rank_00_001", "mp_rank_01_001"));
  EXPECT_EQ(folders.place_of(3).expert, 1u);
  EXPECT_EQ(folders.place_of(3).tensor, 1u);
  EXPECT_EQ(folders.sizes.stage, 1u);
  EXPECT_THAT(
      [] {
        megatron::find_rank_folders({"mp_rank_00", "mp_rank_0"}, "x",
                                    megatron::SecondNumber::stage);
      },
      ThrowsError(ErrorKind::unsupported, "'mp_rank_0' and 'mp_rank_00'"));
  EXPECT_THAT(
      [] {
        megatron::find_rank_folders({"mp_rank_99999999999999999999"}, "x",
                                    megatron::SecondNumber::stage);
      },
      ThrowsError(ErrorKind::corruption, "numbers below 16384"));
}

}  // namespace
}  // namespace tessera::formats
