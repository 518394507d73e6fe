#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "reshard/optimizer_numbers.h"
#include "support/contents_text.h"
#include "support/error_matchers.h"
#include "support/expectation.h"
#include "support/fixtures.h"
#include "support/memory_checkpoint.h"
#include "support/temporary_directory.h"
#include "tessera/formats/create.h"
#include "tessera/formats/detect.h"
#include "tessera/reshard/executor.h"
#include "tessera/reshard/planner.h"

// Moves to a file of torch.save for each rank.
namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::DeviceMeshOptions;
using formats::Format;
using formats::KeyPath;
using test::pieces_of;
using test::ThrowsError;
using testing::ElementsAre;

const std::string kValid = test::fixture("rank_files/valid/");

std::unique_ptr<CheckpointReader> open(const std::string& path) {
  return formats::open_checkpoint(FileSystem::posix(), path);
}

class RankFilesMoveTest : public testing::Test {
 protected:
  /// Moves a checkpoint, and opens the result.
  std::unique_ptr<CheckpointReader> move(const CheckpointReader& source, PlanOptions options) {
    options.format = Format("rank_files");
    const Plan plan = plan_reshard(source.contents(), source.path(), options);
    EXPECT_THAT(plan.problems, testing::IsEmpty());
    std::vector<Value> values;
    for (const std::size_t i : plan.value_sources) values.push_back(source.read_value(i));
    const std::string path = directory_ / std::to_string(num_moves_++);
    const auto writer = formats::create_checkpoint(FileSystem::posix(), path, plan.destination,
                                                   std::move(values), {.format = options.format});
    execute(plan, source, *writer, {.num_threads = 2});
    writer->commit();
    return open(path);
  }

  test::TemporaryDirectory directory_;
  int num_moves_ = 0;
};

// Shows F1, A2.
TEST_F(RankFilesMoveTest, AnyNumberOfRanksHoldsWhatTheTrainerHeld) {
  for (const char* const name : {"fsdp2", "fsdp2_hybrid", "fsdp2_tp"}) {
    const auto source = open(kValid + name);
    for (const int num_ranks : {0, 1, 2, 4, 7}) {
      SCOPED_TRACE(name + (" on " + std::to_string(num_ranks)));
      const auto moved = move(*source, {.world_size = num_ranks});
      EXPECT_EQ(moved->contents().world_size,
                num_ranks == 0 ? source->contents().world_size : num_ranks);
      test::expect_holds(*moved, kValid + name + ".expect.json");
    }
  }
}

// Shows F1.
TEST_F(RankFilesMoveTest, FilesAreNamedAsVerlNamesThem) {
  const auto moved = move(*open(kValid + "fsdp2"), {.world_size = 3});
  EXPECT_EQ(FileSystem::posix().list_directory(moved->path()),
            FileSystem::posix().list_directory(kValid + "fsdp2"));
}

// Shows F1.
TEST_F(RankFilesMoveTest, ParametersAreCutAndBuffersAreNot) {
  const auto moved = move(*open(kValid + "fsdp2"), {.world_size = 2});
  EXPECT_EQ(pieces_of(*moved, "model.up.bias"), "[0:5] on 0, [5:10] on 1");
  EXPECT_EQ(pieces_of(*moved, "model.scale"), "[0:1] on 0");
  EXPECT_EQ(pieces_of(*moved, "model.norm.running_mean"), "[0:6] on 0, [0:6] on 1");
  EXPECT_EQ(pieces_of(*moved, "optim.state.0.step"), "[] on 0, [] on 1");
}

// Shows F1.
TEST_F(RankFilesMoveTest, EachRankGetsWhatItHadForItself) {
  const auto moved = move(*open(kValid + "fsdp2"), {.world_size = 3});
  EXPECT_EQ(pieces_of(*moved, "extra_state.rng.cpu"), "[0:4] on 0");
  EXPECT_EQ(pieces_of(*moved, "per_rank.2.extra_state.rng.cpu"), "[0:4] on 2");
  const auto fewer = move(*open(kValid + "fsdp2"), {.world_size = 2});
  EXPECT_TRUE(FileSystem::posix().kind_of(fewer->path() + "/world_size_2_rank_0.pt"));
}

// Shows F1. A source on one rank has no cut tensors, so it does not show which ones to cut.
TEST_F(RankFilesMoveTest, OtherStateOfOneRankIsWholeOnEachRank) {
  test::MemoryCheckpoint source("source");
  source.add({"generator", DType::uint8, {4}}, test::bytes_of<std::uint8_t>({1, 2, 3, 4}));
  source.add({"model.w", DType::float32, {3}}, test::bytes_of<float>({1, 2, 3}));
  const auto moved =
      move(source, {.world_size = 2, .renames = {{"generator", "extra_state.rng.cpu"}}});
  EXPECT_EQ(pieces_of(*moved, "extra_state.rng.cpu"), "[0:4] on 0, [0:4] on 1");
  EXPECT_EQ(pieces_of(*moved, "model.w"), "[0:2] on 0, [2:3] on 1");
}

