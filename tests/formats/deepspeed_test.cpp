#include "formats/deepspeed.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

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

using test::expect_holds;
using test::notes_of;
using test::open;
using test::pieces_of;
using test::ThrowsError;
using testing::ElementsAre;
using testing::HasSubstr;
namespace stdfs = std::filesystem;

const std::string kDeepSpeed = test::fixture("deepspeed/");
const std::string kValidDeepSpeed = kDeepSpeed + "valid/";
const std::string kInvalidDeepSpeed = kDeepSpeed + "invalid/";
constexpr const char* kDeepSpeedFixtures[] = {"zero1",          "zero1_bf16",   "zero2_bf16",
                                              "zero2_cpu_adam", "zero2_fp16",   "zero3",
                                              "zero3_bf16",     "zero3_offload"};

// Shows F2.
TEST(DeepSpeedTest, HoldsWhatTheTrainerHeld) {
  for (const char* const name : kDeepSpeedFixtures) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidDeepSpeed + name);
    EXPECT_EQ(reader->format(), Format("deepspeed"));
    EXPECT_FALSE(reader->contents().part);
    expect_holds(*reader, kValidDeepSpeed + name + ".expect.json");
  }
}

// Shows F2.
TEST(DeepSpeedTest, TheFolderOfTheStepIsTheSameCheckpoint) {
  const auto reader = open(kValidDeepSpeed + "zero1/global_step2");
  expect_holds(*reader, kValidDeepSpeed + "zero1.expect.json");
  EXPECT_EQ(reader->piece_storage(0, 0).file, "zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_EQ(open(kValidDeepSpeed + "zero1")->piece_storage(0, 0).file,
            "global_step2/zero_pp_rank_1_mp_rank_00_optim_states.pt");
}

// Shows F2. zero_to_fp32.py of DeepSpeed 0.19 silently leaves out the frozen layer of a checkpoint
// of stage 1.
TEST(DeepSpeedTest, FrozenParametersOfStage1AreThere) {
  const auto reader = open(kValidDeepSpeed + "zero1");
  EXPECT_NE(reader->contents().find_tensor("model.frozen.weight"), nullptr);
  EXPECT_NE(reader->contents().find_tensor("model.frozen.bias"), nullptr);
}

// Shows F2, A4.
TEST(DeepSpeedTest, EachRankHasAFlatRange) {
  const auto zero1 = open(kValidDeepSpeed + "zero1");
  EXPECT_EQ(zero1->contents().world_size, 2);
  EXPECT_EQ(pieces_of(*zero1, "model.embedding.weight"), "flat[0:35] on 0");
  EXPECT_EQ(pieces_of(*zero1, "model.up.weight"), "flat[0:39] on 0, flat[39:55] on 1");
  EXPECT_EQ(pieces_of(*zero1, "optim.state.up.weight.exp_avg"),
            "flat[0:39] on 0, flat[39:55] on 1");
  const auto zero3 = open(kValidDeepSpeed + "zero3");
  EXPECT_EQ(zero3->contents().world_size, 3);
  EXPECT_EQ(pieces_of(*zero3, "model.up.weight"),
            "flat[0:19] on 0, flat[19:38] on 1, flat[38:55] on 2");
  EXPECT_EQ(pieces_of(*zero3, "model.scale"), "flat[0:1] on 0");
  EXPECT_EQ(pieces_of(*zero3, "model.frozen.weight"),
            "flat[0:11] on 0, flat[11:22] on 1, flat[22:33] on 2");
}

// Shows F2.
TEST(DeepSpeedTest, TiedParametersAreAliases) {
  for (const char* const name : kDeepSpeedFixtures) {
    const auto reader = open(kValidDeepSpeed + name);
    ASSERT_EQ(reader->contents().aliases.size(), 1u) << name;
    EXPECT_EQ(reader->contents().aliases[0].fqn, "model.head.weight");
    EXPECT_EQ(reader->contents().aliases[0].target, "model.embedding.weight");
  }
}

