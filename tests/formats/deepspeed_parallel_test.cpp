#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <string>

#include "formats/deepspeed.h"
#include "support/contents_text.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fixtures.h"
#include "support/reading.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
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

const std::string kValidParallel = test::fixture("deepspeed/valid/");
const std::string kInvalidParallel = test::fixture("deepspeed/invalid/");

// Shows F2.
TEST(DeepSpeedParallelTest, HoldsWhatTheTrainerHeld) {
  for (const char* const name :
       {"pipeline", "pipeline_bf16", "pipeline_without_zero", "tensor", "tensor_pipeline", "autotp",
        "pipeline_fp32_without_zero", "autotp_zero3", "universal_tensor_pipeline",
        "universal_autotp", "universal_autotp_zero3"}) {
    SCOPED_TRACE(name);
    const auto reader = open(kValidParallel + name);
    EXPECT_EQ(reader->format(), Format("deepspeed"));
    expect_holds(*reader, kValidParallel + name + ".expect.json");
  }
}

// Shows F2, A4. Ranks are numbered as in DeepSpeed: the tensor rank changes fastest, then the data
// rank, then the stage.
TEST(DeepSpeedParallelTest, EveryElementIsInThePieceOfItsRank) {
  const auto pipeline = open(kValidParallel + "pipeline");
  EXPECT_EQ(pipeline->contents().world_size, 4);
  EXPECT_EQ(pieces_of(*pipeline, "model.3.gate_up"), "flat[0:84] on 2, flat[84:96] on 3");
  const auto tensor = open(kValidParallel + "tensor_pipeline");
  EXPECT_EQ(tensor->contents().world_size, 8);
  for (const TensorEntry& entry : tensor->contents().tensors) {
    std::vector<Region> regions;
    for (const Piece& piece : entry.pieces) regions.push_back(piece.region);
    EXPECT_TRUE(check_coverage(regions, entry.meta.shape).empty()) << entry.meta.fqn;
  }
  EXPECT_EQ(pieces_of(*tensor, "model.3.down"), "[0:6, 0:4] on 6, [0:6, 4:8] on 7");
}

// Shows F2. In a universal checkpoint, only frozen parameters are cut among ranks.
TEST(DeepSpeedParallelTest, RanksOfPiecesAreBelowTheWorldSize) {
  const auto reader = open(kValidParallel + "universal_autotp_zero3");
  EXPECT_EQ(reader->contents().world_size, 4);
  for (const TensorEntry& tensor : reader->contents().tensors) {
    for (const Piece& piece : tensor.pieces) EXPECT_LT(piece.rank, 4) << tensor.meta.fqn;
  }
}

// Shows F2, E13.
TEST(DeepSpeedParallelTest, SaysWhatItLeavesOut) {
  EXPECT_THAT(notes_of(*open(kValidParallel + "pipeline")), ElementsAre());
  EXPECT_THAT(notes_of(*open(kValidParallel + "tensor")),
              ElementsAre(HasSubstr("padding: 1 name with more rows"),
                          HasSubstr("2 names without a rule, but equal on all tensor ranks"),
                          HasSubstr("such as 'model.1.seen'")));
}

// Shows F2, E13. ds_to_universal.py copies no files of layers, which have the buffers.
TEST(DeepSpeedParallelTest, SaysWhatAUniversalCheckpointOfAPipelineLacks) {
  EXPECT_THAT(notes_of(*open(kValidParallel + "universal_tensor_pipeline")),
              ElementsAre(HasSubstr("21 files with other rules for tensor parallelism"),
                          HasSubstr("4 buffers and all frozen parameters are missing")));
  EXPECT_THAT(notes_of(*open(kValidParallel + "universal_autotp")),
              ElementsAre(HasSubstr("12 names also in 'module'"),
                          HasSubstr("3 files with other rules for tensor parallelism"),
                          HasSubstr("16 names whose copies were not compared")));
}

