#include "tessera/reshard/job_state.h"

#include <gmock/gmock.h>

#include "formats/dcp.h"
#include "reshard/load_hints.h"
#include "reshard/load_renames.h"
#include "reshard/resharding.h"
#include "support/copy_checkpoint.h"
#include "support/error_matchers.h"
#include "support/temporary_directory.h"
#include "tessera/formats/detect.h"
#include "tessera/formats/native.h"
#include "tessera/formats/safetensors.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::CheckpointReader;
using formats::Finding;
using formats::Format;
using formats::Piece;
using formats::StateKind;
using formats::TensorEntry;
using test::Bytes;
using test::bytes_of;
using test::counting_bytes;
using test::MemoryCheckpoint;
using test::MemoryWriter;
using test::ThrowsError;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

// Layouts (strategy, world size), both of saved checkpoints and of the jobs that load them.
const std::vector<std::pair<std::string, int>> kLayouts = {
    {"replicated", 1}, {"replicated", 3}, {"flat", 2},       {"flat", 4},
    {"dim0", 3},       {"dim0", 4},       {"hybrid:2x2", 4}, {"columns", 2}};

/// A model under AdamW with everything that is awkward: an uneven cut, more ranks than rows,
/// tensors of no dimensions and of no elements, a scalar of the optimizer.
MemoryCheckpoint model() {
  MemoryCheckpoint checkpoint("model");
  checkpoint.add({"model.bias", DType::bfloat16, {5}}, counting_bytes(10, 2));
  checkpoint.add({"model.empty", DType::float32, {0, 4}}, {});
  checkpoint.add({"model.scale", DType::float32, {}}, counting_bytes(4, 3));
  checkpoint.add({"model.thin", DType::float32, {1, 3, 2}}, counting_bytes(24, 4));
  checkpoint.add({"model.weight", DType::float32, {7, 6}}, counting_bytes(168, 5));
  TensorEntry& moment = checkpoint.add({"optim.state.weight.exp_avg", DType::float32, {7, 6}},
                                       counting_bytes(168, 6));
  moment.kind = StateKind::pointwise;
  moment.parameter = "model.weight";
  TensorEntry& step =
      checkpoint.add({"optim.state.weight.step", DType::float32, {}}, bytes_of<float>({17}));
  step.kind = StateKind::scalar_parameter;
  step.parameter = "model.weight";
  checkpoint.add_value("epoch", Value(3));
  checkpoint.contents_for_change().units = {
      make_flat_unit("", DType::float32,
                     {{"model.bias", {5}}, {"model.thin", {1, 3, 2}}, {"model.weight", {7, 6}}})};
  return checkpoint;
}

/// Returns what `rank` holds of a tensor under a layout.
std::vector<Piece> pieces_of(const TensorEntry& tensor, const CheckpointContents& contents,
                             const std::string& layout, int world_size, int rank) {
  const Shape& shape = tensor.meta.shape;
  if (layout == "columns" && shape.size() == 2) {
    const std::int64_t width = shape[1] / world_size;
    return {{Box{{0, width * rank}, {shape[0], width}}, rank}};
  }
  const Strategy strategy = parse_strategy(layout == "columns" ? "replicated" : layout, world_size);
  const FlatUnitIndex units(contents.units);
  const std::string& unit_parameter =
      tensor.kind == StateKind::pointwise ? tensor.parameter.str() : tensor.meta.fqn;
  std::vector<Piece> pieces;
  for (const Shard& shard : shards_of(strategy, shape, units.find(unit_parameter))) {
    if (std::ranges::find(shard.ranks, rank) != shard.ranks.end()) {
      pieces.push_back({shard.region, rank});
    }
  }
  return pieces;
}

/// Returns contents with the pieces of the ranks in `[first, end)`.
CheckpointContents laid_out(CheckpointContents contents, const std::string& layout, int world_size,
                            int first, int end) {
  contents.world_size = world_size;
  for (TensorEntry& tensor : contents.tensors) {
    tensor.pieces.clear();
    for (int rank = first; rank < end; ++rank) {
      for (Piece& piece : pieces_of(tensor, contents, layout, world_size, rank)) {
        tensor.pieces.push_back(std::move(piece));
      }
    }
  }
  return contents;
}

CheckpointContents held_by(int rank, const CheckpointContents& contents, const std::string& layout,
                           int world_size) {
  return laid_out(contents, layout, world_size, rank, rank + 1);
}

/// Loads into memory what `wanted` lists.
MemoryCheckpoint load(const CheckpointReader& source, const CheckpointContents& wanted, int rank,
                      const LoadPlanOptions& options = {}) {
  const Plan plan = plan_load(source.contents(), source.path(), wanted, rank, options);
  if (!plan.problems.empty()) throw std::runtime_error(problems_to_string(plan.problems, 10));
  std::vector<Value> values;
  for (const std::size_t i : plan.value_sources) values.push_back(source.read_value(i));
  MemoryWriter writer(plan.destination, std::move(values));
  execute(plan, source, writer, {.num_threads = 2});
  writer.commit();
  return writer.result();
}