/// Returns what the notes of a move with this rule found, each after the name that it is about.
std::vector<std::string> notes_of(const CheckpointReader& source, const std::string& rule,
                                  PlanOptions options) {
  options.format = Format("rank_files");
  std::vector<std::string> found;
  for (const auto& note : plan_reshard(source.contents(), source.path(), options).notes) {
    if (note.rule == rule) found.push_back(note.where.fqn + ": " + note.found);
  }
  return found;
}

/// Returns the names of tensors with dimensions and without elements of their own on rank 1.
std::vector<std::string> names_of_uncut(const CheckpointReader& moved) {
  std::vector<std::string> names;
  for (const formats::TensorEntry& tensor : moved.contents().tensors) {
    const bool is_whole = std::ranges::all_of(tensor.pieces, [&](const formats::Piece& piece) {
      return numel_of(piece.region) == tensor.meta.numel();
    });
    if (!tensor.meta.shape.empty() && tensor.meta.numel() > 1 && is_whole) {
      names.push_back(tensor.meta.fqn);
    }
  }
  return names;
}

// Shows F1, F2. ZeRO 2 cuts one vector of all parameters, so many parameters are whole on one rank.
TEST_F(RankFilesMoveTest, ParametersThatZeroHasOnOneRankAreCut) {
  for (const char* const name : {"zero1", "zero2_cpu_adam", "zero3"}) {
    SCOPED_TRACE(name);
    const auto source = open(test::fixture("deepspeed/valid/") + name);
    for (const int num_ranks : {2, 3}) {
      const auto moved = move(*source, {.world_size = num_ranks});
      EXPECT_THAT(names_of_uncut(*moved), ElementsAre("model.seen", "sampler.generator"));
    }
  }
}

// Shows F1, F2. FSDP1 keeps flat state under numbers; state that had a name is not of FSDP1.
TEST_F(RankFilesMoveTest, NumberedStateIsCutAsItsParameterIs) {
  const auto source =
      number_optimizer_params(open(test::fixture("deepspeed/valid/zero3")), NameSelection());
  for (const int num_ranks : {2, 3}) {
    const auto moved = move(*source, {.world_size = num_ranks});
    EXPECT_THAT(names_of_uncut(*moved), ElementsAre("model.seen", "sampler.generator"));
    std::size_t num_compared = 0;
    for (const formats::TensorEntry& tensor : source->contents().tensors) {
      if (tensor.parameter.empty() || tensor.meta.shape.empty()) continue;
      EXPECT_EQ(pieces_of(*moved, tensor.meta.fqn), pieces_of(*moved, tensor.parameter));
      ++num_compared;
    }
    EXPECT_EQ(num_compared, 14U);
    for (const std::string& note : notes_of(*source, "ranks", {.world_size = num_ranks})) {
      EXPECT_THAT(note, testing::Not(testing::HasSubstr("FSDP1")));
    }
  }
}

// Shows F1. Tensor parallelism cuts matrices only, and pipeline stages have whole parameters.
TEST_F(RankFilesMoveTest, OptimizerStateTellsParametersFromBuffers) {
  test::MemoryCheckpoint source("source", 2);
  const auto add = [&](const std::string& name, std::vector<formats::Piece> pieces) {
    source.add({name, DType::float32, {4}}, test::bytes_of<float>({1, 2, 3, 4}), std::move(pieces));
  };
  const Box all{{0}, {4}};
  add("model.bias", {{all, 1}});
  add("model.buffer", {{all, 0}});
  add("model.w", {{Box{{0}, {1}}, 0}, {Box{{1}, {3}}, 1}});
  EXPECT_THAT(names_of_uncut(*move(source, {})), ElementsAre("model.bias", "model.buffer"));
  EXPECT_THAT(
      notes_of(source, "buffers", {}),
      ElementsAre(testing::StartsWith("model.bias: 2 tensors without such state that the "
                                      "source does not cut, so they are taken for buffers")));
  add("optim.state.bias.exp_avg", {{all, 1}});
  const auto moved = move(source, {});
  EXPECT_THAT(names_of_uncut(*moved), ElementsAre("model.buffer"));
  EXPECT_EQ(pieces_of(*moved, "optim.state.bias.exp_avg"), "[0:2] on 0, [2:4] on 1");
  EXPECT_THAT(notes_of(source, "buffers", {}),
              ElementsAre(testing::StartsWith("model.buffer: 1 tensor without such state")));
  EXPECT_THAT(notes_of(source, "buffers", {.world_size = 2, .strategy = "replicated"}),
              testing::IsEmpty());
  EXPECT_THAT(notes_of(*open(kValid + "fsdp2"), "buffers", {.world_size = 2}), testing::IsEmpty());
}

// Shows F1. One rank has all of every tensor, so only the state shows which are parameters.
TEST_F(RankFilesMoveTest, TensorsOfOneRankThatMayBeBuffersAreNoted) {
  test::MemoryCheckpoint source("source", 1);
  const auto add = [&](const std::string& name, const Shape& shape) {
    const auto numel = static_cast<std::size_t>(numel_of(shape));
    source.add({name, DType::float32, shape}, test::bytes_of<float>(std::vector<float>(numel)));
  };
  add("model.norm.running_mean", {4});
  add("model.norm.num_batches", {});
  add("model.norm.weight", {4});
  add("model.norm.bias", {4});  // frozen
  EXPECT_THAT(notes_of(source, "buffers", {.world_size = 2}), testing::IsEmpty());
  add("optim.state.norm.weight.exp_avg", {4});
  for (const int num_ranks : {1, 2}) {
    EXPECT_THAT(notes_of(source, "buffers", {.world_size = num_ranks}),
                ElementsAre(testing::StartsWith("model.norm.running_mean: 1 tensor without such "
                                                "state; it is taken for a parameter")));
  }
  EXPECT_THAT(notes_of(source, "buffers", {.world_size = 2, .strategy = "replicated"}),
              testing::IsEmpty());
}