// Shows F2, E13.
TEST(DeepSpeedTest, SaysWhatItLeavesOut) {
  EXPECT_THAT(notes_of(*open(kValidDeepSpeed + "zero1")), ElementsAre());
  EXPECT_THAT(
      notes_of(*open(kValidDeepSpeed + "zero2_bf16")),
      ElementsAre(HasSubstr("copies: 7 names also in 'module', in the dtype of the model")));
  EXPECT_THAT(
      notes_of(*open(kValidDeepSpeed + "zero3")),
      ElementsAre(HasSubstr("ranks: 1 name with other bytes on some rank, such as 'seen'")));
}

// Shows F2, E3.
TEST(DeepSpeedTest, RefusesEveryInvalidCheckpoint) {
  test::expect_invalid_fixtures_refused("deepspeed", open);
}

struct Refusal {
  const char* fixture;
  ErrorKind kind;
  const char* message;  // the text after the path of the fixture
};

constexpr Refusal kRefusals[] = {
    {"dp_world_size", ErrorKind::corruption,
     ": files of ranks: expected optimizer states of 3 ranks, as "
     "dp_world_size of mp_rank_00_model_states.pt says, found optimizer states of 2"},
    {"last_rank_missing", ErrorKind::corruption,
     ": files of ranks: expected optimizer states of 2 ranks, as "
     "dp_world_size of mp_rank_00_model_states.pt says, found optimizer states of 1"},
    {"rank_missing", ErrorKind::corruption,
     ": files of ranks: expected optimizer states of ranks 0 to 1, "
     "found none of rank 0"},
    {"model_missing", ErrorKind::corruption, ": files of ranks: expected model states, found none"},
    {"model_of_rank_missing", ErrorKind::corruption,
     ": files of ranks: expected model states of ranks 0 to 1, found "
     "none of rank 0"},
    {"rank_twice", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: rank: expected a file "
     "saved as zero_pp_rank_1_mp_rank_00_optim_states.pt, found "
     "a file saved as zero_pp_rank_0_mp_rank_00_optim_states.pt"},
    {"other_run", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: "
     "optimizer_state_dict.base_optimizer_state.param_groups.0.lr: "
     "expected 0.01, as in zero_pp_rank_0_mp_rank_00_optim_states.pt, "
     "found 0.5 (a rank of another run or step?)"},
    {"other_step", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: "
     "optimizer_state_dict.base_optimizer_state.state.0.step: expected "
     "the number that zero_pp_rank_0_mp_rank_00_optim_states.pt has, "
     "found a different number"},
    {"other_version", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: ds_version: expected "
     "'0.19.8', as in mp_rank_00_model_states.pt, found '0.1.0'"},
    {"partition_count", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: "
     "optimizer_state_dict.partition_count: expected the number of "
     "files with optimizer states, 2, found 3"},
    {"mp_world_size", ErrorKind::corruption,
     ": files of ranks: expected model states of 2 mp_ranks, as mp_world_size of "
     "mp_rank_00_model_states.pt says, found model states of 1"},
    {"tensor_parallel", ErrorKind::corruption,
     ": files of ranks: expected optimizer states and model states of mp_rank 1, found no "
     "optimizer states"},
    {"pipeline", ErrorKind::corruption,
     "/layer_01-model_00-model_states.pt: rank: expected a file saved as "
     "layer_01-model_00-model_states.pt, found a file saved as mp_rank_00_model_states.pt"},
    {"expert", ErrorKind::unsupported,
     "/layer_0_expert_1_mp_rank_00_model_states.pt: parallelism: "
     "expected only files of ZeRO, found a file of expert parallelism"},
    {"padding", ErrorKind::corruption,
     "/mp_rank_00_model_states.pt: padding: expected 0 or 1 elements after the last parameter of "
     "vector 0, found 2"},
    {"slice_overlaps", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: 0.bias: slice of a "
     "parameter: expected elements 4 to 7 of vector 0, found 3 elements "
     "from 3 on in vector 0"},
    {"slice_hole", ErrorKind::corruption,
     "/zero_pp_rank_0_mp_rank_00_optim_states.pt: 0.weight: slice of a "
     "parameter: expected elements 0 to 8 of vector 0, found 7 elements "
     "from 0 on"},
    {"slice_missing", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: param_slice_mappings: "
     "expected slices of 2 parameters, found slices of 1"},
    {"slice_unknown", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: other: slice of a "
     "parameter: expected no elements on this rank, found 3 elements from 4 on"},
    {"shape_differs", ErrorKind::corruption,
     "/mp_rank_00_model_states.pt: 0.weight: parts of ranks: expected 24 elements, for [6, 4], "
     "found 15 elements left in vector 0"},
    {"vector_short", ErrorKind::corruption,
     "/mp_rank_00_model_states.pt: 0.bias: parts of ranks: expected 3 elements, for [3], found 2 "
     "elements left in vector 0"},
    {"vector_missing", ErrorKind::corruption,
     "/zero_pp_rank_0_mp_rank_00_optim_states.pt: fp32 weights: "
     "expected flat vector 1, a one-dimensional tensor 'single_partition_of_fp32_groups.1', found "
     "none"},
    {"state_short", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: "
     "optim.state.0.bias.exp_avg: parts of ranks: expected a vector as "
     "long as the fp32 weights, found a tensor of shape [6]"},
    {"zero3_padding", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: 0.bias: fp32 weights: "
     "expected vectors that end with this parameter, found 2 further "
     "elements"},
    {"zero3_vector_short", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_optim_states.pt: 0.bias: fp32 weights: "
     "expected 2 elements of this parameter in vector 0, found only 1 further elements"},
    {"zero3_frozen_short", ErrorKind::corruption,
     "/zero_pp_rank_1_mp_rank_00_model_states.pt: model.1.weight: parts of ranks: expected a "
     "vector of 2 "
     "elements, found a value, or a tensor with another number of elements"},
    {"os_system", ErrorKind::corruption,
     "/mp_rank_00_model_states.pt: 0.weight: param_shapes: expected a "
     "dict of shapes by name"},
    {"latest_climbs", ErrorKind::corruption,
     "/latest: latest: expected the name of a folder beside it, found "
     "'../rank_twice'"},
};