void expect_pieces_equal(const MemoryCheckpoint& loaded, const MemoryCheckpoint& truth) {
  for (std::size_t t = 0; t < loaded.contents().tensors.size(); ++t) {
    const TensorEntry& tensor = loaded.contents().tensors[t];
    SCOPED_TRACE(tensor.meta.fqn);
    const auto index = static_cast<std::size_t>(truth.contents().find_tensor(tensor.meta.fqn) -
                                                truth.contents().tensors.data());
    const Bytes whole = whole_tensor(truth, index);
    for (std::size_t p = 0; p < tensor.pieces.size(); ++p) {
      const Region& region = tensor.pieces[p].region;
      const std::uint64_t item_nbytes = itemsize(tensor.meta.dtype);
      Bytes bytes(static_cast<std::size_t>(numel_of(region)) * item_nbytes);
      loaded.read_piece(t, p, {0, numel_of(region)}, bytes);
      EXPECT_EQ(bytes, test::gather_region(whole, tensor.meta.shape, region, item_nbytes));
    }
  }
}

void expect_loads_into_every_layout(const std::string& path) {
  const MemoryCheckpoint truth = model();
  const auto reader = formats::open_checkpoint(FileSystem::posix(), path);
  for (const auto& [layout, world_size] : kLayouts) {
    for (int rank = 0; rank < world_size; ++rank) {
      SCOPED_TRACE(layout + " rank " + std::to_string(rank));
      const CheckpointContents wanted = held_by(rank, truth.contents(), layout, world_size);
      const MemoryCheckpoint loaded = load(*reader, wanted, rank);
      EXPECT_THAT(loaded.contents().tensors, SizeIs(truth.contents().tensors.size()));
      expect_pieces_equal(loaded, truth);
      EXPECT_EQ(loaded.read_value(0), Value(3));
    }
  }
}

// Shows A4.
TEST(LoadPlannerTest, EveryLayoutLoadsIntoEveryLayoutFromNative) {
  const MemoryCheckpoint truth = model();
  for (const auto& [layout, world_size] : kLayouts) {
    SCOPED_TRACE("saved as " + layout + " by " + std::to_string(world_size));
    test::TemporaryDirectory directory;
    const auto writer = formats::create_native(
        FileSystem::posix(), directory / "c",
        laid_out(truth.contents(), layout, world_size, 0, world_size), {Value(3)});
    copy_checkpoint(truth, *writer);
    expect_loads_into_every_layout(directory / "c");
  }
}

// Shows A4.
TEST(LoadPlannerTest, EveryLayoutLoadsFromDcp) {
  const MemoryCheckpoint truth = model();
  for (const int world_size : {1, 3}) {
    test::TemporaryDirectory directory;
    const auto writer = formats::create_dcp(
        FileSystem::posix(), directory / "c",
        laid_out(truth.contents(), "dim0", world_size, 0, world_size), {Value(3)});
    copy_checkpoint(truth, *writer);
    expect_loads_into_every_layout(directory / "c");
  }
}

// Shows A4.
TEST(LoadPlannerTest, EveryLayoutLoadsFromSafetensors) {
  const MemoryCheckpoint truth = model();
  test::TemporaryDirectory directory;
  const auto writer = formats::create_safetensors(FileSystem::posix(), directory / "c.safetensors",
                                                  truth.contents(), {Value(3)});
  copy_checkpoint(truth, *writer);
  expect_loads_into_every_layout(directory / "c.safetensors");
}

// Shows E14.
TEST(LoadPlannerTest, ARankMayHoldNothingOrPiecesThatOverlap) {
  const MemoryCheckpoint source = model();
  CheckpointContents wanted = source.contents();
  wanted.world_size = 3;
  for (TensorEntry& tensor : wanted.tensors) tensor.pieces.clear();
  const Plan nothing = plan_load(source.contents(), "src", wanted, 2, {});
  EXPECT_THAT(nothing.problems, IsEmpty());
  EXPECT_EQ(nothing.nbytes_to_write, 0U);
  EXPECT_THAT(nothing.destination.tensors, SizeIs(wanted.tensors.size()));

  wanted.tensors[4].pieces = {{Box{{0, 0}, {4, 6}}, 2}, {FlatRange{20, 30}, 2}, {FlatRange{}, 2}};
  EXPECT_EQ(plan_load(source.contents(), "src", wanted, 2, {}).nbytes_to_write, 34U * 4);
  expect_pieces_equal(load(source, wanted, 2), source);
}

TEST(LoadPlannerTest, ReplicasAreReadFromTheRankItselfWhereItHasOne) {
  MemoryCheckpoint source("src", 3);
  const Region whole = whole_box(Shape{5});
  source.add({"w", DType::float32, {5}}, counting_bytes(20), {{whole, 0}, {whole, 1}, {whole, 2}});
  CheckpointContents wanted = held_by(2, source.contents(), "replicated", 3);
  wanted.tensors[0].pieces.edit()[0].rank = 0;  // ignored: plan_load gets the rank, 2
  const Plan plan = plan_load(source.contents(), "src", wanted, 2, {});
  EXPECT_THAT(plan.copies[0].source_pieces, ElementsAre(ElementsAre(2)));
}

// Problems: checkpoints that do not fit what is wanted.

std::vector<std::string> rules_and_names(const std::vector<Finding>& findings) {
  std::vector<std::string> texts;
  for (const Finding& finding : findings) texts.push_back(finding.rule + " " + finding.where.fqn);
  return texts;
}

/// A checkpoint, and the contents that a job wants. They fit; tests then change one of them.
struct Pair {
  CheckpointContents source = model().contents();
  CheckpointContents wanted = held_by(0, source, "dim0", 2);