// Shows F1.
TEST_F(RankFilesMoveTest, RanksWithoutValuesOfTheirOwnAreNoted) {
  const auto source = open(kValid + "fsdp2");
  const int num_ranks = source->contents().world_size;
  const std::string found = ": ranks from " + std::to_string(num_ranks) + " on get the values of";
  const auto is_it = testing::HasSubstr(found);
  EXPECT_THAT(notes_of(*source, "ranks", {.world_size = num_ranks + 1}), testing::Contains(is_it));
  EXPECT_THAT(notes_of(*source, "ranks", {.world_size = num_ranks}),
              testing::Not(testing::Contains(is_it)));
}

// Shows F1. In the files, such entries could not be told from the ranks' own values.
TEST_F(RankFilesMoveTest, ADictPerRankWithNumbersAsKeysIsRefused) {
  test::MemoryCheckpoint source("source");
  source.add_value("rng", Value(5)).key_path = {"rng"};
  source.add_value("per_rank.0.rng", Value(7)).key_path = {"per_rank", formats::NonStringKey{"0"},
                                                           "rng"};
  PlanOptions options{.format = Format("rank_files"), .world_size = 2};
  const Plan plan = plan_reshard(source.contents(), source.path(), options);
  ASSERT_EQ(plan.problems.size(), 1U);
  EXPECT_EQ(plan.problems[0].where.fqn, "per_rank.0.rng");
  EXPECT_THAT(plan.problems[0].found, testing::HasSubstr("rename 'per_rank.'"));
  options.renames = {{"per_rank.", "ranks."}};
  EXPECT_THAT(plan_reshard(source.contents(), source.path(), options).problems, testing::IsEmpty());
}

/// A checkpoint without cut tensors. Two of its ranks have random generators of their own.
test::MemoryCheckpoint with_own_generators() {
  test::MemoryCheckpoint source("source");
  source.add({"extra_state.rng", DType::float32, {1}}, test::bytes_of<float>({100}));
  source.add({"model.w", DType::float32, {3}}, test::bytes_of<float>({1, 2, 3}));
  source.add({"per_rank.1.extra_state.rng", DType::float32, {1}}, test::bytes_of<float>({101}));
  source.add({"per_rank.2.extra_state.rng", DType::float32, {2}},
             test::bytes_of<float>({102, 103}));
  return source;
}

// Shows F1.
TEST_F(RankFilesMoveTest, NoStrategyCutsWhatARankHadForItself) {
  const test::MemoryCheckpoint source = with_own_generators();
  for (const char* const strategy : {"", "dim0", "replicated", "hybrid:2x2"}) {
    SCOPED_TRACE(strategy);
    const auto moved = move(source, {.world_size = 4, .strategy = strategy});
    EXPECT_EQ(pieces_of(*moved, "extra_state.rng"), "[0:1] on 0, [0:1] on 3");
    EXPECT_EQ(pieces_of(*moved, "per_rank.1.extra_state.rng"), "[0:1] on 1");
    EXPECT_EQ(pieces_of(*moved, "per_rank.2.extra_state.rng"), "[0:2] on 2");
    const auto& tensors = moved->contents().tensors;
    const auto index = moved->contents().find_tensor("per_rank.2.extra_state.rng") - tensors.data();
    EXPECT_EQ(test::whole_tensor(*moved, static_cast<std::size_t>(index)),
              test::bytes_of<float>({102, 103}));
  }
}

// Shows F1.
TEST_F(RankFilesMoveTest, WhatNoRankGetsForItselfIsNoted) {
  const test::MemoryCheckpoint source = with_own_generators();
  const auto notes = [&](PlanOptions options) {
    options.format = Format("rank_files");
    std::vector<std::string> lines;
    for (const auto& note : plan_reshard(source.contents(), source.path(), options).notes) {
      if (note.rule == "ranks") lines.push_back(note.where.fqn + ": " + note.found);
    }
    return lines;
  };
  const std::string text =
      "not both, so the entry keeps its own name and is no longer that of one rank";
  EXPECT_THAT(notes({.world_size = 3}), testing::IsEmpty());
  EXPECT_THAT(notes({.world_size = 2}), ElementsAre("per_rank.2.extra_state.rng: " + text));
  PlanOptions renamed{.world_size = 3};
  renamed.renames = {{"extra_state.rng", "extra_state.seed"}};
  EXPECT_THAT(notes(renamed), testing::IsEmpty());  // per_rank entries are renamed too
  renamed.renames.insert(renamed.renames.begin(), {"per_rank.", "per_rank."});
  EXPECT_THAT(notes(renamed), ElementsAre("per_rank.1.extra_state.rng: " + text + " (and 1 more)"));
}