// Shows F2, E7.
TEST(DeepSpeedTest, SaysWhatIsWrong) {
  for (const Refusal& refusal : kRefusals) {
    SCOPED_TRACE(refusal.fixture);
    const std::string path = kInvalidDeepSpeed + refusal.fixture;
    const auto read_values = [&] {
      const auto reader = open(path);
      for (std::size_t v = 0; v < reader->contents().values.size(); ++v) reader->read_value(v);
    };
    EXPECT_THAT(read_values, ThrowsError(refusal.kind, path + refusal.message));
  }
}

/// A copy of the fixture `zero1`, to change it.
class DeepSpeedFolderTest : public testing::Test {
 protected:
  DeepSpeedFolderTest() {
    stdfs::copy(kValidDeepSpeed + "zero1", directory_.path(), stdfs::copy_options::recursive);
    for (const auto& entry : stdfs::recursive_directory_iterator(directory_.path())) {
      stdfs::permissions(entry.path(), stdfs::perms::owner_write, stdfs::perm_options::add);
    }
  }
  void write(const std::string& name, const std::string& text) {
    std::ofstream(directory_ / name) << text;
  }

  test::TemporaryDirectory directory_;
};

// Shows F2.
TEST_F(DeepSpeedFolderTest, LatestNamesTheStep) {
  stdfs::copy(kValidDeepSpeed + "zero3/global_step2", directory_ / "best");
  write("latest", "best\n");
  EXPECT_EQ(open(directory_.path())->contents().world_size, 3);
  write("latest", "global_step2");
  EXPECT_EQ(open(directory_.path())->contents().world_size, 2);
}

// Shows F2.
TEST_F(DeepSpeedFolderTest, ATagOfAnyNameIsFoundByDeepSpeedsScript) {
  stdfs::rename(directory_ / "global_step2", directory_ / "epoch-3");
  write("latest", "epoch-3");
  EXPECT_THAT([&] { open(directory_.path()); }, ThrowsError(ErrorKind::unsupported, "epoch-3"));
  write("zero_to_fp32.py", "");
  expect_holds(*open(directory_.path()), kValidDeepSpeed + "zero1.expect.json");
}