  Plan plan(const LoadPlanOptions& options = {}) const {
    return plan_load(source, "src", wanted, 0, options);
  }
  static TensorEntry& find(CheckpointContents& contents, std::string_view fqn) {
    return *std::ranges::find(contents.tensors, fqn,
                              [](const TensorEntry& tensor) { return tensor.meta.fqn; });
  }
  static void erase(CheckpointContents& contents, std::string_view fqn) {
    std::erase_if(contents.tensors, [&](const TensorEntry& t) { return t.meta.fqn == fqn; });
  }
  static void add(CheckpointContents& contents, TensorMeta meta) {
    TensorEntry entry;
    entry.pieces = {{whole_box(meta.shape), 0}};
    entry.meta = std::move(meta);
    contents.tensors.push_back(std::move(entry));
    std::ranges::sort(contents.tensors, {}, [](const TensorEntry& t) { return t.meta.fqn; });
  }
};

// Shows E7.
TEST(LoadPlannerTest, MissingNamesAreRefusedOrStayAsTheyAre) {
  Pair pair;
  Pair::erase(pair.source, "model.bias");
  pair.source.values.clear();
  const Plan plan = pair.plan();
  ASSERT_THAT(rules_and_names(plan.problems), ElementsAre("missing model.bias", "missing epoch"));
  EXPECT_EQ(plan.problems[0].expected, "a tensor of that name");
  EXPECT_EQ(plan.problems[1].expected, "a value of that name");

  const Plan relaxed = pair.plan({.missing = Relaxation::allow});
  EXPECT_THAT(relaxed.problems, IsEmpty());
  EXPECT_THAT(relaxed.notes, SizeIs(2));
  EXPECT_EQ(relaxed.destination.find_tensor("model.bias"), nullptr);
  EXPECT_THAT(relaxed.destination.values, IsEmpty());
}

// Shows E7.
TEST(LoadPlannerTest, UnexpectedNamesAreRefusedOrPassedOver) {
  Pair pair;
  Pair::erase(pair.wanted, "model.bias");
  pair.wanted.values.clear();
  pair.source.aliases = {{"model.head", "model.weight", {}}};
  const Plan plan = pair.plan();
  ASSERT_THAT(rules_and_names(plan.problems),
              ElementsAre("unexpected epoch", "unexpected model.bias", "unexpected model.head"));
  EXPECT_EQ(plan.problems[0].found, "a value");
  EXPECT_EQ(plan.problems[1].found, "a tensor");
  EXPECT_EQ(plan.problems[2].found, "an alias");

  const Plan relaxed = pair.plan({.unexpected = Relaxation::allow});
  EXPECT_THAT(relaxed.problems, IsEmpty());
  EXPECT_THAT(relaxed.notes, SizeIs(3));
}

/// Returns the hints for the problems that plan_load finds.
LoadHints hints_of(const Pair& pair, const LoadPlanOptions& options = {}) {
  const ModelPrefixes models = {{"optim.", "model."}, {"optimizer.", "model."}};
  return hints_for_load({pair.plan(options).problems,
                         pair.source,
                         "checkpoint",
                         pair.wanted,
                         0,
                         options,
                         models,
                         {"epoch", "model", "optim"}});
}

std::vector<std::string> renames_in(const LoadHints& hints) {
  std::vector<std::string> renames;
  for (const RenamedNames& each : hints.renames) {
    renames.push_back(each.rename.from + "=" + each.rename.to);
  }
  return renames;
}

// Shows E7.
TEST(LoadHintsTest, ARenameFixesAParameterAndItsOptimizerStateWhateverTheOptimizerIsCalled) {
  for (const std::string optimizer : {"optim.", "optimizer."}) {
    SCOPED_TRACE(optimizer);
    Pair pair;
    for (CheckpointContents* const contents : {&pair.source, &pair.wanted}) {
      const std::string layer = contents == &pair.source ? "old" : "new";
      for (const char* name : {"model.weight", "optim.state.weight.exp_avg"}) {
        Pair::erase(*contents, name);
      }
      Pair::erase(*contents, "optim.state.weight.step");
      Pair::add(*contents, {"model." + layer + ".weight", DType::float32, {7, 6}});
      Pair::add(*contents,
                {optimizer + "state." + layer + ".weight.exp_avg", DType::float32, {7, 6}});
    }
    const LoadHints hints = hints_of(pair);
    EXPECT_THAT(renames_in(hints), ElementsAre("model.old.=model.new."));
    EXPECT_THAT(hints.is_renamed, ::testing::AllOf(SizeIs(4), ::testing::Each(true)));
    EXPECT_THAT(line_of(hints.renames.front(), "the job"),
                ::testing::StartsWith("'model.old.' in the checkpoint, 'model.new.' in the job: "
                                      "renamed? 1 tensor has"));
    LoadPlanOptions options;
    options.renames = with_optimizer_renames({hints.renames.front().rename}, pair.source, {});
    EXPECT_THAT(pair.plan(options).problems, IsEmpty());
    const Value renamed_list =
        with_renamed_members(optimizer + "param_groups.0.params", Value::List{"old.weight", "bias"},
                             options.renames, pair.source, model_prefixes(pair.source), {});
    EXPECT_EQ(renamed_list, Value(Value::List{"new.weight", "bias"}));
  }
}

// Shows E7. `state` of a loader or of random numbers belongs to no parameter.
TEST(LoadHintsTest, OtherStateIsNoOptimizerState) {
  CheckpointContents contents;
  contents.values = {{"rng.state.seed", {}},
                     {"optim.state.w.step", {}},
                     {"sgd.state.w.step", {}},
                     {"sgd.param_groups.0.params", {}}};
  EXPECT_THAT(optimizer_prefixes(contents), ElementsAre("optim.", "sgd."));
  const auto renames = with_optimizer_renames({{"model.", "model.net."}}, contents, {});
  EXPECT_TRUE(std::ranges::none_of(
      renames, [](const Rename& each) { return each.from.starts_with("rng."); }));
}