// Shows F1.
TEST_F(RankFilesMoveTest, ARenameOfEntriesOfRanksAloneFitsANameThatIsMoved) {
  const test::MemoryCheckpoint source = with_own_generators();
  const PlanOptions options{.only = NameSelection({"per_rank.1.*"}),
                            .renames = {{"extra_state.rng", "extra_state.seed"}}};
  const Plan plan = plan_reshard(source.contents(), source.path(), options);
  EXPECT_NE(plan.destination.find_tensor("per_rank.1.extra_state.seed"), nullptr);
}

// Shows F1.
TEST_F(RankFilesMoveTest, ARenameThatBeginsLikePerRankKeepsTheEntriesOfRanks) {
  test::MemoryCheckpoint source = with_own_generators();
  source.add({"pe.w", DType::float32, {2}}, test::bytes_of<float>({1, 2}));
  source.add({"per_rank.1.model.v", DType::float32, {1}}, test::bytes_of<float>({1}));
  auto& state =
      source.add({"per_rank.1.optim.state.v.sum", DType::float32, {1}}, test::bytes_of<float>({1}));
  state.kind = formats::StateKind::pointwise;
  state.parameter = "per_rank.1.model.v";
  const PlanOptions options{.renames = {{"pe", "pos"}, {"model.", "net."}}};
  const Plan plan = plan_reshard(source.contents(), source.path(), options);
  EXPECT_NE(plan.destination.find_tensor("pos.w"), nullptr);
  EXPECT_NE(plan.destination.find_tensor("per_rank.1.extra_state.rng"), nullptr);
  const auto* const moved = plan.destination.find_tensor("per_rank.1.optim.state.v.sum");
  ASSERT_NE(moved, nullptr);
  EXPECT_EQ(moved->parameter, "per_rank.1.net.v");
}

/// A checkpoint of two ranks: rank 1 has a list where rank 0 has the dict `m`.
test::MemoryCheckpoint with_list_for_dict() {
  test::MemoryCheckpoint source("src", 2);
  source.add_value("m.s", 3).key_path = {"m", "s"};
  source.add_value("m.t.u", 4).key_path = {"m", "t", "u"};
  source.add_value("per_rank.1.m", Value::List{1}).key_path = {"per_rank", "1", "m"};
  return source;
}

TEST_F(RankFilesMoveTest, ARenameOfADictRenamesWhatARankHasInItsPlace) {
  const auto plan = [](std::vector<Rename> renames) {
    return plan_reshard(with_list_for_dict().contents(), "src",
                        {.format = Format::native, .renames = std::move(renames)});
  };
  const Plan renamed = plan({{"m.", "n."}});
  const auto& values = renamed.destination.values;
  ASSERT_EQ(values.size(), 3U);
  EXPECT_EQ(values.back().name, "per_rank.1.n");
  EXPECT_EQ(KeyPath(values.back().key_path), (KeyPath{"per_rank", "1", "n"}));
  EXPECT_THAT(renamed.notes, testing::IsEmpty());
  for (const Rename& rename : {Rename{"m.", ""}, Rename{"m.", "n_"}, Rename{"m.t.", "n."}}) {
    SCOPED_TRACE(rename.to);
    const Plan partly = plan({rename});
    std::vector<std::string> names;
    for (const auto& value : partly.destination.values) names.push_back(value.name);
    EXPECT_THAT(names, testing::Contains("per_rank.1.m"));
    ASSERT_EQ(partly.notes.size(), 1U);
    EXPECT_EQ(partly.notes.front().where.fqn, "per_rank.1.m");
    EXPECT_EQ(partly.notes.front().found, "one entry, which keeps its name");
  }
}

TEST_F(RankFilesMoveTest, ARenameThatChangesNoNameIsRefused) {
  const test::MemoryCheckpoint source = with_own_generators();
  const auto plan = [&](const Rename& rename) {
    return plan_reshard(source.contents(), source.path(), {.renames = {rename}});
  };
  EXPECT_THAT(
      [&] {
        plan({"pe", "pos"});
      },
      ThrowsError(ErrorKind::invalid_argument, "a rule that fits a name that is moved"));
  EXPECT_NO_THROW(plan({"per_rank.1", "of_one"}));
}

TEST_F(RankFilesMoveTest, OptimizerNamesAndRenamesApplyToTheStateOfRanks) {
  const std::string table = "model.ebc.embedding_bags.t.weight";
  const std::string state = "optim.state.ebc.embedding_bags.t.weight.";
  test::MemoryCheckpoint source("src", 2);
  source.add({table, DType::float32, {4, 2}}, test::Bytes(32));
  source.add({state + "t.momentum1", DType::float32, {4}}, test::Bytes(16)).key_path = {
      "optim", "state", "ebc.embedding_bags.t.weight", "t.momentum1"};
  source.add({"per_rank.1." + state + "t.momentum1", DType::float32, {4}}, test::Bytes(16))
      .key_path = {"per_rank", "1", "optim", "state", "ebc.embedding_bags.t.weight", "t.momentum1"};
  source.add({"pe.w", DType::float32, {1}}, test::Bytes(4));
  source.add_value("optim.param_groups", Value::List{});
  const auto plan = [&](const Rename& rename) {
    return plan_reshard(source.contents(), source.path(),
                        {.optimizer_names = OptimizerNames::canonical, .renames = {rename}});
  };
  EXPECT_NE(plan({"", "run."}).destination.find_tensor("per_rank.1.run." + state + "row_sum"),
            nullptr);
  EXPECT_NE(plan({"pe", "pos"}).destination.find_tensor("per_rank.1." + state + "row_sum"),
            nullptr);
  const Plan renamed = plan({"optim.", "opt."});
  const auto* const of_rank =
      renamed.destination.find_tensor("per_rank.1.opt.state.ebc.embedding_bags.t.weight.row_sum");
  ASSERT_NE(of_rank, nullptr);
  EXPECT_EQ(KeyPath(of_rank->key_path),
            (KeyPath{"per_rank", "1", "opt", "state", "ebc.embedding_bags.t.weight", "row_sum"}));
}