// Shows F2.
TEST_F(DeepSpeedFolderTest, WithoutZeroTheFileOfTheModelIsTheCheckpoint) {
  for (const int rank : {0, 1}) {
    stdfs::remove(directory_ / ("global_step2/zero_pp_rank_" + std::to_string(rank) +
                                "_mp_rank_00_optim_states.pt"));
  }
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::unsupported, "give the path of mp_rank_00_model_states.pt"));
}

// Shows F2. The model states show that the run used ZeRO, so files of ZeRO are missing. One file of
// a pipeline is not the whole model, so the message does not advise to open it.
TEST_F(DeepSpeedFolderTest, APipelineWhoseOptimizerStatesAreMissingIsRefused) {
  for (const int rank : {0, 1}) {
    stdfs::remove(directory_ / ("global_step2/zero_pp_rank_" + std::to_string(rank) +
                                "_mp_rank_00_optim_states.pt"));
  }
  write("global_step2/layer_00-model_states.pt", "x");
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption,
                          "mp_rank_00_model_states.pt: files of ranks: expected optimizer states "
                          "of ZeRO, *_optim_states.pt, found none"));
}

// Shows F2.
TEST_F(DeepSpeedFolderTest, TwoFilesOfOneRankAreRefused) {
  const std::string step = directory_ / "global_step2/";
  stdfs::copy(step + "zero_pp_rank_1_mp_rank_00_optim_states.pt",
              step + "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt");
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::unsupported, "expected one file of rank 1"));
}

// Shows F2, E3. The optimizer was on NVMe.
TEST_F(DeepSpeedFolderTest, SwapFilesAreRefusedByTheirFolder) {
  stdfs::create_directories(directory_ / "global_step2/offloaded_tensors/rank0");
  write("global_step2/offloaded_tensors/rank0/140230.tensor.swp", "x");
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::unsupported,
                          "global_step2/offloaded_tensors: offloaded optimizer: expected fp32"));
}

// Shows F2. The shapes, ranks and steps of both runs are equal.
TEST_F(DeepSpeedFolderTest, TheModelOfARunWithAnotherConfigurationIsRefused) {
  const std::string name = "global_step2/mp_rank_00_model_states.pt";
  stdfs::copy(kValidDeepSpeed + "zero2_cpu_adam/" + name, directory_ / name,
              stdfs::copy_options::overwrite_existing);
  EXPECT_THAT([&] { open(directory_.path()); },
              ThrowsError(ErrorKind::corruption,
                          "ds_config.zero_optimization.stage: expected 2, as in "
                          "mp_rank_00_model_states.pt, found 1"));
}

// Shows F2, E13. Each rank of stage 3 has model states with values of its own.
TEST_F(DeepSpeedFolderTest, MissingModelStatesOfARankOfStage3AreNamed) {
  for (const int last : {2, 1}) {
    stdfs::remove_all(directory_ / "global_step2");
    stdfs::copy(kValidDeepSpeed + "zero3/global_step2", directory_ / "global_step2");
    for (int rank = last; rank < 3; ++rank) {
      stdfs::remove(directory_ / ("global_step2/zero_pp_rank_" + std::to_string(rank) +
                                  "_mp_rank_00_model_states.pt"));
    }
    EXPECT_THAT([&] { open(directory_.path()); },
                ThrowsError(ErrorKind::corruption,
                            "global_step2: files of ranks: expected model states of ranks 0 to 2, "
                            "found none of rank " +
                                std::to_string(last)));
  }
}

// Shows F2, E4.
TEST_F(DeepSpeedFolderTest, ItsFilesAreThoseOfDeepSpeed) {
  write("global_step2/config.json", "{}");
  const std::string step = directory_ / "global_step2";
  const FileSystem& fs = FileSystem::posix();
  const FormatDriver& driver = driver_of(Format("deepspeed"));
  EXPECT_EQ(driver.own_files(fs, step, fs.list_directory(step), {}).size(), 3u);
  EXPECT_THAT(driver.own_files(fs, directory_.path(), fs.list_directory(directory_.path()), {}),
              ElementsAre("global_step2", "latest"));
  EXPECT_TRUE(driver.is_one_of_several(fs, step + "/zero_pp_rank_1_mp_rank_00_optim_states.pt"));
  EXPECT_EQ(open(step)->data_files().size(), 3u);
}

}  // namespace
}  // namespace tessera::formats