// Shows E7.
TEST(LoadHintsTest, AModelIsWhereTheParametersOfTheOptimizerAre) {
  EXPECT_THAT(model_prefixes({"optim.state.fc.w.step", "net.fc.w"}),
              ElementsAre(std::pair("optim.", "net.")));
  EXPECT_THAT(model_prefixes({"optim.param_groups.fc.w.lr", "fc.w"}),
              ElementsAre(std::pair("optim.", "")));
  EXPECT_THAT(model_prefixes({"optim.state.w.step", "ema.w", "model.w", "net.fc.w"}),
              ElementsAre(std::pair("optim.", "model.")));
  EXPECT_THAT(
      model_prefixes({"optim_g.state.g.w.step", "optim_d.state.d.w.step", "gen.g.w", "disc.d.w"}),
      ElementsAre(std::pair("optim_d.", "disc."), std::pair("optim_g.", "gen.")));
  EXPECT_THAT(model_prefixes({"optim.state.0.step", "model.0", "optim.param_groups.0.lr"}),
              IsEmpty());
  EXPECT_THAT(model_prefixes({"optim.state.w.step", "optim.param_groups.0.params"}), IsEmpty());
}

// Shows E7.
TEST(LoadHintsTest, ARenameOfAWrapperChangesTheOptimizerWhereTheModelIsElsewhereInTheJob) {
  CheckpointContents source;
  for (const char* name : {"module.w", "optim.state.module.w.step"}) {
    source.tensors.push_back({.meta = {name, DType::float32, {}}});
  }
  const auto state_of = [&](const ModelPrefixes& of_job, const Rename& rename) {
    std::vector<std::string> texts;
    for (const Rename& each : ImpliedRenames(source, of_job).of(rename)) {
      texts.push_back(each.from + "=" + each.to);
    }
    return texts;
  };
  const ModelPrefixes in_model = {{"optim.", "model."}};
  EXPECT_THAT(state_of(in_model, {"module.", "model."}),
              ElementsAre("optim.state.module.=optim.state."));
  EXPECT_THAT(state_of({}, {"module.", "model."}),
              ElementsAre("optim.state.module.=optim.state.model."));
  EXPECT_THAT(state_of(in_model, {"", "model."}), IsEmpty());
  EXPECT_THAT(state_of(in_model, {"other.", "model."}), IsEmpty());
}

// Shows E7.
TEST(LoadHintsTest, ManyNamesOfAShapeAreMatchedByOneRename) {
  for (const std::string to : {"net.", "model.net.", ""}) {
    SCOPED_TRACE(to);
    Pair pair;
    const auto add_1100 = [](CheckpointContents& contents, const std::string& prefix) {
      for (int i = 0; i < 1100; ++i) {
        contents.tensors.push_back(
            {.meta = {prefix + std::to_string(i) + ".scale", DType::float32, {3}},
             .pieces = {{whole_box(Shape{3}), 0}}});
      }
      Pair::add(contents, {prefix + "last.scale", DType::float32, {3}});  // sorts
    };
    add_1100(pair.source, "model.");
    add_1100(pair.wanted, "model." + to + "layers.");
    const LoadHints hints = hints_of(pair);
    EXPECT_THAT(hints.renames, IsEmpty());  // `model.` has other names, too, and they fit
    for (CheckpointContents* const contents : {&pair.source, &pair.wanted}) {
      for (const char* name :
           {"model.bias", "model.empty", "model.scale", "model.thin", "model.weight",
            "optim.state.weight.exp_avg", "optim.state.weight.step"}) {
        Pair::erase(*contents, name);
      }
    }
    EXPECT_THAT(renames_in(hints_of(pair)), ElementsAre("model.=model." + to + "layers."));
    Pair::erase(pair.wanted, "model." + to + "layers.7.scale");
    EXPECT_THAT(hints_of(pair).renames, IsEmpty());
  }
}

// Shows E7. The hint that fixes names tells what else would be wrong with them.
TEST(LoadHintsTest, ProblemsOfRenamedTensorsAreToldAtOnce) {
  Pair pair;
  for (const char* name : {"model.weight", "model.thin"}) Pair::erase(pair.source, name);
  Pair::add(pair.source, {"model.up.weight", DType::bfloat16, {7, 6}});
  Pair::erase(pair.wanted, "model.weight");
  Pair::add(pair.wanted, {"model.net.weight", DType::float32, {7, 6}});
  Pair::erase(pair.wanted, "model.thin");
  for (CheckpointContents* const contents : {&pair.source, &pair.wanted}) {
    Pair::erase(*contents, "optim.state.weight.exp_avg");
    Pair::erase(*contents, "optim.state.weight.step");
  }
  const LoadHints hints = hints_of(pair);
  EXPECT_THAT(renames_in(hints), ElementsAre("model.up.=model.net."));
  ASSERT_THAT(hints.after_renames, SizeIs(1));
  EXPECT_EQ(formats::finding_to_string(hints.after_renames[0]),
            "model.net.weight: dtype: expected float32, found bfloat16");
  EXPECT_TRUE(hints.may_cast);
}