TEST_F(RankFilesMoveTest, AnAliasBringsNoTensorsOfRanksThatPatternsLeaveOut) {
  test::MemoryCheckpoint source("src", 2);
  source.add({"embed", DType::float32, {1}}, test::Bytes(4));
  source.add({"per_rank.1.embed", DType::float32, {1}}, test::Bytes(4));
  source.add_alias("head", "embed");
  const auto moved = [&](std::vector<std::string> patterns, const char* format) {
    std::vector<std::string> names;
    const PlanOptions options{.format = Format(format), .only = NameSelection(std::move(patterns))};
    for (const auto& tensor :
         plan_reshard(source.contents(), source.path(), options).destination.tensors) {
      names.push_back(tensor.meta.fqn);
    }
    return names;
  };
  EXPECT_THAT(moved({"head", "!per_rank"}, "native"), ElementsAre("head"));
  EXPECT_THAT(moved({"head"}, "native"), ElementsAre("head", "per_rank.1.head"));
  EXPECT_THAT(moved({"head"}, "torch"), ElementsAre("head"));
}

// Shows F1.
TEST_F(RankFilesMoveTest, APatternAlsoSelectsTheEntriesOfRanks) {
  const test::MemoryCheckpoint source = with_own_generators();
  Format format("rank_files");
  const auto moved = [&](std::vector<std::string> patterns) {
    std::vector<std::string> names;
    const PlanOptions options{.format = format, .only = NameSelection(std::move(patterns))};
    for (const auto& tensor :
         plan_reshard(source.contents(), source.path(), options).destination.tensors) {
      names.push_back(tensor.meta.fqn);
    }
    return names;
  };
  EXPECT_THAT(moved({"extra_state"}), ElementsAre("extra_state.rng", "per_rank.1.extra_state.rng",
                                                  "per_rank.2.extra_state.rng"));
  EXPECT_THAT(moved({"!extra_state"}), ElementsAre("model.w"));
  EXPECT_THAT(moved({"extra_state", "!per_rank.1"}),
              ElementsAre("extra_state.rng", "per_rank.2.extra_state.rng"));
  EXPECT_THAT(moved({"per_rank.1"}), ElementsAre("per_rank.1.extra_state.rng"));
  format = Format("deepspeed");
  EXPECT_THAT(moved({"extra_state"}), ElementsAre("extra_state.rng", "per_rank.1.extra_state.rng",
                                                  "per_rank.2.extra_state.rng"));
  format = Format("torch");
  EXPECT_THAT(moved({"extra_state"}), ElementsAre("extra_state.rng"));
  EXPECT_THAT(moved({"!extra_state"}), ElementsAre("model.w"));
}

// Shows F1.
TEST_F(RankFilesMoveTest, StrategiesBecomePlacements) {
  const auto source = open(kValid + "fsdp2");
  EXPECT_EQ(pieces_of(*move(*source, {.strategy = "hybrid:2x2"}), "model.up.bias"),
            "[0:5] on 0, [5:10] on 1, [0:5] on 2, [5:10] on 3");
  EXPECT_EQ(pieces_of(*move(*source, {.world_size = 2, .strategy = "dim1"}), "model.up.weight"),
            "[0:10, 0:3] on 0, [0:10, 3:6] on 1");
  EXPECT_EQ(pieces_of(*move(*source, {.world_size = 2, .strategy = "replicated"}), "model.up.bias"),
            "[0:10] on 0, [0:10] on 1");
}

/// Adds two numbers of state of parameter 0, as an optimizer keeps it.
void add_numbered_state(test::MemoryCheckpoint& source, const std::string& name,
                        const formats::KeyPath& path, const std::vector<float>& numbers) {
  source.add({name, DType::float32, {2}}, test::bytes_of(numbers)).key_path = path;
}