// Shows F2, E3.
TEST(DeepSpeedParallelTest, RefusesAUniversalCheckpointWithoutTheFilesOfAllModelRanks) {
  const std::string name = "universal_tensor_pipeline";
  for (const auto& [removed, words] : std::map<std::string, std::string>{
           {"mp_rank_03", "2 stages of 2 tensor ranks"}, {"mp_rank_01", "none of rank 1"}}) {
    SCOPED_TRACE(removed);
    const test::TemporaryDirectory directory;
    stdfs::copy(kValidParallel + name, directory.path(), stdfs::copy_options::recursive);
    stdfs::remove(directory / ("global_step2_universal/" + removed + "_model_states.pt"));
    EXPECT_THAT([&] { open(directory / "global_step2_universal"); },
                ThrowsError(ErrorKind::corruption, words));
  }
}

// Shows F2, E3. In ZeRO stage 3 each rank has model states.
TEST(DeepSpeedParallelTest, RefusesStage3WithoutTheFilesOfAllRanks) {
  for (const auto& [removed, words] : std::map<std::string, std::string>{
           {"zero_pp_rank_1_mp_rank_01_model_states.pt", "1 for mp_rank 1"},
           {"zero_pp_rank_0_mp_rank_01_model_states.pt", "none of rank 0"},
           {"bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt", "1 for mp_rank 1"}}) {
    SCOPED_TRACE(removed);
    const test::TemporaryDirectory directory;
    stdfs::copy(kValidParallel + "autotp_zero3/global_step2", directory.path(),
                stdfs::copy_options::recursive);
    stdfs::remove(directory / removed);
    EXPECT_THAT([&] { open(directory.path()); }, ThrowsError(ErrorKind::corruption, words));
  }
}

// Shows F2, E3.
TEST(DeepSpeedParallelTest, RefusesAModelRankThatIsTooLarge) {
  const std::string name = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt";
  const test::TemporaryDirectory directory;
  stdfs::copy(kValidParallel + "autotp_zero3/global_step2", directory.path(),
              stdfs::copy_options::recursive);
  stdfs::copy(directory / name, directory / "bf16_zero_pp_rank_0_mp_rank_1048576_optim_states.pt");
  EXPECT_THAT([&] { open(directory.path()); },
              ThrowsError(ErrorKind::corruption, "expected a rank below 2^20"));
}

// Shows F2, E3. Without ZeRO no file names the parameters of the optimizer.
TEST(DeepSpeedParallelTest, ReadsNoOptimizerWithoutNames) {
  const auto reader = open(kValidParallel + "pipeline_fp32_without_zero");
  const auto& values = reader->contents().values;
  const auto optimizer = std::ranges::find(values, "optim", &ValueEntry::name);
  ASSERT_NE(optimizer, values.end());
  EXPECT_THAT([&] { reader->read_value(static_cast<std::size_t>(optimizer - values.begin())); },
              ThrowsError(ErrorKind::unsupported, "names of the parameters"));
}

// Shows F2, E3.
TEST(DeepSpeedParallelTest, RefusesAPipelineWithoutZeroThatLacksFiles) {
  for (const auto& [removed, words] :
       std::map<std::string, std::string>{{"mp_rank_01_model_states.pt", "2 stages of 1 tensor"},
                                          {"mp_rank_00_model_states.pt", "none of rank 0"},
                                          {"layer_03-model_states.pt", "a file of layer 3"}}) {
    SCOPED_TRACE(removed);
    const test::TemporaryDirectory directory;
    stdfs::copy(kValidParallel + "pipeline_fp32_without_zero/global_step2", directory.path());
    stdfs::remove(directory / removed);
    EXPECT_THAT([&] { open(directory.path()); }, ThrowsError(ErrorKind::corruption, words));
  }
  const test::TemporaryDirectory directory;
  stdfs::copy(kValidParallel + "pipeline/global_step2", directory.path());
  for (const char* const rank : {"0_mp_rank_00", "0_mp_rank_01", "1_mp_rank_00", "1_mp_rank_01"}) {
    stdfs::remove(directory / ("zero_pp_rank_" + std::string(rank) + "_optim_states.pt"));
  }
  EXPECT_THAT([&] { open(directory.path()); },
              ThrowsError(ErrorKind::corruption, "optimizer states of ZeRO"));
}