// Shows E7.
TEST(LoadHintsTest, TellWhatWouldHelpIfItIsAllThatIsNeeded) {
  Pair pair;
  Pair::find(pair.source, "model.weight").meta.dtype = DType::bfloat16;
  LoadHints hints = hints_of(pair);
  EXPECT_TRUE(hints.may_cast && !hints.has_more && !hints.nearest);
  Pair::add(pair.source, {"rng", DType::uint8, {8}});
  hints = hints_of(pair);
  EXPECT_TRUE(hints.may_cast && hints.has_more);
  hints = hints_of(pair, {.only = NameSelection({"!nothing"})});
  EXPECT_TRUE(hints.may_cast && !hints.has_more);  // the user has chosen names
  Pair::add(pair.source, {"model.more", DType::float32, {8}});
  hints = hints_of(pair);
  EXPECT_TRUE(!hints.may_cast && !hints.has_more);  // `only` cannot leave out a part of the model
  Pair::erase(pair.source, "model.more");
  Pair::find(pair.source, "model.scale").meta.dtype = DType::int32;
  hints = hints_of(pair);
  EXPECT_TRUE(!hints.may_cast && !hints.has_more);  // an integer is not cast
}

// Shows E7.
TEST(LoadHintsTest, NameTheNearestUnexpectedNameOfTheOnlyMissingOne) {
  Pair pair;
  pair.source.values = {{"epochs", {}}};
  EXPECT_EQ(hints_of(pair).nearest, std::pair(std::string("epoch"), std::string("epochs")));
  Pair::erase(pair.source, "model.bias");
  EXPECT_EQ(hints_of(pair).nearest, std::nullopt);
}

// Shows E7.
TEST(LoadPlannerTest, ShapesMustBeEqualWhateverIsAllowed) {
  Pair pair;
  Pair::find(pair.wanted, "model.bias").meta.shape = {6};
  const Plan plan = pair.plan({.missing = Relaxation::allow,
                               .unexpected = Relaxation::allow,
                               .cast = Relaxation::allow,
                               .lossy = Relaxation::allow});
  ASSERT_THAT(rules_and_names(plan.problems), ElementsAre("shape model.bias"));
  EXPECT_EQ(plan.problems[0].expected, "[6]");
  EXPECT_EQ(plan.problems[0].found, "[5]");
}

// Shows E7.
TEST(LoadPlannerTest, OnlyFloatingDtypesAreCastAndOnlyWhereThatIsAllowed) {
  MemoryCheckpoint source("src");
  source.add({"w", DType::float32, {2}}, bytes_of<float>({1.0F, -2.5F}));
  CheckpointContents wanted = source.contents();
  wanted.tensors[0].meta.dtype = DType::bfloat16;
  const Plan plan = plan_load(source.contents(), "src", wanted, 0, {});
  ASSERT_THAT(rules_and_names(plan.problems), ElementsAre("dtype w"));
  EXPECT_EQ(plan.problems[0].expected, "bfloat16");
  EXPECT_EQ(plan.problems[0].found, "float32");

  const MemoryCheckpoint loaded = load(source, wanted, 0, {.cast = Relaxation::allow});
  EXPECT_EQ(whole_tensor(loaded, 0), bytes_of<std::uint16_t>({0x3F80, 0xC020}));

  wanted.tensors[0].meta.dtype = DType::int32;
  EXPECT_THAT(plan_load(source.contents(), "src", wanted, 0, {.cast = Relaxation::allow}).problems,
              SizeIs(1));
}

// Shows E7.
TEST(LoadPlannerTest, CodesOfQuantizedWeightsAreNotLoadedAsNumbers) {
  MemoryCheckpoint source("src");
  source.add({"w", DType::float8_e4m3fn, {2}}, Bytes(2));
  source.add({"w_scale_inv", DType::float32, {1}}, bytes_of<float>({0.5F}));
  CheckpointContents wanted = source.contents();
  wanted.tensors[0].meta.dtype = DType::bfloat16;
  const Plan plan = plan_load(source.contents(), "src", wanted, 0, {.cast = Relaxation::allow});
  ASSERT_THAT(rules_and_names(plan.problems), ElementsAre("cast w"));
  EXPECT_EQ(plan.problems[0].found, "codes of block-scaled fp8; the scales are w_scale_inv");
}

// Shows E7.
TEST(LoadPlannerTest, HolesAndOverlapsOfWhatIsNeededAreProblems) {
  Pair pair;
  Pair::find(pair.source, "model.bias").pieces = {{FlatRange{0, 4}, 0}};
  Pair::find(pair.source, "model.weight").pieces = {{FlatRange{0, 30}, 0}, {FlatRange{29, 42}, 1}};
  EXPECT_THAT(rules_and_names(pair.plan().problems),
              ElementsAre("coverage model.bias", "coverage model.weight"));
  EXPECT_THAT(rules_and_names(pair.plan({.missing = Relaxation::allow}).problems),
              ElementsAre("coverage model.weight"));
  EXPECT_THAT(pair.plan({.only = NameSelection({"!model.bias", "!model.weight"})}).problems,
              IsEmpty());
}

// Shows E10.
TEST(LoadPlannerTest, KindsOfStateMustAgreeUnlessOneIsUnknown) {
  Pair pair;
  TensorEntry& moment = Pair::find(pair.source, "optim.state.weight.exp_avg");
  moment.kind = StateKind::scalar_parameter;
  const Plan plan = pair.plan();
  ASSERT_THAT(rules_and_names(plan.problems),
              ElementsAre("kind of state optim.state.weight.exp_avg"));
  EXPECT_EQ(plan.problems[0].expected, "pointwise");
  EXPECT_EQ(plan.problems[0].found, "scalar_parameter (from another optimizer?)");
  moment.kind = StateKind::opaque;
  EXPECT_THAT(pair.plan().problems, IsEmpty());
  moment.kind = StateKind::plain;  // other formats store no kind: the name decides
  EXPECT_THAT(pair.plan().problems, IsEmpty());
  moment.kind = StateKind::pointwise;  // a job may not know that a name is one of state
  Pair::find(pair.wanted, "optim.state.weight.exp_avg").kind = StateKind::plain;
  EXPECT_THAT(pair.plan().problems, IsEmpty());
}