// Shows F1. As FSDP2 saves with one rank: numbers instead of names, and DTensors.
TEST_F(RankFilesMoveTest, OrdinaryTensorsBesideDTensorsStayOrdinary) {
  test::MemoryCheckpoint source("source", 1);
  for (const char* const name : {"model.mean", "model.weight"}) {
    source.add({name, DType::float32, {4}}, test::bytes_of<float>({1, 2, 3, 4}));
  }
  add_numbered_state(source, "optim.state.0.exp_avg",
                     {"optim", "state", formats::NonStringKey{"0"}, "exp_avg"}, {1, 2});
  EXPECT_THAT(names_of_uncut(*move(source, {.world_size = 2})), testing::IsEmpty());
  EXPECT_THAT(notes_of(source, "buffers", {.world_size = 2}),
              ElementsAre(testing::StartsWith("model.mean: 1 tensor without such state; it is")));
  using Kind = formats::Simplification::Kind;
  source.contents_for_change().simplifications = {{Kind::dtensor, "model.weight"},
                                                  {Kind::dtensor, "optim.state.0.exp_avg"}};
  EXPECT_THAT(names_of_uncut(*move(source, {.world_size = 2})), ElementsAre("model.mean"));
  EXPECT_THAT(notes_of(source, "buffers", {.world_size = 2}), testing::IsEmpty());
  EXPECT_THAT(notes_of(source, "buffers", {.world_size = 1}),
              ElementsAre(testing::StartsWith("model.mean: 1 tensor that is no DTensor")));
}

// Shows F1. Whole on each rank, such a vector is read as the ranks' parts of a flat parameter.
TEST_F(RankFilesMoveTest, AVectorOfNumberedStateComesBackAsItWas) {
  const formats::Key zero = formats::NonStringKey{"0"};
  test::MemoryCheckpoint source("source");
  source.add({"model.w", DType::float32, {4, 1}}, test::bytes_of<float>({1, 2, 3, 4}));
  add_numbered_state(source, "optim.state.0.exp_avg_sq_col",
                     {"optim", "state", zero, "exp_avg_sq_col"}, {5, 6});
  for (const char* const strategy : {"dim0", "dim1", "replicated", "hybrid:1x2", "hybrid:2x1"}) {
    SCOPED_TRACE(strategy);
    const auto moved = move(source, {.world_size = 2, .strategy = strategy});
    EXPECT_EQ(moved->contents().find_tensor("optim.state.0.exp_avg_sq_col")->meta.shape, Shape{2});
  }
}

// Shows F1. FSDP1 loads ordinary vectors with each rank's own range of a flat parameter.
TEST_F(RankFilesMoveTest, FlatStateOfFsdp1StaysFlatForAsManyRanks) {
  const auto source = open(kValid + "fsdp1");
  const auto flat_of = [&](const CheckpointReader& reader) {
    std::vector<std::string> lines;
    for (const formats::TensorEntry& tensor : reader.contents().tensors) {
      for (const formats::Piece& piece : tensor.pieces) {
        if (!std::holds_alternative<FlatRange>(piece.region)) continue;
        lines.push_back(pieces_of(reader, tensor.meta.fqn));
      }
    }
    return lines;
  };
  const auto moved = move(*source, {});
  EXPECT_THAT(flat_of(*source), testing::Not(testing::IsEmpty()));
  EXPECT_EQ(flat_of(*moved), flat_of(*source));
  test::expect_holds(*moved, kValid + "fsdp1.expect.json");
  const auto note_of = [&](const PlanOptions& options) {
    std::string found;
    for (const auto& note : plan_reshard(source->contents(), source->path(), options).notes) {
      if (note.expected.ends_with("whose ranges of flat parameters FSDP1 loads"))
        found = note.found;
    }
    return found;
  };
  EXPECT_EQ(note_of({.format = Format("rank_files")}), "");
  EXPECT_THAT(
      note_of({.format = Format("rank_files"), .world_size = 3}),
      testing::EndsWith("vectors of optimizer state that are whole or cut in another way, "
                        "for 3 ranks, which FSDP1 cannot load (move without the optimizer)"));
}

// Shows F1.
TEST_F(RankFilesMoveTest, VectorsOfNumberedStateThatDifferBetweenRanksAreNotJoined) {
  const formats::Key zero = formats::NonStringKey{"0"};
  test::MemoryCheckpoint source("source");
  source.add({"model.weight", DType::float32, {4, 1}}, test::bytes_of<float>({1, 2, 3, 4}));
  add_numbered_state(source, "optim.state.0.m", {"optim", "state", zero, "m"}, {5, 6});
  add_numbered_state(source, "per_rank.1.optim.state.0.m",
                     {"per_rank", "1", "optim", "state", zero, "m"}, {7, 8});
  const auto moved = move(source, {.world_size = 2});
  EXPECT_EQ(pieces_of(*moved, "optim.state.0.m"), "[0:1] on 0, [1:2] on 1");
  EXPECT_EQ(pieces_of(*moved, "per_rank.1.optim.state.0.m"), "[0:1] on 0, [1:2] on 1");
  const auto notes = plan_reshard(source.contents(), source.path(),
                                  {.format = Format("rank_files"), .world_size = 2})
                         .notes;
  EXPECT_EQ(notes.front().where.fqn, "per_rank.1.optim.state.0.m");
  const auto replicas = move(source, {.world_size = 4, .strategy = "hybrid:2x2"});
  EXPECT_EQ(pieces_of(*replicas, "per_rank.1.optim.state.0.m"), "[0:2] on 1");
}