// Shows F2. Groups list the parameters of all stages; those of a shared module only once.
TEST(DeepSpeedParallelTest, GroupsHaveTheParametersOfAllStages) {
  const auto reader = open(kValidParallel + "pipeline");
  const auto& values = reader->contents().values;
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].name != "optim.param_groups.0.params") continue;
    EXPECT_EQ(value_to_string(reader->read_value(i)),
              "['tied_modules.embed.weight', '1.gate_up', '1.down', '1.qkv.weight', '3.gate_up', "
              "'3.down', '3.qkv.weight']");
    return;
  }
  ADD_FAILURE() << "no group";
}

struct ParallelRefusal {
  const char* fixture;
  ErrorKind kind;
  const char* message;  // the text after the path of the fixture
};

constexpr ParallelRefusal kParallelRefusals[] = {
    {"stage_missing", ErrorKind::corruption,
     ": files of ranks: expected model states of 2 stages of 1 tensor ranks, found model states of "
     "1 "
     "mp_ranks (not copied from all hosts?)"},
    {"stage_optimizer_missing", ErrorKind::corruption,
     ": files of ranks: expected optimizer states and model states of mp_rank 1, found no "
     "optimizer states"},
    {"stage_rank_missing", ErrorKind::corruption,
     ": files of ranks: expected optimizer states of mp_rank 1 of ranks 0 to 1, found none of rank "
     "0"},
    {"stage_other_run", ErrorKind::corruption,
     "/zero_pp_rank_0_mp_rank_01_optim_states.pt: "
     "optimizer_state_dict.base_optimizer_state.param_groups.0.lr: expected 0.01, as in "
     "zero_pp_rank_0_mp_rank_00_optim_states.pt, found 0.5"},
    {"layer_missing", ErrorKind::corruption,
     ": 3.down: files of layers: expected a file of layer 3 of tensor rank 0, found none"},
    {"layer_shape", ErrorKind::corruption,
     "/layer_03-model_states.pt: 3.down: param_shapes: expected [6, 8], found [2, 2]"},
    {"tensor_without_rules", ErrorKind::unsupported,
     "/mp_rank_00_model_states.pt: tensor parallelism: expected 'universal_checkpoint_info', which "
     "says how each parameter is cut, found none"},
    {"tensor_names_differ", ErrorKind::corruption,
     "/mp_rank_01_model_states.pt: 3.other: param_shapes: expected 3.qkv.weight, as in "
     "mp_rank_00_model_states.pt, found 3.other"},
};

// Shows F2, E7.
TEST(DeepSpeedParallelTest, SaysWhatIsWrong) {
  for (const ParallelRefusal& refusal : kParallelRefusals) {
    SCOPED_TRACE(refusal.fixture);
    const std::string path = kInvalidParallel + refusal.fixture;
    EXPECT_THAT([&] { open(path); }, ThrowsError(refusal.kind, path + refusal.message));
  }
}

// Shows F2. Without this error, the layer's buffers and frozen parameters would be lost silently.
TEST(DeepSpeedParallelTest, AMissingLayerIsMissed) {
  const test::TemporaryDirectory directory;
  stdfs::copy(kValidParallel + "tensor/global_step2", directory.path(),
              stdfs::copy_options::recursive);
  stdfs::remove(directory / "layer_01-model_01-model_states.pt");
  EXPECT_THAT([&] { open(directory.path()); },
              ThrowsError(ErrorKind::corruption, "a file of layer 1 of tensor rank 1"));
}

}  // namespace
}  // namespace tessera::formats