// Shows E3.
TEST(LoadPlannerTest, StateWhoseShapeContradictsItsParameterIsAProblem) {
  Pair pair;
  TensorEntry& moment = Pair::find(pair.source, "optim.state.weight.exp_avg");
  moment.meta.shape = {5, 6};
  moment.pieces = {{whole_box(moment.meta.shape), 0}};
  EXPECT_THAT(
      rules_and_names(pair.plan().problems),
      ElementsAre("kind of state optim.state.weight.exp_avg", "shape optim.state.weight.exp_avg"));
}

// Shows E2.
TEST(LoadPlannerTest, BareFlatVectorsAreRefused) {
  Pair pair;
  Pair::add(pair.source, {"model._flat_param", DType::float32, {64}});
  const Plan plan = pair.plan();
  ASSERT_THAT(rules_and_names(plan.problems), ElementsAre("flat vector model._flat_param"));
  EXPECT_EQ(plan.problems[0].expected, "a layout that names its parameters");
  EXPECT_EQ(plan.problems[0].remedy, Remedy{Remedy::Action::give_flat_layout});
  EXPECT_EQ(pair.plan({.unexpected = Relaxation::allow}).notes.at(0).remedy,
            Remedy{Remedy::Action::give_flat_layout});
  Pair::add(pair.wanted, {"model._flat_param", DType::float32, {64}});
  EXPECT_THAT(rules_and_names(pair.plan({.unexpected = Relaxation::allow}).problems),
              ElementsAre("flat vector model._flat_param"));
}

TEST(LoadPlannerTest, ATensorIsNoValue) {
  Pair pair;
  Pair::add(pair.source, {"epoch", DType::int64, {}});
  pair.source.values = {{"model.bias", {}}};
  Pair::erase(pair.source, "model.bias");
  const Plan plan = pair.plan({.missing = Relaxation::allow});
  EXPECT_THAT(rules_and_names(plan.problems),
              ElementsAre("kind of entry model.bias", "kind of entry epoch"));
}

TEST(LoadPlannerTest, FilesThatTheCheckpointLacksAreMissing) {
  Pair pair;
  pair.source.missing_files = {"c.safetensors.values.json"};
  EXPECT_THAT(rules_and_names(pair.plan().problems), ElementsAre("structure "));
  EXPECT_THAT(pair.plan({.missing = Relaxation::allow}).problems, IsEmpty());
}

TEST(LoadPlannerTest, OnePartOfACheckpointIsRefused) {
  Pair pair;
  pair.source.part = formats::PartOfWhole{.form = "FSDP", .num_parts = 8};
  const Plan plan = pair.plan();
  ASSERT_THAT(rules_and_names(plan.problems), ElementsAre("part "));
  EXPECT_EQ(plan.problems[0].found, "one rank of 8: FSDP");
  EXPECT_THAT(pair.plan({.missing = Relaxation::allow}).problems, IsEmpty());
}

// Shows E7.
TEST(LoadPlannerTest, AllProblemsComeInOneReportThatIsTheSameOnEveryRank) {
  Pair pair;
  Pair::erase(pair.source, "model.empty");
  Pair::add(pair.source, {"model.extra", DType::float32, {2}});
  Pair::add(pair.source, {"model._flat_param", DType::float32, {2}});
  Pair::find(pair.source, "model.scale").meta.dtype = DType::int32;
  Pair::find(pair.source, "model.bias").pieces.clear();
  Pair::find(pair.source, "model.thin").meta.shape = {3, 2, 1};
  Pair::find(pair.source, "model.thin").pieces = {{whole_box(Shape{3, 2, 1}), 0}};
  Pair::find(pair.source, "optim.state.weight.step").kind = StateKind::pointwise;
  pair.source.values.clear();
  pair.source.missing_files = {"lost"};
  std::set<std::string> reports;
  for (int rank = 0; rank < 8; ++rank) {
    const CheckpointContents wanted = held_by(rank, model().contents(), "dim0", 8);
    const Plan plan = plan_load(pair.source, "src", wanted, rank, {});
    reports.insert(problems_to_string(plan.problems, 100));
    EXPECT_THAT(rules_and_names(plan.problems),
                UnorderedElementsAre("structure ", "coverage model.bias", "missing model.empty",
                                     "dtype model.scale", "shape model.thin",
                                     "kind of state optim.state.weight.step",  // by its shape
                                     "kind of state optim.state.weight.step", "missing epoch",
                                     "flat vector model._flat_param", "unexpected model.extra"));
  }
  EXPECT_THAT(reports, SizeIs(1));
}

TEST(LoadPlannerTest, ProblemsAreToldUpToALimit) {
  const std::vector<Finding> problems(
      3, {Finding::Severity::error, "shape", {"src", "w", {}}, "[6]", "[5]"});
  EXPECT_EQ(problems_to_string(problems, 2),
            "src: w: shape: expected [6], found [5]\nsrc: w: shape: expected [6], found [5]\n"
            "and 1 more");
  EXPECT_EQ(problems_to_string(problems, 3).find("more"), std::string::npos);
  EXPECT_EQ(problems_to_string({}, 3), "");
}