// Shows F1.
TEST_F(RankFilesMoveTest, StateThatDiffersBetweenRanksIsNotCutLikeItsParameter) {
  test::MemoryCheckpoint source("source");
  const auto add = [&](const std::string& name, const formats::KeyPath& path) {
    const auto first = static_cast<float>(path.size());
    source.add({name, DType::float32, {2}}, test::bytes_of<float>({first, 2})).key_path = path;
  };
  add("model.w", {"model", "w"});
  add("optim.state.w.exp_avg", {"optim", "state", "w", "exp_avg"});
  add("per_rank.1.optim.state.w.exp_avg", {"per_rank", "1", "optim", "state", "w", "exp_avg"});
  const auto moved = move(source, {.world_size = 2});
  EXPECT_EQ(pieces_of(*moved, "model.w"), "[0:1] on 0, [1:2] on 1");
  EXPECT_EQ(pieces_of(*moved, "optim.state.w.exp_avg"), "[0:2] on 0");
  EXPECT_EQ(pieces_of(*moved, "per_rank.1.optim.state.w.exp_avg"), "[0:2] on 1");
}

TEST_F(RankFilesMoveTest, RowWiseStateOfEachRankIsNotCutAsTheTableIs) {
  const std::string table = "model.ebc.embedding_bags.t1.weight";
  const std::string state = "optim.state.ebc.embedding_bags.t1.weight.t1.momentum1";
  test::MemoryCheckpoint source("src", 2);
  source.add({table, DType::float32, {4, 6}}, test::Bytes(96));
  source.add({state, DType::float32, {4}}, test::bytes_of<float>({1, 2, 3, 4}));
  source.add({"per_rank.1." + state, DType::float32, {4}}, test::bytes_of<float>({5, 6, 7, 8}));
  source.add_value("optim.param_groups", Value::List{});
  const auto moved = move(source, {.world_size = 2, .strategy = "dim1"});
  EXPECT_EQ(pieces_of(*moved, table), "[0:4, 0:3] on 0, [0:4, 3:6] on 1");
  EXPECT_EQ(pieces_of(*moved, state), "[0:4] on 0");
  EXPECT_EQ(pieces_of(*moved, "per_rank.1." + state), "[0:4] on 1");
}

// Shows F1. The flat parts of a small parameter may be whole on some ranks, and missing on others.
TEST_F(RankFilesMoveTest, FlatStrategiesAreRefused) {
  const auto source = open(kValid + "fsdp2");
  for (const char* const strategy : {"flat", "hybrid-flat:2x2"}) {
    EXPECT_THAT([&] { move(*source, {.world_size = 4, .strategy = strategy}); },
                ThrowsError(ErrorKind::invalid_argument, "a strategy that cuts one dimension"));
  }
}

/// Adds a tensor of zeros with these pieces.
void add_zeros(test::MemoryCheckpoint& checkpoint, const std::string& name, const Shape& shape,
               std::vector<formats::Piece> pieces = {}) {
  const std::vector<std::uint8_t> zeros(static_cast<std::size_t>(numel_of(shape)));
  checkpoint.add({name, DType::uint8, shape}, test::bytes_of(zeros), std::move(pieces));
}

/// Returns the shape of a tensor in the file of one rank of two. "none" if it is not there.
std::string shape_in_file(const CheckpointReader& moved, int rank, const std::string& name) {
  const auto file = open(moved.path() + "/model_world_size_2_rank_" + std::to_string(rank) + ".pt");
  const formats::TensorEntry* const tensor = file->contents().find_tensor(name);
  return tensor == nullptr ? "none" : shape_to_string(tensor->meta.shape);
}

// Shows F1. One rank has all of a dimension of size 1; the others have parts without elements.
TEST_F(RankFilesMoveTest, ADimensionOfSizeOneIsCutAsTheOthersAre) {
  test::MemoryCheckpoint source("source");
  add_zeros(source, "model.both", {1, 1, 3});
  add_zeros(source, "model.lora_B", {4, 1});
  add_zeros(source, "model.w", {4, 2});
  const auto moved = move(source, {.world_size = 2, .strategy = "dim1"});
  EXPECT_EQ(pieces_of(*moved, "model.lora_B"), "[0:4, 0:1] on 0");
  EXPECT_EQ(shape_in_file(*moved, 1, "lora_B"), "[4, 0]");
  EXPECT_EQ(shape_in_file(*moved, 1, "both"), "[1, 0, 3]");
  const auto by_rows = move(source, {.world_size = 2});
  EXPECT_EQ(shape_in_file(*by_rows, 1, "lora_B"), "[2, 1]");
  EXPECT_EQ(shape_in_file(*by_rows, 1, "both"), "[0, 1, 3]");
}