// Names.

// Shows E9.
TEST(LoadPlannerTest, AWantedAliasIsSatisfiedByATensorAndByAnAlias) {
  MemoryCheckpoint source("src");
  source.add({"embed", DType::float32, {3}}, counting_bytes(12));
  source.add({"head", DType::float32, {3}}, counting_bytes(12));
  CheckpointContents wanted;
  wanted.tensors = {source.contents().tensors[0]};
  wanted.aliases = {{"head", "embed", {}}};
  EXPECT_THAT(load(source, wanted, 0).contents().tensors, SizeIs(1));

  MemoryCheckpoint tied("tied");
  tied.add({"embed", DType::float32, {3}}, counting_bytes(12));
  EXPECT_THAT(rules_and_names(plan_load(tied.contents(), "tied", wanted, 0, {}).problems),
              ElementsAre("missing head"));
  tied.add_alias("head", "embed");
  expect_pieces_equal(load(tied, wanted, 0), tied);

  source.contents_for_change().tensors[1].meta.shape = {1, 3};
  EXPECT_THAT(rules_and_names(plan_load(source.contents(), "src", wanted, 0, {}).problems),
              ElementsAre("shape head"));
}

// Shows E9.
TEST(LoadPlannerTest, AWantedTensorMayComeFromAnAlias) {
  MemoryCheckpoint source("src");
  source.add({"head", DType::float32, {3}}, counting_bytes(12));
  source.add_alias("embed", "head");
  CheckpointContents untied;
  untied.tensors = {source.contents().tensors[0], source.contents().tensors[0]};
  untied.tensors[0].meta.fqn = "embed";
  const MemoryCheckpoint loaded = load(source, untied, 0);
  EXPECT_EQ(whole_tensor(loaded, 0), counting_bytes(12));
  EXPECT_EQ(whole_tensor(loaded, 1), counting_bytes(12));

  CheckpointContents tied = untied;  // tensor and alias are swapped, compared with the checkpoint
  tied.tensors.pop_back();
  tied.aliases = {{"head", "embed", {}}};
  EXPECT_EQ(whole_tensor(load(source, tied, 0), 0), counting_bytes(12));
}

// Shows E9.
TEST(LoadPlannerTest, ATensorThatIsThereUnderATiedNameOnlyIsLoadedFromThere) {
  MemoryCheckpoint source("src");
  source.add({"head", DType::float32, {3}}, counting_bytes(12));
  CheckpointContents wanted;
  wanted.tensors = {source.contents().tensors[0]};
  wanted.tensors[0].meta.fqn = "embed";
  wanted.aliases = {{"head", "embed", {}}};
  EXPECT_THAT(rules_and_names(plan_load(source.contents(), "src", wanted, 0, {}).problems),
              ElementsAre("missing embed"));
  const MemoryCheckpoint loaded = load(source, wanted, 0, {.missing = Relaxation::allow});
  ASSERT_THAT(loaded.contents().tensors, SizeIs(1));
  EXPECT_EQ(loaded.contents().tensors[0].meta.fqn, "embed");
  EXPECT_EQ(whole_tensor(loaded, 0), counting_bytes(12));
  EXPECT_THAT(load(source, wanted, 0, {.only = NameSelection({"head"})}).contents().tensors,
              SizeIs(1));
}

TEST(LoadPlannerTest, OnlyLeavesTheRestAsItIs) {
  Pair pair;
  Pair::erase(pair.source, "model.thin");
  Pair::add(pair.source, {"model.extra", DType::float32, {2}});
  Pair::find(pair.source, "model.scale").meta.dtype = DType::int32;
  const Plan plan = pair.plan({.only = NameSelection({"model.weight", "model.bias"})});
  EXPECT_THAT(plan.problems, IsEmpty());
  ASSERT_THAT(plan.destination.tensors, SizeIs(2));
  EXPECT_EQ(plan.destination.tensors[1].meta.fqn, "model.weight");
  EXPECT_THAT(plan.destination.values, IsEmpty());
  EXPECT_THAT([&] { pair.plan({.only = NameSelection({"nothing*"})}); },
              ThrowsError(ErrorKind::invalid_argument, "nothing*"));
}

TEST(LoadPlannerTest, AnExclusionThatMatchesNoNameIsANote) {
  const Plan plan = Pair().plan({.only = NameSelection({"!nothing"})});
  EXPECT_THAT(plan.problems, IsEmpty());
  ASSERT_THAT(plan.notes, SizeIs(1));
  EXPECT_EQ(plan.notes[0].found, "'!nothing', which leaves nothing out");
}

TEST(LoadPlannerTest, RenamesLeadFromTheCheckpointsNamesToTheWantedOnes) {
  MemoryCheckpoint source("src");
  source.add({"net.w", DType::float32, {3}}, counting_bytes(12));
  source.add_alias("net.tied", "net.w");
  source.add_value("old_epoch", Value(9));
  CheckpointContents wanted;
  wanted.tensors = {source.contents().tensors[0]};
  wanted.tensors[0].meta.fqn = "model.w";
  wanted.aliases = {{"model.tied", "model.w", {}}};
  wanted.values = {{"epoch", {}}};
  const LoadPlanOptions options{.renames = {{"net.", "model."}, {"old_", ""}}};
  const MemoryCheckpoint loaded = load(source, wanted, 0, options);
  EXPECT_EQ(whole_tensor(loaded, 0), counting_bytes(12));
  EXPECT_EQ(loaded.read_value(0), Value(9));

  EXPECT_THAT(
      [&] {
        plan_load(source.contents(), "src", wanted, 0, {.renames = {{"nothing", ""}}});
      },
      ThrowsError(ErrorKind::invalid_argument, "nothing"));
  const Plan clash = plan_load(
      source.contents(), "src", wanted, 0,
      {.unexpected = Relaxation::allow, .renames = {{"net.tied", "model.w"}, {"net.", "model."}}});
  EXPECT_THAT(rules_and_names(clash.problems), ::testing::Contains("rename model.w"));
}

// Row-wise state that each column shard of a table keeps for itself.

struct Tables {
  MemoryCheckpoint source{"src", 2};
  CheckpointContents wanted;

  Tables() {
    source.add({"model.embedding_bags.t0.weight", DType::float32, {2, 4}}, counting_bytes(32),
               {{Box{{0, 0}, {2, 3}}, 0}, {Box{{0, 3}, {2, 1}}, 1}});
    TensorEntry& state = source.add(
        {"optim.state.embedding_bags.t0.weight.t0.momentum1", DType::float32, {4}},
        bytes_of<float>({1.0F, 2.0F, 5.0F, 10.0F}), {{Box{{0}, {2}}, 0}, {Box{{2}, {2}}, 1}});
    state.kind = StateKind::row_wise_per_shard;
    state.parameter = "model.embedding_bags.t0.weight";
    wanted = source.contents();
  }
};

// Shows D9.
TEST(LoadPlannerTest, StatePerColumnShardIsMergedWhereThatIsAllowed) {
  Tables tables;
  tables.wanted.tensors[0].pieces = {{Box{{1, 0}, {1, 4}}, 1}};
  TensorEntry& state = tables.wanted.tensors[1];
  state.kind = StateKind::row_wise;
  state.meta.shape = {2};
  state.pieces = {{Box{{1}, {1}}, 1}};
  const Plan plan = plan_load(tables.source.contents(), "src", tables.wanted, 1, {});
  ASSERT_THAT(plan.problems, SizeIs(1));
  EXPECT_EQ(plan.problems[0].rule, "row-wise state per column shard");
  EXPECT_EQ(plan.problems[0].remedy.action, Remedy::Action::allow_lossy);
  const MemoryCheckpoint merged =
      load(tables.source, tables.wanted, 1, {.lossy = Relaxation::allow});
  Bytes bytes(4);
  merged.read_piece(1, 0, {0, 1}, bytes);
  EXPECT_EQ(bytes, bytes_of<float>({4.0F}));  // (3 * 2 + 1 * 10) / 4
}

// Shows D9.
TEST(LoadPlannerTest, CanonicalNamesAreFilledFromTorchrecs) {
  Tables tables;
  TensorEntry& state = tables.wanted.tensors[1];
  state.meta = {"optim.state.embedding_bags.t0.weight.row_sum", DType::float32, {2}};
  state.kind = StateKind::row_wise;
  state.pieces = {{Box{{0}, {2}}, 0}};
  const MemoryCheckpoint merged =
      load(tables.source, tables.wanted, 0, {.lossy = Relaxation::allow});
  EXPECT_EQ(whole_tensor(merged, 1), bytes_of<float>({2.0F, 4.0F}));  // (3 a + 1 b) / 4
}

// Shows D9.
TEST(LoadPlannerTest, StatePerColumnShardNeedsTheSameColumns) {
  Tables tables;
  const auto plan_with = [&](Box of_table) {
    tables.wanted.tensors[0].pieces = {{std::move(of_table), 1}};
    tables.wanted.tensors[1].pieces = {{Box{{2}, {2}}, 1}};
    return plan_load(tables.source.contents(), "src", tables.wanted, 1,
                     {.lossy = Relaxation::allow});
  };
  EXPECT_THAT(plan_with(Box{{0, 3}, {2, 1}}).problems, IsEmpty());
  EXPECT_THAT(rules_and_names(plan_with(Box{{0, 2}, {2, 2}}).problems),
              ElementsAre("row-wise state per column shard "
                          "optim.state.embedding_bags.t0.weight.t0.momentum1"));
}

TEST(LoadPlannerTest, PatternsAndRenamesApplyToTheEntriesOfRanks) {
  MemoryCheckpoint source("source", 2);
  source.add({"per_rank.1.rng", DType::uint8, {1}}, Bytes(1));
  source.add({"rng", DType::uint8, {1}}, Bytes(1));
  CheckpointContents wanted;
  wanted.world_size = 2;
  wanted.tensors.push_back(*source.contents().find_tensor("rng"));
  wanted.tensors[0].meta.fqn = "run.rng";
  const auto problems = [&](std::vector<std::string> only, Rename rename) {
    LoadPlanOptions options;
    options.only = NameSelection(std::move(only));
    options.renames = {std::move(rename)};
    const Plan plan = plan_load(source.contents(), "source", wanted, 1, options);
    EXPECT_THAT(plan.notes, IsEmpty());
    std::vector<std::string> lines;
    for (const Finding& problem : plan.problems) {
      lines.push_back(problem.rule + " " + problem.where.fqn);
    }
    return lines;
  };
  EXPECT_THAT(problems({"run"}, {"", "run."}), ElementsAre("unexpected per_rank.1.rng"));
  EXPECT_THAT(problems({"run", "!per_rank"}, {"", "run."}), IsEmpty());
  EXPECT_THAT(
      [&] {
        problems({}, {"per", "pos"});
      },
      ThrowsError(ErrorKind::invalid_argument, "a rule that fits a name"));
}

}  // namespace
}  // namespace tessera::reshard