// Shows F1. DCP stores a tensor that is not cut on one rank.
TEST_F(RankFilesMoveTest, WhatAnotherCheckpointDoesNotCutIsOnAllRanks) {
  test::MemoryCheckpoint source("source");
  test::MemoryCheckpoint other("other", 2);
  const auto add = [&](const std::string& name, const Shape& shape,
                       std::vector<formats::Piece> pieces) {
    add_zeros(source, name, shape);
    add_zeros(other, name, shape, std::move(pieces));
  };
  add("extra_state.rng", {4}, {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
  add("model.buffer", {3}, {{Box{{0}, {3}}, 0}});
  add("model.column", {4, 1}, {{Box{{0, 0}, {4, 1}}, 0}});
  add("model.one", {1}, {{Box{{0}, {1}}, 0}});
  add("model.scalar", {}, {{Box{}, 1}});
  add("model.w", {4, 2}, {{Box{{0, 0}, {2, 2}}, 0}, {Box{{2, 0}, {2, 2}}, 1}});
  add("model.x", {1}, {{Box{{0}, {1}}, 1}});
  const auto moved =
      move(source, {.like = std::make_shared<const CheckpointContents>(other.contents())});
  EXPECT_EQ(pieces_of(*moved, "extra_state.rng"), "[0:4] on 0, [0:4] on 1");
  EXPECT_EQ(pieces_of(*moved, "model.buffer"), "[0:3] on 0, [0:3] on 1");
  EXPECT_EQ(pieces_of(*moved, "model.column"), "[0:4, 0:1] on 0, [0:4, 0:1] on 1");
  EXPECT_EQ(pieces_of(*moved, "model.one"), "[0:1] on 0");  // a row, as of 'model.w'
  EXPECT_EQ(shape_in_file(*moved, 1, "one"), "[0]");
  EXPECT_EQ(pieces_of(*moved, "model.scalar"), "[] on 0, [] on 1");
  EXPECT_EQ(pieces_of(*moved, "model.w"), "[0:2, 0:2] on 0, [2:4, 0:2] on 1");
  EXPECT_EQ(pieces_of(*moved, "model.x"), "[0:1] on 0, [0:1] on 1");
}

// Shows F1. A move to DCP cuts every tensor, so its cuts do not show a DTensor of the trainer.
TEST_F(RankFilesMoveTest, OtherStateIsCutOnlyIfATrainerCutIt) {
  const std::vector<formats::Piece> halves = {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}};
  test::MemoryCheckpoint source("source", 2);
  add_zeros(source, "extra_state.rng", {4}, halves);
  const auto of_dcp = move(source, {.world_size = 2});
  EXPECT_EQ(pieces_of(*of_dcp, "extra_state.rng"), "[0:4] on 0, [0:4] on 1");
  add_zeros(source, "model.buffer", {1}, {{Box{{0}, {1}}, 0}, {Box{{0}, {1}}, 1}});
  const auto of_rank_files = move(source, {.world_size = 2});
  EXPECT_EQ(pieces_of(*of_rank_files, "extra_state.rng"), "[0:2] on 0, [2:4] on 1");
}

// Shows F1.
TEST_F(RankFilesMoveTest, PiecesThatNoDTensorHasAreRefused) {
  formats::CheckpointContents contents{.world_size = 2};
  contents.tensors.push_back({.meta = {"model.w", DType::float32, {4}},
                              .pieces = {{Box{{0}, {1}}, 0}, {Box{{1}, {3}}, 1}}});
  EXPECT_THAT(
      [&] {
        formats::create_checkpoint(FileSystem::posix(), directory_ / "c", contents, {},
                                   {.format = Format("rank_files")});
      },
      ThrowsError(ErrorKind::invalid_argument,
                  "model.w: pieces: expected pieces that cut one dimension"));
}

// Shows F1.
TEST_F(RankFilesMoveTest, TiedTensorsStayTied) {
  test::MemoryCheckpoint source("source");
  source.add({"model.w", DType::uint8, {4}}, test::bytes_of<std::uint8_t>({1, 2, 3, 4}));
  source.contents_for_change().aliases = {{"model.x", "model.w", {}}};
  const auto moved = move(source, {.world_size = 2});
  EXPECT_TRUE(FileSystem::posix().kind_of(moved->path() + "/model_world_size_2_rank_1.pt"));
  ASSERT_EQ(moved->contents().aliases.size(), 1u);
  EXPECT_EQ(moved->contents().aliases[0].target, "model.w");
}

// Shows F1.
TEST_F(RankFilesMoveTest, WhatIsTiedAcrossFilesGoesIntoOne) {
  test::MemoryCheckpoint source("source");
  source.add({"model.w", DType::uint8, {4}}, test::bytes_of<std::uint8_t>({1, 2, 3, 4}));
  source.contents_for_change().aliases = {{"ema.w", "model.w", {}}};
  const auto moved = move(source, {.world_size = 2});
  EXPECT_THAT(FileSystem::posix().list_directory(moved->path()),
              ElementsAre("world_size_2_rank_0.pt", "world_size_2_rank_1.pt"));
  EXPECT_EQ(moved->contents().aliases.size() + moved->contents().tensors.size(), 2u);
}

// Shows F1.
TEST(DeviceMeshOptionsTest, NamesTheDeviceAndTheAxes) {
  using Names = std::vector<std::string>;
  const auto parse = DeviceMeshOptions::parse;
  EXPECT_EQ(parse("cuda:fsdp"), DeviceMeshOptions{});
  EXPECT_EQ(parse("cuda:ddp,fsdp"), (DeviceMeshOptions{"cuda", Names{"ddp", "fsdp"}}));
  EXPECT_EQ(parse("cpu"), (DeviceMeshOptions{"cpu", Names{}}));
  for (const char* const text : {"", ":", "cpu:", ":fsdp", "cpu:a,", "cpu:,a", "cpu:a,,b"}) {
    EXPECT_THAT([&] { parse(text); }, ThrowsError(ErrorKind::invalid_argument, "device mesh"))
        << text;
  }
}

}  // namespace
}  // namespace tessera::reshard
