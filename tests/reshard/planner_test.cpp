#include "tessera/reshard/planner.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "formats/derived_reader.h"
#include "reshard/resharding.h"

namespace tessera::reshard {
namespace {

using formats::CheckpointContents;
using formats::Format;
using formats::Piece;
using formats::StateKind;
using formats::TensorEntry;
using test::MemoryCheckpoint;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TensorEntry tensor(std::string fqn, Shape shape, std::vector<Piece> pieces = {}) {
  TensorEntry entry;
  entry.meta = {std::move(fqn), DType::float32, std::move(shape)};
  if (pieces.empty()) pieces.push_back({whole_box(entry.meta.shape), 0});
  entry.pieces = std::move(pieces);
  return entry;
}

/// A model of one linear layer under AdamW, as torch.distributed.checkpoint names it.
CheckpointContents adamw() {
  CheckpointContents contents;
  contents.tensors = {tensor("model.up.bias", {10}),
                      tensor("model.up.weight", {10, 4}),
                      tensor("optim.state.up.bias.exp_avg", {10}),
                      tensor("optim.state.up.bias.step", {}),
                      tensor("optim.state.up.weight.exp_avg", {10, 4}),
                      tensor("optim.state.up.weight.step", {})};
  return contents;
}

std::vector<Region> regions_of(const Plan& plan, std::string_view fqn) {
  std::vector<Region> regions;
  for (const Piece& piece : plan.destination.find_tensor(fqn)->pieces) {
    regions.push_back(piece.region);
  }
  return regions;
}

std::vector<std::string> lines_of(const std::vector<formats::Finding>& findings) {
  std::vector<std::string> lines;
  std::ranges::transform(findings, std::back_inserter(lines), formats::finding_to_string);
  return lines;
}

Error error_of(const CheckpointContents& contents, const PlanOptions& options) {
  try {
    plan_reshard(contents, "src", options);
  } catch (const Error& error) {
    return error;
  }
  throw std::logic_error("no error");
}

/// Returns the layout of a mesh of two ranks with these rules, in JSON.
MeshLayout mesh_of_two(const std::string& rules) {
  return MeshLayout::from_json(R"({"schema": 1, "mesh": [2], "rules": [)" + rules + "]}",
                               "mesh.json");
}

TEST(PlannerTest, WithoutARuleThePiecesStay) {
  CheckpointContents contents = adamw();
  contents.world_size = 2;
  contents.tensors[1].pieces = {{Box{{0, 0}, {6, 4}}, 0}, {Box{{6, 0}, {4, 4}}, 1}};
  const Plan plan = plan_reshard(contents, "src", {});
  EXPECT_EQ(plan.destination.world_size, 2);
  EXPECT_THAT(regions_of(plan, "model.up.weight"),
              ElementsAre(Box{{0, 0}, {6, 4}}, Box{{6, 0}, {4, 4}}));
}

// torchao's loader needs these texts of a safetensors file's __metadata__.
TEST(PlannerTest, TextsThatNameRenamedTensorsAreNoted) {
  CheckpointContents contents = adamw();
  contents.annotations = {{"format", "pt"}, {"model.up.bias", "{}"}, {"tensor_names", "[]"}};
  const auto notes = [&](const PlanOptions& options) {
    return lines_of(plan_reshard(contents, "src", options).notes);
  };
  PlanOptions options{.format = Format::safetensors};
  EXPECT_THAT(notes(options), IsEmpty());
  options.renames = {{"model.up.weight", "w"}};
  EXPECT_THAT(notes(options),
              ::testing::Contains(HasSubstr("1 text with names of tensors of the source, "
                                            "such as 'tensor_names'")));
  options.renames = {{"model.", ""}};
  EXPECT_THAT(notes(options), ElementsAre(HasSubstr("2 texts with names of tensors of the source, "
                                                    "such as 'model.up.bias'")));
}

TEST(PlannerTest, SecondNamesThatOtherLoadersMissAreNoted) {
  CheckpointContents contents = adamw();
  contents.aliases = {{"a.weight", "model.up.weight"}, {"model.head.weight", "model.up.weight"}};
  const auto notes = [&](const PlanOptions& options) {
    return lines_of(plan_reshard(contents, "src", options).notes);
  };
  EXPECT_THAT(notes({.format = Format::native}), IsEmpty());
  EXPECT_THAT(notes({.format = Format::dcp}), IsEmpty());
  EXPECT_THAT(
      notes({.format = Format::safetensors}),
      ElementsAre(HasSubstr("src: a.weight: tied names: expected a tensor of this name, for "
                            "other loaders than Tessera, found a second name of "
                            "'model.up.weight', which alone is stored (and 1 more name of "
                            "tied tensors)")));
  EXPECT_THAT(notes({.format = Format::safetensors, .only = NameSelection({"!model.head"})}),
              ElementsAre(HasSubstr("which alone is stored; a model")));
  EXPECT_THAT(notes({.format = Format::safetensors, .only = NameSelection({"model.up"})}),
              IsEmpty());
}

TEST(PlannerTest, ANewNameThatLeadsIntoAValueIsNoted) {
  CheckpointContents contents;
  contents.tensors = {tensor("a", {2}), tensor("head.old", {2})};
  contents.values = {{"head"}, {"step"}};
  const auto notes = [&](std::vector<Rename> renames) {
    return lines_of(plan_reshard(contents, "src", {.renames = std::move(renames)}).notes);
  };
  EXPECT_THAT(notes({{"a", "b.w"}}), IsEmpty());
  EXPECT_THAT(
      notes({{"a", "head.w"}}),
      ElementsAre("src: head.w: rename: expected a dict 'head' to put it into, found a value "
                  "of this name (an empty dict is one), so 'head.w' is a key beside it"));
  EXPECT_THAT(notes({{"a", "head.v.w"}, {"step", "head.step"}}),
              ElementsAre(HasSubstr("is a key beside it (and 1 more name)")));
}

TEST(PlannerTest, PositionsOfListsThatAreLeftOutAreNoted) {
  using formats::KeyPath;
  CheckpointContents contents;
  contents.tensors = {tensor("l.0", {2}), tensor("l.1", {2}), tensor("l.2", {2})};
  for (std::int64_t i = 0; i < 3; ++i) {
    contents.tensors[static_cast<std::size_t>(i)].key_path = KeyPath{std::string("l"), i};
  }
  contents.values = {{"opt.groups.0", KeyPath{"opt", "groups", std::int64_t{0}}},
                     {"opt.groups.1", KeyPath{"opt", "groups", std::int64_t{1}}},
                     {"per_rank.1.l.1", KeyPath{"per_rank", "1", "l", std::int64_t{1}}}};
  const auto notes = [&](std::vector<std::string> only) {
    return lines_of(plan_reshard(contents, "src", {.only = NameSelection(std::move(only))}).notes);
  };
  EXPECT_THAT(notes({}), IsEmpty());
  EXPECT_THAT(notes({"!l.2"}), IsEmpty());
  EXPECT_THAT(
      notes({"!l.0"}),
      ElementsAre("src: l: lists: expected an entry at each position before the last, found "
                  "1 position without one, which becomes None when the list is loaded"));
  EXPECT_THAT(notes({"l.2", "opt.groups.1"}),
              ElementsAre(HasSubstr("l: lists: expected an entry at each position before the last, "
                                    "found 3 positions without one, which become None")));
}

TEST(PlannerTest, ReplicasAreStoredOnce) {
  CheckpointContents contents = adamw();
  contents.tensors[0].pieces = {{whole_box(Shape{10}), 3}, {whole_box(Shape{10}), 1}};
  const Plan plan = plan_reshard(contents, "src", {});
  const TensorEntry* bias = plan.destination.find_tensor("model.up.bias");
  ASSERT_THAT(bias->pieces, SizeIs(1));
  EXPECT_EQ(bias->pieces[0].rank, 1);
}

// Shows E10.
TEST(PlannerTest, StateFollowsItsParameterByKind) {
  const Plan plan = plan_reshard(adamw(), "src", {.world_size = 4, .strategy = "dim0"});
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_EQ(regions_of(plan, "optim.state.up.weight.exp_avg"), regions_of(plan, "model.up.weight"));
  EXPECT_THAT(regions_of(plan, "optim.state.up.weight.step"), SizeIs(1));
  EXPECT_EQ(plan.destination.find_tensor("optim.state.up.weight.step")->kind,
            StateKind::scalar_parameter);
  EXPECT_EQ(plan.destination.find_tensor("optim.state.up.weight.exp_avg")->parameter,
            "model.up.weight");
}

TEST(PlannerTest, AShapeThatTheNameOfStateDoesNotSuggestIsNoted) {
  CheckpointContents contents;
  const auto add = [&](std::string name, Shape shape) {
    TensorEntry& tensor = contents.tensors.emplace_back();
    tensor.meta = {std::move(name), DType::float32, shape};
    tensor.pieces = {{whole_box(shape), 0}};
  };
  add("optim.state.w.exp_avg", {8});
  add("optim.state.w.exp_avg_sq", {3, 4});
  add("optim.state.w.row_sum", {8, 4});
  add("w", {8, 4});
  std::vector<std::string> notes;
  for (const auto& note : plan_reshard(contents, "src", {}).notes) notes.push_back(note.expected);
  EXPECT_THAT(notes, ElementsAre("the shape of w [8, 4], as the name suggests",
                                 "the shape of w [8, 4] or of its rows, as the name suggests",
                                 "one number for each row of w [8, 4], as the name suggests"));
}

TEST(PlannerTest, AMeshCutsByTheNewNamesAndStateFollows) {
  PlanOptions options{.renames = {{"model.", "net."}}};
  options.mesh = MeshLayout::from_json(
      R"x({"schema": 1, "mesh": [2, 2], "rules": [
          {"names": "net.up.weight", "placements": ["Shard(0)", "Shard(1)"]},
          {"names": "net.*", "placements": ["Shard(0)", "Replicate"]}]})x",
      "mesh.json");
  const Plan plan = plan_reshard(adamw(), "src", options);
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_EQ(plan.destination.world_size, 4);
  EXPECT_THAT(regions_of(plan, "net.up.weight"),
              ElementsAre(Box{{0, 0}, {5, 2}}, Box{{0, 2}, {5, 2}}, Box{{5, 0}, {5, 2}},
                          Box{{5, 2}, {5, 2}}));
  EXPECT_EQ(regions_of(plan, "optim.state.up.weight.exp_avg"), regions_of(plan, "net.up.weight"));
  EXPECT_THAT(regions_of(plan, "net.up.bias"), ElementsAre(Box{{0}, {5}}, Box{{5}, {5}}));
  EXPECT_THAT(regions_of(plan, "optim.state.up.bias.step"), SizeIs(1));
}

TEST(PlannerTest, LikeGivesThePiecesOfAnotherCheckpoint) {
  CheckpointContents other;
  other.world_size = 3;
  other.tensors = {
      tensor("net.up.bias", {10}, {{whole_box(Shape{10}), 0}, {whole_box(Shape{10}), 2}}),
      tensor("net.up.weight", {10, 4}, {{Box{{0, 0}, {7, 4}}, 1}, {Box{{7, 0}, {3, 4}}, 2}})};
  PlanOptions options{.renames = {{"model.", "net."}}};
  options.like = std::make_shared<const CheckpointContents>(other);
  const Plan plan = plan_reshard(adamw(), "src", options);
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_EQ(plan.destination.world_size, 3);
  EXPECT_EQ(plan.destination.find_tensor("net.up.weight")->pieces, other.tensors[1].pieces);
  EXPECT_THAT(regions_of(plan, "net.up.bias"), SizeIs(1));
  EXPECT_EQ(regions_of(plan, "optim.state.up.weight.exp_avg"), regions_of(plan, "net.up.weight"));
}

/// A tensor with two names.
CheckpointContents tied() {
  CheckpointContents contents;
  contents.tensors = {tensor("embed", {8, 4})};
  contents.aliases = {{.fqn = "head", .target = "embed"}};
  return contents;
}

TEST(PlannerTest, AMeshCutsATiedTensorByTheNameThatIsMoved) {
  PlanOptions options{.format = Format::dcp};
  options.mesh = mesh_of_two(R"x({"names": "embed", "placements": ["Shard(0)"]},
          {"names": "head", "placements": ["Shard(1)"]})x");
  const Plan both = plan_reshard(tied(), "src", options);
  EXPECT_THAT(both.problems, IsEmpty());
  EXPECT_THAT(regions_of(both, "embed"), ElementsAre(Box{{0, 0}, {4, 4}}, Box{{4, 0}, {4, 4}}));
  EXPECT_THAT(regions_of(both, "head"), ElementsAre(Box{{0, 0}, {8, 2}}, Box{{0, 2}, {8, 2}}));

  options.mesh->rules.erase(options.mesh->rules.begin());  // no rule fits `embed`
  options.only = NameSelection({"head"});
  const Plan one = plan_reshard(tied(), "src", options);
  EXPECT_THAT(one.problems, IsEmpty());
  EXPECT_THAT(regions_of(one, "head"), ElementsAre(Box{{0, 0}, {8, 2}}, Box{{0, 2}, {8, 2}}));
}

TEST(PlannerTest, LikeHasTheNamesThatAreMoved) {
  CheckpointContents other;
  other.world_size = 2;
  other.tensors = {tensor("head", {8, 4}, {{Box{{0, 0}, {3, 4}}, 0}, {Box{{3, 0}, {5, 4}}, 1}}),
                   tensor("per_rank.1.net.up", {2}, {{whole_box(Shape{2}), 1}})};
  CheckpointContents source = tied();
  source.tensors.push_back(tensor("per_rank.1.model.up", {2}));
  PlanOptions options{.only = NameSelection({"head", "per_rank"}), .renames = {{"model.", "net."}}};
  options.like = std::make_shared<const CheckpointContents>(other);
  const Plan plan = plan_reshard(source, "src", options);
  EXPECT_THAT(lines_of(plan.problems), IsEmpty());
  EXPECT_EQ(plan.destination.find_tensor("head")->pieces, other.tensors[0].pieces);
  EXPECT_EQ(plan.destination.find_tensor("per_rank.1.net.up")->pieces, other.tensors[1].pieces);
}

TEST(PlannerTest, EntriesOfRanksAreCutLikeWhatRanksShareIfNothingNamesThem) {
  CheckpointContents source;
  source.tensors = {tensor("per_rank.1.w", {8}), tensor("per_rank.2.w", {8}), tensor("w", {8})};
  PlanOptions options;
  options.mesh = mesh_of_two(R"x({"names": "w", "placements": ["Shard(0)"]},
          {"names": "per_rank.2.*", "placements": ["Replicate"]})x");
  const Plan by_mesh = plan_reshard(source, "src", options);
  EXPECT_THAT(lines_of(by_mesh.problems), IsEmpty());
  EXPECT_EQ(regions_of(by_mesh, "per_rank.1.w"), regions_of(by_mesh, "w"));
  EXPECT_THAT(regions_of(by_mesh, "per_rank.2.w"), SizeIs(1));

  CheckpointContents other;
  other.world_size = 2;
  other.tensors = {tensor("per_rank.2.w", {8}),
                   tensor("w", {8}, {{Box{{0}, {3}}, 0}, {Box{{3}, {5}}, 1}})};
  options.mesh.reset();
  options.like = std::make_shared<const CheckpointContents>(other);
  const Plan by_like = plan_reshard(source, "src", options);
  EXPECT_THAT(lines_of(by_like.problems), IsEmpty());
  EXPECT_EQ(regions_of(by_like, "per_rank.1.w"), regions_of(by_like, "w"));
  EXPECT_THAT(regions_of(by_like, "per_rank.2.w"), SizeIs(1));
}

TEST(PlannerTest, LikeReportsEachNameWithoutItsShapeOnce) {
  PlanOptions options{.like_path = "other"};
  CheckpointContents other;
  other.tensors = {tensor("model.up.weight", {10, 5})};
  options.like = std::make_shared<const CheckpointContents>(other);
  EXPECT_THAT(
      lines_of(plan_reshard(adamw(), "src", options).problems),
      ElementsAre("other: model.up.bias: pieces of another checkpoint: expected a tensor of "
                  "this name, found none",
                  "other: model.up.weight: pieces of another checkpoint: expected the shape "
                  "[10, 4], found [10, 5]"));
}

TEST(PlannerTest, AMeshReportsEachParameterWithoutARuleOnce) {
  PlanOptions options;
  options.mesh = mesh_of_two(R"x({"names": "*.bias", "placements": ["Shard(1)"]})x");
  EXPECT_THAT(
      lines_of(plan_reshard(adamw(), "src", options).problems),
      ElementsAre("mesh.json: model.up.bias: rules of the mesh: expected a dimension of the "
                  "shape [10], found Shard(1) for '*.bias'",
                  "mesh.json: model.up.weight: rules of the mesh: expected a rule whose "
                  "names match, such as a last rule for *, found none"));
}

TEST(PlannerTest, AMeshNotesRulesThatNoTensorNeeds) {
  PlanOptions options;
  options.mesh = mesh_of_two(R"x({"names": "model.*", "placements": ["Shard(0)"]},
          {"names": "model.up.bias", "placements": ["Replicate"]})x");
  const Plan plan = plan_reshard(adamw(), "src", options);
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_THAT(
      lines_of(plan.notes),
      ElementsAre("mesh.json: rule for 'model.up.bias': expected a moved tensor whose first "
                  "matching rule is this one, found none"));
}

TEST(PlannerTest, ARenameOfStateOfOneRankNotesItsListOfParameters) {
  CheckpointContents source = adamw();
  source.tensors.push_back(tensor("per_rank.1.optim.state.up.bias.exp_avg", {10}));
  source.values.push_back({"per_rank.1.optim.param_groups.0.params", {}});
  const PlanOptions options{
      .renames = {{"per_rank.1.optim.state.up.", "per_rank.1.optim.state.top."}}};
  const Plan plan = plan_reshard(source, "src", options);
  EXPECT_NE(plan.destination.find_tensor("per_rank.1.optim.state.top.bias.exp_avg"), nullptr);
  EXPECT_THAT(lines_of(plan.notes),
              ::testing::Contains(HasSubstr("per_rank.1.optim.param_groups.0.params: rename: "
                                            "expected names of parameters as their state")));
}

TEST(PlannerTest, LayoutsExcludeEachOther) {
  PlanOptions options{.strategy = "dim0"};
  options.mesh = mesh_of_two(R"x({"names": "*", "placements": ["Shard(0)"]})x");
  EXPECT_THAT(error_of(adamw(), options).what(), HasSubstr("either a mesh or a strategy"));
  options.strategy.clear();
  options.world_size = 4;
  EXPECT_THAT(error_of(adamw(), options).what(), HasSubstr("expected 2, as in the mesh, found 4"));
  options.world_size = 0;
  options.format = Format::torch_zip;
  EXPECT_THAT(error_of(adamw(), options).what(), HasSubstr("the format holds whole tensors"));
  options.like = std::make_shared<const CheckpointContents>(adamw());
  EXPECT_THAT(error_of(adamw(), options).what(),
              HasSubstr("another checkpoint's layout, or a world size"));
}

// Shows E14.
TEST(PlannerTest, MoreRanksThanRowsLeavesRanksWithoutPieces) {
  const Plan plan = plan_reshard(adamw(), "src", {.world_size = 64, .strategy = "dim0"});
  EXPECT_THAT(regions_of(plan, "model.up.bias"), SizeIs(10));
  EXPECT_EQ(plan.destination.world_size, 64);
}

TEST(PlannerTest, FlatCutsAUnitAcrossItsParameters) {
  CheckpointContents contents = adamw();
  contents.units = {make_flat_unit("up", DType::float32,
                                   {{"model.up.weight", {10, 4}}, {"model.up.bias", {10}}})};
  const Plan plan = plan_reshard(contents, "src", {.world_size = 4, .strategy = "flat"});
  // 50 elements: 13 on each rank, so the last rank holds 1 of the weight and the bias.
  EXPECT_THAT(
      regions_of(plan, "model.up.weight"),
      ElementsAre(FlatRange{0, 13}, FlatRange{13, 26}, FlatRange{26, 39}, FlatRange{39, 40}));
  EXPECT_THAT(regions_of(plan, "model.up.bias"), ElementsAre(FlatRange{0, 10}));
  EXPECT_EQ(plan.destination.find_tensor("model.up.bias")->pieces[0].rank, 3);
  EXPECT_THAT(plan.destination.units, SizeIs(1));
}

TEST(PlannerTest, UnitsThatAreGivenHaveTheShapesAndDtypesOfTheSource) {
  const auto problems_of = [](FlatUnit unit) {
    return plan_reshard(adamw(), "src",
                        {.world_size = 4, .strategy = "flat", .units = {std::move(unit)}})
        .problems;
  };
  EXPECT_THAT(problems_of(make_flat_unit("up", DType::float32, {{"model.up.bias", {10}}})),
              IsEmpty());
  const auto of_other_dtype =
      problems_of(make_flat_unit("up", DType::bfloat16, {{"model.up.bias", {10}}}));
  ASSERT_THAT(of_other_dtype, SizeIs(1));
  EXPECT_EQ(finding_to_string(of_other_dtype[0]),
            "src: model.up.bias: units: expected dtype float32, found bfloat16 in the units");
  const auto of_other_shape =
      problems_of(make_flat_unit("up", DType::float32, {{"model.up.bias", {11}}}));
  ASSERT_THAT(of_other_shape, SizeIs(1));
  EXPECT_EQ(of_other_shape[0].expected, "shape [10]");
}

TEST(PlannerTest, UnitsAreCastWithTheirParameters) {
  CheckpointContents contents = adamw();
  contents.units = {make_flat_unit("up", DType::float32, {{"model.up.bias", {10}}})};
  const Plan plan =
      plan_reshard(contents, "src", {.world_size = 4, .strategy = "flat", .cast = DType::bfloat16});
  EXPECT_EQ(plan.destination.find_tensor("model.up.bias")->meta.dtype, DType::bfloat16);
  ASSERT_THAT(plan.destination.units, SizeIs(1));
  EXPECT_EQ(plan.destination.units[0].dtype, DType::bfloat16);
}

TEST(PlannerTest, FlatWithoutUnitsIsRefused) {
  EXPECT_THAT(error_of(adamw(), {.world_size = 4, .strategy = "flat"}).what(),
              HasSubstr("PlanOptions::units"));
}

TEST(PlannerTest, DcpGetsBoxesInsteadOfRangesAndTensorsInsteadOfAliases) {
  CheckpointContents contents = adamw();
  contents.aliases = {{"model.head.weight", "model.up.weight", {}}};
  contents.units = {make_flat_unit("up", DType::float32, {{"model.up.weight", {10, 4}}})};
  const Plan plan =
      plan_reshard(contents, "src", {.format = Format::dcp, .world_size = 3, .strategy = "flat"});
  EXPECT_THAT(plan.destination.aliases, IsEmpty());
  ASSERT_NE(plan.destination.find_tensor("model.head.weight"), nullptr);
  for (const Piece& piece : plan.destination.find_tensor("model.up.weight")->pieces) {
    EXPECT_TRUE(std::holds_alternative<Box>(piece.region));
  }
  EXPECT_THAT(check_coverage(regions_of(plan, "model.up.weight"), Shape{10, 4}), IsEmpty());
}

TEST(PlannerTest, HybridSpreadsTheWritingOverReplicas) {
  const Plan plan = plan_reshard(adamw(), "src", {.strategy = "hybrid:2x2"});
  EXPECT_EQ(plan.destination.world_size, 4);
  std::set<int> ranks;
  for (const TensorEntry& entry : plan.destination.tensors) {
    for (const Piece& piece : entry.pieces) ranks.insert(piece.rank);
  }
  EXPECT_THAT(ranks, ElementsAre(0, 1, 2, 3));
}

std::vector<std::string> lines(const std::vector<formats::Finding>& findings) {
  std::vector<std::string> lines;
  for (const auto& finding : findings) lines.push_back(formats::finding_to_string(finding));
  return lines;
}

// Shows E7.
TEST(PlannerTest, AllThatLiesInLostFilesComesInOneReport) {
  CheckpointContents contents = adamw();
  contents.tensors[1].pieces = {{Box{{0, 0}, {6, 4}}, 0}, {Box{{6, 0}, {4, 4}}, 1}};
  contents.values = {{"epoch", {}}, {"step", {}}};
  contents.units = {
      make_flat_unit("up", DType::float32, {{"model.up.bias", {10}}, {"model.up.weight", {10, 4}}}),
      make_flat_unit("bias", DType::float32, {{"model.up.bias", {10}}})};
  SourceGaps gaps;
  gaps.missing.pieces = {{1, {{1, "r1"}}}, {4, {{0, "r0"}}}};
  gaps.missing.values = {{1, "r0"}};
  const std::string said = " that the checkpoint lists, found none";
  const auto report =
      ElementsAre("src: model.up.weight: structure: expected the file r1" + said,
                  "src: optim.state.up.weight.exp_avg: structure: expected the file r0" + said,
                  "src: step: structure: expected the file r0" + said);
  EXPECT_THAT(lines(plan_reshard(contents, "src", {}, gaps).problems), report);

  const Plan relaxed = plan_reshard(contents, "src", {.missing = Relaxation::allow}, gaps);
  EXPECT_THAT(relaxed.problems, IsEmpty());
  std::vector<std::string> notes = lines(relaxed.notes);
  ASSERT_THAT(notes, SizeIs(4));
  EXPECT_THAT(notes.back(), testing::HasSubstr("found 1 unit left out"));
  notes.pop_back();
  EXPECT_THAT(notes, report);
  EXPECT_THAT(relaxed.destination.tensors, SizeIs(4));
  EXPECT_THAT(relaxed.value_sources, ElementsAre(0));
  ASSERT_THAT(relaxed.destination.units, SizeIs(1));  // a unit without a parameter is dropped
  EXPECT_EQ(relaxed.destination.units[0].name, "bias");

  // Missing entries that `only` does not select are no problem.
  const PlanOptions others{.only = NameSelection({"model.up.bias", "epoch"})};
  EXPECT_THAT(plan_reshard(contents, "src", others, gaps).problems, IsEmpty());
}

// Shows E7.
TEST(PlannerTest, ReplicasStandInForPiecesInLostFiles) {
  CheckpointContents contents;
  const Piece first{Box{{0}, {4}}, 0};
  contents.tensors = {tensor("w", {8}, {first, {Box{{4}, {4}}, 1}, first, {Box{{4}, {4}}, 3}})};
  contents.world_size = 4;
  SourceGaps gaps;
  gaps.missing.pieces = {{0, {{0, "r0"}, {1, "r1"}}}};
  for (const int world_size : {0, 1, 3}) {
    const Plan plan = plan_reshard(contents, "src", {.world_size = world_size}, gaps);
    EXPECT_THAT(plan.problems, IsEmpty());
    EXPECT_THAT(
        lines(plan.notes),
        ElementsAre("src: w: structure: expected the files r0, r1 that the checkpoint lists, found "
                    "none, but other files have copies of all its data"));
    for (const auto& pieces : plan.copies[0].source_pieces) {
      EXPECT_THAT(pieces, testing::Each(testing::AnyOf(2U, 3U)));
      EXPECT_FALSE(pieces.empty());
    }
  }
  gaps.missing.pieces[0].emplace(3, "r3");
  EXPECT_THAT(plan_reshard(contents, "src", {}, gaps).problems, SizeIs(1));
}

// Shows E3.
TEST(PlannerTest, AllValuesThatAreNeverReadComeInOneReport) {
  CheckpointContents contents;
  contents.values = {{"a*[b]", {}}, {"args", {}}, {"epoch", {}}};
  SourceGaps gaps;
  for (const std::size_t v : {std::size_t{0}, std::size_t{1}}) {
    gaps.refused_values.emplace(
        v, Error(ErrorKind::unsupported, {.path = "src/f"}, "pickle: foreign global x.Y"));
  }
  for (const Relaxation missing : {Relaxation::refuse, Relaxation::allow}) {
    EXPECT_THAT(
        lines(plan_reshard(contents, "src", {.missing = missing}, gaps).problems),
        ElementsAre("src/f: a*[b]: value: expected a value of plain types, found pickle: foreign "
                    "global x.Y (to leave it out, add '!a\\*\\[b]' to the names)",
                    "src/f: args: value: expected a value of plain types, found pickle: foreign "
                    "global x.Y (to leave it out, add '!args' to the names)"));
  }
  const PlanOptions others{.only = NameSelection({"!args", "!a\\*\\[b]"})};
  EXPECT_THAT(plan_reshard(contents, "src", others, gaps).problems, IsEmpty());
}

/// A checkpoint whose values cannot be read.
class FailingValues final : public formats::DerivedReader {
 public:
  FailingValues(std::unique_ptr<formats::CheckpointReader> base, ErrorKind kind)
      : DerivedReader(std::move(base)), kind_(kind) {
    contents_.values = {{"a", {}}, {"b", {}}, {"c", {}}};
  }
  Value read_value(std::size_t) const override {
    ++num_reads;
    throw Error(kind_, {}, "no answer");
  }
  void read_piece(std::size_t, std::size_t, FlatRange, std::span<std::byte>) const override {}
  formats::PieceStorage piece_storage(std::size_t, std::size_t) const override { return {}; }

  mutable int num_reads = 0;

 private:
  ErrorKind kind_;
};

TEST(PlannerTest, AServerThatDoesNotAnswerIsAskedForOneValueOnly) {
  for (const auto& [kind, num_reads, num_refused] :
       {std::tuple(ErrorKind::io, 1, 0), std::tuple(ErrorKind::corruption, 3, 0),
        std::tuple(ErrorKind::unsupported, 3, 3)}) {
    const FailingValues reader(std::make_unique<MemoryCheckpoint>(), kind);
    EXPECT_THAT(find_gaps(reader, {}).refused_values, SizeIs(num_refused));
    EXPECT_EQ(reader.num_reads, num_reads);
  }
}

TEST(PlannerTest, AdviceToLeaveOutAValueLeavesOutNothingBelowIt) {
  CheckpointContents contents = adamw();
  contents.values = {{"model", {}}};
  SourceGaps gaps;
  gaps.refused_values.emplace(
      0, Error(ErrorKind::unsupported, {.path = "src/f"}, "pickle: foreign global x.Y"));
  const Plan refused = plan_reshard(contents, "src", {}, gaps);
  ASSERT_THAT(refused.problems, SizeIs(1));
  const std::string advised = "!" + refused.problems[0].remedy.argument;
  EXPECT_EQ(advised, "!=model");
  const Plan plan = plan_reshard(contents, "src", {.only = NameSelection({advised})}, gaps);
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_THAT(plan.destination.tensors, SizeIs(contents.tensors.size()));
}

TEST(PlannerTest, WhatTheOptionsLeaveOutIsCounted) {
  CheckpointContents contents = adamw();
  contents.values = {{"epoch", {}}, {"step", {}}};
  contents.aliases = {{"tied", "model.up.weight", {}}};
  const auto left_out_by = [&](const PlanOptions& options) {
    return plan_reshard(contents, "src", options).left_out;
  };
  EXPECT_EQ(left_out_by({}), LeftOut{});
  const std::size_t num_tensors = contents.tensors.size();
  EXPECT_EQ(left_out_by({.only = NameSelection({"step"})}), (LeftOut{num_tensors, 1, 1}));
  EXPECT_EQ(left_out_by({.only = NameSelection({"!model.up.weight"})}), (LeftOut{0, 0, 1}));
  EXPECT_EQ(left_out_by({.only = NameSelection({"!model.up.bias"})}), (LeftOut{1, 0, 0}));
  EXPECT_EQ(left_out_by({.optimizer = OptimizerSelection::leave_out}),
            (LeftOut{num_tensors - 2, 0, 0}));
}

// Shows E7.
TEST(PlannerTest, AllHolesAndOverlapsComeInOneReport) {
  CheckpointContents contents = adamw();
  contents.tensors[0].pieces = {{Box{{0}, {4}}, 0}};
  contents.tensors[1].pieces = {{Box{{0, 0}, {6, 4}}, 0}, {Box{{5, 0}, {5, 4}}, 1}};
  const Plan plan = plan_reshard(contents, "src", {});
  ASSERT_THAT(plan.problems, SizeIs(2));
  EXPECT_EQ(plan.problems[0].where.fqn, "model.up.bias");
  EXPECT_EQ(plan.problems[1].where.fqn, "model.up.weight");

  const Plan relaxed = plan_reshard(contents, "src", {.missing = Relaxation::allow});
  ASSERT_THAT(relaxed.problems, SizeIs(1));  // an overlap is always a problem
  EXPECT_THAT(relaxed.notes, SizeIs(1));
  EXPECT_EQ(relaxed.destination.find_tensor("model.up.bias"), nullptr);
}

TEST(PlannerTest, OnePartOfACheckpointIsMovedOnlyAsItIs) {
  CheckpointContents contents = adamw();
  contents.part = formats::PartOfWhole{.form = "ZeRO", .num_parts = 8};
  const Plan refused = plan_reshard(contents, "src", {});
  ASSERT_THAT(refused.problems, SizeIs(1));
  EXPECT_EQ(refused.problems[0].found, "one rank of 8: ZeRO");
  EXPECT_EQ(refused.problems[0].remedy, Remedy{Remedy::Action::take_as_is});
  const Plan plan = plan_reshard(contents, "src", {.part = Relaxation::allow});
  EXPECT_THAT(plan.problems, IsEmpty());
  ASSERT_THAT(plan.notes, SizeIs(1));
  EXPECT_EQ(plan.notes[0].found, "one rank of 8: ZeRO");
  EXPECT_THAT(plan.destination.tensors, SizeIs(contents.tensors.size()));
}

TEST(PlannerTest, ARenameThatEndsWithinANumberIsNoted) {
  CheckpointContents contents;
  for (const char* const name : {"layers.1", "layers.1.w", "layers.10.w", "layers.11.w"}) {
    contents.tensors.push_back(tensor(name, {1}));
  }
  contents.values.push_back({.name = "layers.12"});
  const auto notes = [&](const Rename& rename) {
    return lines_of(plan_reshard(contents, "src", {.renames = {rename}}).notes);
  };
  EXPECT_THAT(notes({"layers.1", "layers.9"}),
              ElementsAre(HasSubstr(
                  "layers.10.w: rename: expected a dot after 'layers.1', or nothing, found 3 names "
                  "in which more digits follow: this one becomes 'layers.90.w' "
                  "(layers.1.=layers.9. changes none of them)")));
  EXPECT_THAT(notes({"layers.1.", "layers.9."}), testing::IsEmpty());
  EXPECT_THAT(notes({"layers", "blocks"}), testing::IsEmpty());
  EXPECT_THAT(notes({"lay", "lai"}), testing::IsEmpty());
  EXPECT_THAT(notes({"", "model."}), testing::IsEmpty());
}

TEST(PlannerTest, RenameReplacesAPrefixAndKeepsTheNesting) {
  CheckpointContents contents = adamw();
  contents.tensors[1].key_path = {std::string("model"), std::string("up.weight")};
  const Plan plan = plan_reshard(contents, "src", {.renames = {{"model.", "net."}}});
  const TensorEntry* weight = plan.destination.find_tensor("net.up.weight");
  ASSERT_NE(weight, nullptr);
  EXPECT_EQ(weight->key_path, (formats::KeyPath{std::string("net"), std::string("up.weight")}));
  EXPECT_EQ(plan.destination.find_tensor("optim.state.up.weight.exp_avg")->parameter,
            "net.up.weight");
}

TEST(PlannerTest, RenameKeepsTheNestingOfWhatIsKept) {
  const formats::Key number = *formats::dict_key(0);
  struct Case {
    formats::KeyPath path;
    Rename rename;
    formats::KeyPath expected;
  };
  const std::vector<Case> cases = {
      {{"model", "up", number}, {"model", "net"}, {"net", "up", number}},
      {{"model", "up", number}, {"mod", "no"}, {"noel", "up", number}},
      {{"model", "up", number}, {"model.", "a.b."}, {"a.b", "up", number}},
      {{"model", "up", number}, {"", "all."}, {"all", "model", "up", number}},
      {{"model", "up", number}, {"", "my_"}, {"my_model", "up", number}},
      {{"model", "up", number}, {"model.up.", ""}, {number}},
      {{"model", "layers.3", 0, "w"},
       {"model.layers.", "model.blocks."},
       {"model", "blocks.3", 0, "w"}},
      {{"optim", "state", "encoder.w", "m"},
       {"optim.state.encoder.", "optim.state."},
       {"optim", "state", "w", "m"}},
      {{"list", 1, "k", number}, {"list.1", "one"}, {"one", "k", number}},
      {{"list", 1, "k", number}, {"list.1.k.0", "x"}, {"x"}},
      {{"state", number, "s"}, {"state.0", "state.7"}, {"state", *formats::dict_key(7), "s"}},
      {{"state", number, "s"}, {"state.0.", "state.-7."}, {"state", *formats::dict_key(-7), "s"}},
      {{"state", number, "s"}, {"state.0.", "state.07."}, {"state", "07", "s"}},
      {{"state", number, "s"}, {"state.0", "other.7"}, {"other.7", "s"}},
      {{"state", *formats::dict_key(true), "s"}, {"state.True", "state.1"}, {"state", "1", "s"}},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(formats::spell(each.path) + " " + each.rename.from + "=" + each.rename.to);
    CheckpointContents contents;
    contents.tensors.push_back({.meta = {formats::spell(each.path), DType::uint8, {1}},
                                .key_path = each.path,
                                .pieces = {{Box{{0}, {1}}, 0}}});
    const Plan plan = plan_reshard(contents, "src", {.renames = {each.rename}});
    EXPECT_EQ(plan.destination.tensors.front().key_path, each.expected);
    EXPECT_EQ(plan.destination.tensors.front().meta.fqn, formats::spell(each.expected));
  }
}

/// Plans a rename of a checkpoint with a one-byte tensor at each path. Returns the new paths. An
/// empty path is that of a top-level key.
std::vector<formats::KeyPath> paths_after(const std::vector<formats::KeyPath>& paths,
                                          const std::vector<Rename>& renames) {
  CheckpointContents contents;
  for (const formats::KeyPath& path : paths) {
    const bool is_top_level = path.size() == 1;
    contents.tensors.push_back({.meta = {formats::spell(path), DType::uint8, {1}},
                                .key_path = is_top_level ? formats::KeyPath{} : path,
                                .pieces = {{Box{{0}, {1}}, 0}}});
  }
  std::vector<formats::KeyPath> after;
  for (const TensorEntry& tensor :
       plan_reshard(contents, "src", {.renames = renames}).destination.tensors) {
    after.push_back(tensor.key_path);
    if (!tensor.key_path.empty()) {
      EXPECT_EQ(formats::spell(tensor.key_path), tensor.meta.fqn);
    }
  }
  return after;
}

TEST(PlannerTest, ANewNameGoesIntoTheDictThatItBeginsWith) {
  using Paths = std::vector<formats::KeyPath>;
  const formats::Key one = *formats::dict_key(1);
  EXPECT_EQ(paths_after({{"blk", "u"}, {"w"}}, {{"", "model."}}),
            (Paths{{"model", "blk", "u"}, {"model", "w"}}));
  EXPECT_EQ(paths_after({{"e"}, {"v", "y"}}, {{"e", "v.z"}}), (Paths{{"v", "y"}, {"v", "z"}}));
  EXPECT_EQ(paths_after({{"e", "a"}, {"q"}, {"v", "y"}}, {{"e", "v.z"}, {"q", "v.z.b"}}),
            (Paths{{"v", "y"}, {"v", "z", "a"}, {"v", "z", "b"}}));
  EXPECT_EQ(paths_after({{"s", *formats::dict_key(0), "a"}, {"s", one, "b"}}, {{"s.0.a", "s.1.t"}}),
            (Paths{{"s", one, "b"}, {"s", one, "t"}}));
  EXPECT_EQ(paths_after({{"s", one, "b"}, {"x", "t"}}, {{"x", "s.1"}}),
            (Paths{{"s", one, "b"}, {"s", one, "t"}}));
  EXPECT_EQ(paths_after({{"l", 0, "a"}, {"x"}}, {{"x", "l.0.b"}}),
            (Paths{{"l", 0, "a"}, {"l", 0, "b"}}));
}

TEST(PlannerTest, APrefixForAllNamesSplitsNoKey) {
  EXPECT_EQ(paths_after({{"w", "a"}, {"w.up"}}, {{"", "run."}}),
            (std::vector<formats::KeyPath>{{"run", "w", "a"}, {"run", "w.up"}}));
}

TEST(PlannerTest, ANewNameIsOneKeyWhereNoDictHasItsBeginning) {
  using Paths = std::vector<formats::KeyPath>;
  EXPECT_EQ(paths_after({{"b.w"}, {"w"}}, {{"", "module."}}), (Paths{{}, {}}));
  EXPECT_EQ(paths_after({{"l", 0}, {"x"}}, {{"x", "l.1"}}), (Paths{{"l", 0}, {}}));
  EXPECT_EQ(paths_after({{"e", "a"}, {"x"}}, {{"e", "b.c"}, {"x", "b.d"}}),
            (Paths{{"b.c", "a"}, {}}));
}

TEST(PlannerTest, RenameOntoAnotherNameIsAProblem) {
  const Plan plan =
      plan_reshard(adamw(), "src", {.renames = {{"model.up.bias", "model.up.weight"}}});
  ASSERT_THAT(plan.problems, SizeIs(1));
  EXPECT_EQ(plan.problems[0].where.fqn, "model.up.weight");
}

TEST(PlannerTest, ARenameThatMakesNamesNothingCanNestIsAProblem) {
  CheckpointContents contents = adamw();
  contents.values = {{"step"}};
  const PlanOptions options{.format = Format::safetensors, .renames = {{"step", "model"}}};
  for (TensorEntry& each : contents.tensors) {
    const std::size_t dot = each.meta.fqn.find('.');
    each.key_path = {each.meta.fqn.substr(0, dot), each.meta.fqn.substr(dot + 1)};
  }
  const Plan plan = plan_reshard(contents, "src", options);
  ASSERT_THAT(plan.problems, SizeIs(1));
  EXPECT_THAT(plan.problems[0].found, HasSubstr("expected a value at model, found a dict"));
  contents.values[0].name = "optim";  // the source does not nest either, so it moves as before
  EXPECT_THAT(plan_reshard(contents, "src", {.renames = {{"model.up", "model.down"}}}).problems,
              IsEmpty());
}

TEST(PlannerTest, AnEmptyNameIsANameUnlessARenameMadeIt) {
  CheckpointContents contents = adamw();
  contents.tensors.front().meta.fqn = "";
  EXPECT_THAT(plan_reshard(contents, "src", {}).problems, IsEmpty());
  EXPECT_THAT(plan_reshard(adamw(), "src", {.renames = {{"model.up.bias", ""}}}).problems,
              SizeIs(1));
}

TEST(PlannerTest, OnlySelectsAndAnAliasWithoutItsTargetBecomesATensor) {
  CheckpointContents contents = adamw();
  contents.aliases = {{"model.head.weight", "model.up.weight", {}}};
  const Plan plan = plan_reshard(contents, "src", {.only = NameSelection({"model.head.*"})});
  ASSERT_THAT(plan.destination.tensors, SizeIs(1));
  EXPECT_EQ(plan.destination.tensors[0].meta.fqn, "model.head.weight");
  EXPECT_THAT(error_of(contents, {.only = NameSelection({"nothing*"})}).what(),
              HasSubstr("names to move"));
}

// Otherwise the next move would not find the parameter of the state.
TEST(PlannerTest, StateOfATiedParameterNamesTheTensorThatIsMoved) {
  CheckpointContents contents = adamw();
  contents.aliases = {{"model.head.weight", "model.up.weight", {}}};
  const auto parameter = [&](const PlanOptions& options) -> std::string {
    const Plan plan = plan_reshard(contents, "src", options);
    const TensorEntry* const state = plan.destination.find_tensor("optim.state.up.weight.exp_avg");
    return state == nullptr ? "none" : state->parameter.str();
  };
  EXPECT_EQ(parameter({}), "model.up.weight");
  EXPECT_EQ(parameter({.only = NameSelection({"!model.up.weight"}),
                       .renames = {{"model.head", "model.tok"}}}),
            "model.tok.weight");
}

TEST(PlannerTest, AnExclusionThatMatchesNoNameIsANote) {
  const Plan plan = plan_reshard(adamw(), "src", {.only = NameSelection({"!optimizer"})});
  EXPECT_EQ(plan.destination.tensors.size(), adamw().tensors.size());
  EXPECT_THAT(lines_of(plan.notes),
              ElementsAre("src: names to move: expected an exclusion that matches a name, "
                          "found '!optimizer', which leaves nothing out"));
  EXPECT_THAT(error_of(adamw(), {.only = NameSelection({"!optimizer", "modle"})}).what(),
              HasSubstr("a pattern that matches a name, found 'modle'"));
}

TEST(PlannerTest, TheOptimizerIsLeftOutWhereAskedFor) {
  CheckpointContents source = adamw();
  source.values = {{"epoch", {}}, {"optim.param_groups.0.lr", {}}};
  const Plan plan = plan_reshard(source, "src", {.optimizer = OptimizerSelection::leave_out});
  EXPECT_THAT(plan.problems, IsEmpty());
  ASSERT_THAT(plan.destination.tensors, SizeIs(2));
  EXPECT_EQ(plan.destination.tensors[1].meta.fqn, "model.up.weight");
  ASSERT_THAT(plan.destination.values, SizeIs(1));
  EXPECT_EQ(plan.destination.values[0].name, "epoch");
  EXPECT_EQ(plan.value_sources, std::vector<std::size_t>{0});
}

TEST(PlannerTest, StateThatNothingProvesIsMovedWithANote) {
  const auto notes_of = [](std::vector<TensorEntry> tensors) {
    CheckpointContents source;
    source.tensors = std::move(tensors);
    const Plan plan = plan_reshard(source, "src", {.optimizer = OptimizerSelection::leave_out});
    EXPECT_EQ(plan.destination.tensors.size(), source.tensors.size());
    return lines_of(plan.notes);
  };
  EXPECT_THAT(notes_of({tensor("model.w", {2}), tensor("opt.state.0.exp_avg", {2}),
                        tensor("opt.state.1.exp_avg", {2})}),
              ElementsAre("src: opt.state.0.exp_avg: optimizer left out: expected its parameter in "
                          "the checkpoint, or param_groups beside its state, found neither, so 2 "
                          "tensors that may be optimizer state are moved (leave out by name what "
                          "is not of a model)"));
  EXPECT_THAT(notes_of({tensor("model.optimizer.state.w", {2}), tensor("model.w", {2})}), SizeIs(1))
      << "a module called optimizer";
  EXPECT_THAT(notes_of({tensor("enc.state.w", {2}), tensor("model.w", {2})}), IsEmpty());
}

TEST(PlannerTest, CopiesOfParametersInTheDictOfAnOptimizerAreMovedWithANote) {
  const auto notes_of = [](const std::string& copy, const std::string& groups) {
    CheckpointContents source;
    source.tensors = {tensor("model.w", {2}), tensor("optimizer.a.state.0.exp_avg", {2}),
                      tensor(copy, {2})};
    source.values = {{groups, {}}};
    const Plan plan = plan_reshard(source, "src", {.optimizer = OptimizerSelection::leave_out});
    EXPECT_EQ(plan.destination.tensors.size(), 2U);
    return lines_of(plan.notes);
  };
  EXPECT_THAT(notes_of("optimizer.fp32_groups.0.0", "optimizer.a.param_groups.0.lr"),
              ElementsAre("src: optimizer.fp32_groups.0.0: optimizer left out: expected 'state', "
                          "'param_groups' or 'grad_scaler' in the dict of an optimizer, found "
                          "another entry, so 1 tensor that may be optimizer state is moved (leave "
                          "out by name what is not of a model)"));
  EXPECT_THAT(notes_of("optimizer_like.w", "optimizer.a.param_groups.0.lr"), IsEmpty());
}

TEST(PlannerTest, StateOfTablesThatThePlanDoesNotNameIsTold) {
  CheckpointContents source;
  source.tensors = {tensor("model.embedding_bags.a.weight", {6, 8}),
                    tensor("model.embedding_bags.b.weight", {6, 8}),
                    tensor("optim.state.embedding_bags.a.weight.sum", {6, 8}),
                    tensor("optim.state.embedding_bags.b.weight.sum", {6, 8})};
  PlanOptions options{
      .world_size = 2, .strategy = "replicated", .optimizer_names = OptimizerNames::torchrec};
  options.table_plan = {.world_size = 2, .tables = {{"a", {TableSharding::row_wise, {0, 1}}}}};
  EXPECT_THAT(
      lines_of(plan_reshard(source, "src", options).notes),
      ElementsAre(
          "src: optim.state.embedding_bags.b.weight.sum: names of optimizer state: expected "
          "a rule for its table in the plan, found none, so 1 tensor of such tables keeps "
          "its name"));
  options.only = NameSelection({"!*.b.*"});
  EXPECT_THAT(plan_reshard(source, "src", options).notes, IsEmpty());
  options.only = {};
  options.table_plan->tables["b"] = {TableSharding::data_parallel, {0, 1}};
  EXPECT_THAT(plan_reshard(source, "src", options).notes, IsEmpty()) << "torch.optim's names";
}

TEST(PlannerTest, AModelWhoseNamesAreThoseOfAnOptimizerIsNotLeftOutWithIt) {
  CheckpointContents source;
  source.tensors = {tensor("ema.state.net.exp_avg", {2}),
                    tensor("ema.state.net.weight", {2, 2}),
                    tensor("model.net.weight", {2, 2}),
                    tensor("optim.state.0.exp_avg", {2, 2}),
                    tensor("optim.state.0.step", {}),
                    tensor("state.net.weight", {2, 2}),
                    tensor("state.step", {})};
  source.values = {{"optim.param_groups.0.lr", {}}};
  const Plan plan = plan_reshard(source, "src", {.optimizer = OptimizerSelection::leave_out});
  std::vector<std::string> names;
  for (const auto& left : plan.destination.tensors) names.push_back(left.meta.fqn);
  EXPECT_THAT(names, ElementsAre("ema.state.net.exp_avg", "ema.state.net.weight",
                                 "model.net.weight", "state.net.weight", "state.step"));
}

// Shows E2.
TEST(PlannerTest, BareFlatVectorsAreRefusedAsNothingSaysWhatLiesInThem) {
  CheckpointContents contents;
  contents.tensors = {tensor("model._flat_param", {64}),
                      tensor("model.layers.0._flat_param", {32})};
  const Plan plan = plan_reshard(contents, "src", {});
  ASSERT_THAT(plan.problems, SizeIs(2));
  EXPECT_EQ(plan.problems[0].remedy.action, Remedy::Action::give_flat_layout);
}

TEST(PlannerTest, SafetensorsTakesNoLayout) {
  EXPECT_THAT(error_of(adamw(), {.format = Format::safetensors, .world_size = 2}).what(),
              HasSubstr("whole tensors"));
}

TEST(PlannerTest, CastLeavesScalarsOfTheOptimizerAlone) {
  const Plan plan = plan_reshard(adamw(), "src", {.cast = DType::bfloat16});
  EXPECT_EQ(plan.destination.find_tensor("model.up.weight")->meta.dtype, DType::bfloat16);
  EXPECT_EQ(plan.destination.find_tensor("optim.state.up.weight.exp_avg")->meta.dtype,
            DType::bfloat16);
  EXPECT_EQ(plan.destination.find_tensor("optim.state.up.weight.step")->meta.dtype, DType::float32);
}

TEST(PlannerTest, CastLeavesTensorsWithoutDimensionsAndParameterGroupsAlone) {
  CheckpointContents contents = adamw();
  const std::vector<std::string> exact = {"ema_decay", "model.logit_scale", "scaler.scale",
                                          "optim.param_groups.0.betas.1"};
  for (const std::string& name : exact) contents.tensors.push_back(tensor(name, {}));
  contents.tensors.push_back(tensor("optim.param_groups.0.lr", {1}));
  contents.tensors.push_back(tensor("model.my_param_groups", {1}));
  std::ranges::sort(contents.tensors, {}, [](const auto& each) { return each.meta.fqn; });
  const Plan plan = plan_reshard(
      contents, "src",
      {.renames = {{"optim.param_groups", "groups"}, {"ema", "decay"}}, .cast = DType::bfloat16});
  std::vector<std::string> uncast;
  for (const TensorEntry& entry : plan.destination.tensors) {
    if (entry.meta.dtype == DType::float32) uncast.push_back(entry.meta.fqn);
  }
  EXPECT_THAT(uncast, ElementsAre("decay_decay", "groups.0.betas.1", "groups.0.lr",
                                  "model.logit_scale", "optim.state.up.bias.step",
                                  "optim.state.up.weight.step", "scaler.scale"));
  EXPECT_EQ(plan.uncast, (UncastTensors{7, "decay_decay"}));
  EXPECT_EQ(plan_reshard(contents, "src", {.cast = DType::float32}).uncast, UncastTensors{});
}

/// Returns the names of the tensors that keep their dtype in a cast to bfloat16.
std::vector<std::string> uncast_of(const Plan& plan) {
  std::vector<std::string> names;
  for (const TensorEntry& entry : plan.destination.tensors) {
    if (entry.meta.dtype == DType::float32) names.push_back(entry.meta.fqn);
  }
  return names;
}

TEST(PlannerTest, CastLeavesStateOfTheTrainerAlone) {
  CheckpointContents contents = adamw();
  for (const std::string name :
       {"grad_scaler.scale", "lr_scheduler.milestones", "model._extra_state.amax",
        "normalizer.mean", "per_rank.1.progress.tokens", "progress.tokens", "sampler.weights"}) {
    contents.tensors.push_back(tensor(name, {2}));
  }
  contents.tensors.push_back(tensor("critic.out.running_mean", {3}));
  contents.tensors.push_back(tensor("critic.out.weight", {3}));
  contents.tensors.push_back(tensor("ema.up.bias", {10}));
  contents.tensors.push_back(tensor("model.up.scale", {10}));
  std::ranges::sort(contents.tensors, {}, [](const auto& each) { return each.meta.fqn; });
  const Plan plan = plan_reshard(contents, "src", {.cast = DType::bfloat16});
  EXPECT_THAT(
      uncast_of(plan),
      ElementsAre("grad_scaler.scale", "lr_scheduler.milestones", "model._extra_state.amax",
                  "normalizer.mean", "optim.state.up.bias.step", "optim.state.up.weight.step",
                  "per_rank.1.progress.tokens", "progress.tokens", "sampler.weights"));
  EXPECT_THAT(lines_of(plan.notes),
              ElementsAre("src: grad_scaler.scale: cast: expected only tensors of the model and "
                          "its optimizer, found 7 tensors beside them, such as this (not "
                          "cast: state of the trainer is not rounded)",
                          "src: critic.out.running_mean: cast: expected only tensors of the model "
                          "and its optimizer, found 3 tensors beside them, such as this (cast "
                          "too: copies of the model's tensors, or tensors of other modules)"));
}

TEST(PlannerTest, CastChangesEverythingInAModelOfItsOwn) {
  // Names of Hugging Face: `model` is a module here, and `lm_head` is beside it.
  CheckpointContents contents;
  contents.tensors = {tensor("lm_head.weight", {4}), tensor("model.layers.0.scale", {4}),
                      tensor("rotary.inv_freq", {4}), tensor("scaler.mean", {4}),
                      tensor("scheduler.proj.weight", {4})};
  EXPECT_THAT(uncast_of(plan_reshard(contents, "src", {.cast = DType::bfloat16})),
              ElementsAre("scaler.mean"));
  // The same beside a dict of the optimizer: the key path tells that `model.w` is one key.
  contents.tensors = {tensor("head.scale", {4}), tensor("model.w", {4}),
                      tensor("optim.state.0.exp_avg", {4})};
  contents.tensors[2].key_path = formats::KeyPath{"optim", "state", std::int64_t{0}, "exp_avg"};
  EXPECT_THAT(plan_reshard(contents, "src", {.cast = DType::bfloat16})
                  .destination.find_tensor("head.scale")
                  ->meta.dtype,
              DType::bfloat16);
  // A dict `model` at the top level is the model, also without an optimizer.
  contents.tensors = {tensor("model.w", {4}), tensor("progress.tokens", {4}),
                      tensor("tokens_seen", {4})};
  contents.tensors[0].key_path = formats::KeyPath{"model", "w"};
  EXPECT_THAT(uncast_of(plan_reshard(contents, "src", {.cast = DType::bfloat16})),
              ElementsAre("progress.tokens", "tokens_seen"));
}

/// Returns a tensor of a nested dict. Its keys may have dots.
TensorEntry tensor_in(formats::KeyPath path, Shape shape) {
  TensorEntry entry = tensor(formats::spell(path), std::move(shape));
  entry.key_path = std::move(path);
  return entry;
}

TEST(PlannerTest, CastNamesWhatIsInNoDictOfAModel) {
  CheckpointContents contents;
  contents.tensors = {tensor_in({"agent", "model", "w"}, {4}),
                      tensor_in({"agent", "optim", "state", std::int64_t{0}, "exp_avg"}, {4}),
                      tensor_in({"obs_rms", "mean"}, {2}), tensor_in({"obs_rms", "var"}, {2})};
  const std::string found =
      ": cast: expected only tensors of the model and its optimizer, found 2 tensors beside them, "
      "such as this (cast too, though no weight or bias is in their dict, and no optimizer has "
      "them)";
  const auto notes = [&] {
    return lines_of(plan_reshard(contents, "src", {.cast = DType::bfloat16}).notes);
  };
  EXPECT_THAT(notes(), testing::Contains("src: obs_rms.mean" + found));
  // Dicts with a weight or bias are a model's, also if their keys have dots.
  contents.tensors = {tensor_in({"lr"}, {2}), tensor_in({"policy", "0.weight"}, {2}),
                      tensor_in({"policy", "rope.freqs"}, {2}), tensor_in({"stats", "mean"}, {2})};
  EXPECT_THAT(notes(), ElementsAre("src: lr" + found));
  // A state dict alone has no other dict, nor have checkpoints without weights.
  contents.tensors = {tensor("cls_token", {2}), tensor("head.weight", {2}),
                      tensor("rope.freqs", {2})};
  EXPECT_THAT(notes(), IsEmpty());
  contents.tensors = {tensor_in({"a", "x"}, {2}), tensor_in({"b", "y"}, {2})};
  EXPECT_THAT(notes(), IsEmpty());
}

TEST(PlannerTest, CastLeavesDictsOfTrainersBesideAnyModelAlone) {
  CheckpointContents contents;
  // The dict beside an optimizer.
  contents.tensors = {tensor_in({"agent", "optim", "state", std::int64_t{0}, "exp_avg"}, {4}),
                      tensor_in({"agent", "policy", "0.weight"}, {4}),
                      tensor_in({"agent", "scheduler_state", "base_lrs"}, {4})};
  const auto uncast = [&] {
    return uncast_of(plan_reshard(contents, "src", {.cast = DType::bfloat16}));
  };
  EXPECT_THAT(uncast(), testing::Contains("agent.scheduler_state.base_lrs"));
  // Weights alone of Composer, where `model` is not at the top level.
  contents.tensors = {tensor_in({"state", "model", "w"}, {4}),
                      tensor_in({"state", "schedulers", "t"}, {4})};
  EXPECT_THAT(uncast(), ElementsAre("state.schedulers.t"));
  // A module may have such a name.
  contents.tensors = {tensor("net.sampler.scale", {4}), tensor("net.w", {4})};
  EXPECT_THAT(uncast(), IsEmpty());
}

TEST(PlannerTest, CastOfAQuantizedModelOfAnUnknownSchemeIsRefused) {
  CheckpointContents contents;
  contents.tensors = {tensor("l.indices", {4, 4}), tensor("l.perm", {4}), tensor("norm", {4})};
  contents.tensors[0].meta.dtype = DType::int32;
  const PlanOptions options = {.cast = DType::bfloat16, .quantization_method = "vptq"};
  EXPECT_THAT(
      lines_of(plan_reshard(contents, "src", options).problems),
      ElementsAre("src: l.perm: cast: expected numbers to cast to bfloat16, found quantized "
                  "weights (vptq in config.json) of a scheme that Tessera does not know, "
                  "such as l.indices (int32), so any tensor may be scales (move without a "
                  "cast)"));
  // Scales that no codes show, such as those of a key-value cache.
  contents.tensors = {tensor("attn.v_scale", {1}), tensor("logit_scale", {}), tensor("norm", {4})};
  const Plan plan = plan_reshard(contents, "src", options);
  ASSERT_THAT(plan.problems, SizeIs(1));
  EXPECT_EQ(plan.problems[0].where.fqn, "attn.v_scale");
  EXPECT_THAT(plan.problems[0].found, HasSubstr("which may be scales"));
  EXPECT_THAT(plan_reshard(contents, "src", {.cast = DType::bfloat16}).problems, IsEmpty());
}

CheckpointContents block_scaled_fp8() {
  CheckpointContents contents;
  contents.tensors = {tensor("norm", {8}), tensor("w.weight", {8, 8}),
                      tensor("w.weight_scale_inv", {1, 1})};
  contents.tensors[1].meta.dtype = DType::float8_e4m3fn;
  return contents;
}

TEST(PlannerTest, CodesOfQuantizedWeightsAreNotCastNorAreTheirScales) {
  const Plan plan = plan_reshard(
      block_scaled_fp8(), "src",
      {.renames = {{"w.", "v."}}, .cast = DType::bfloat16, .quantization_method = "fp8"});
  ASSERT_THAT(plan.problems, SizeIs(2));
  EXPECT_EQ(plan.problems[0].where.fqn, "w.weight");
  EXPECT_EQ(plan.problems[0].rule, "cast");
  EXPECT_EQ(plan.problems[0].found,
            "codes of block-scaled fp8 (fp8 in config.json); the scales are w.weight_scale_inv");
  EXPECT_EQ(plan.problems[0].remedy, (Remedy{Remedy::Action::keep_dtype, "w.weight"}));
  EXPECT_EQ(plan.problems[1].where.fqn, "w.weight_scale_inv");
  EXPECT_EQ(plan.problems[1].found,
            "scales of block-scaled fp8 (fp8 in config.json); the codes are w.weight");
}

TEST(PlannerTest, QuantizedWeightsWhosePartsAreSeparatedAreNoted) {
  const auto notes = [](const PlanOptions& options) {
    return lines_of(plan_reshard(block_scaled_fp8(), "src", options).notes);
  };
  EXPECT_THAT(notes({}), IsEmpty());
  EXPECT_THAT(notes({.renames = {{"", "model."}}}), IsEmpty());
  EXPECT_THAT(notes({.renames = {{"w.weight", "v"}}}), IsEmpty());  // v and v_scale_inv
  EXPECT_THAT(notes({.renames = {{"w.weight_scale_inv", "w.scales"}}}),
              ElementsAre(HasSubstr("found names that do not belong together: w.weight (codes of "
                                    "block-scaled fp8) and w.scales (scales)")));
  EXPECT_THAT(notes({.renames = {{"w.weight_", "v.weight_"}}}), SizeIs(1));
  EXPECT_THAT(notes({.only = NameSelection({"=w.weight"})}),
              ElementsAre(HasSubstr("found one without the other: w.weight, codes of "
                                    "block-scaled fp8; the scales are w.weight_scale_inv")));
  EXPECT_THAT(notes({.only = NameSelection({"norm"})}), IsEmpty());
}

TEST(PlannerTest, QuantizedWeightsMoveAsTheyAreAndCodesWithoutScalesAreNumbers) {
  CheckpointContents contents = block_scaled_fp8();
  EXPECT_THAT(plan_reshard(contents, "src", {}).problems, IsEmpty());
  EXPECT_THAT(
      plan_reshard(contents, "src", {.only = NameSelection({"norm"}), .cast = DType::bfloat16})
          .problems,
      IsEmpty());
  // The scales are in the source, even if `only` does not select them.
  EXPECT_THAT(
      plan_reshard(contents, "src", {.only = NameSelection({"w.weight"}), .cast = DType::bfloat16})
          .problems,
      SizeIs(1));
  contents.tensors.pop_back();
  EXPECT_THAT(plan_reshard(contents, "src", {.cast = DType::bfloat16}).problems, IsEmpty());
}

TEST(PlannerTest, WhatACastMakesOfLargeNumbersIsPartOfItsDigest) {
  const CheckpointContents contents = adamw();
  const auto digest = [&](const PlanOptions& options) {
    return plan_digest(plan_reshard(contents, "src", options), contents);
  };
  EXPECT_NE(digest({.cast = DType::float16}),
            digest({.cast = DType::float16, .on_overflow = OnOverflow::saturate}));
  EXPECT_EQ(digest({}), digest({.on_overflow = OnOverflow::saturate}));
}

// Shows E11.
TEST(PlannerTest, EqualInputGivesEqualDigestsAndAnotherLayoutAnother) {
  const CheckpointContents contents = adamw();
  const auto digest = [&](const PlanOptions& options) {
    return plan_digest(plan_reshard(contents, "src", options), contents);
  };
  EXPECT_EQ(digest({.world_size = 4}), digest({.world_size = 4}));
  EXPECT_NE(digest({.world_size = 4}), digest({.world_size = 5}));
}

CheckpointContents tables() {
  CheckpointContents contents;
  contents.world_size = 2;
  contents.tensors = {tensor("model.ebc.embedding_bags.t0.weight", {6, 8},
                             {{Box{{0, 0}, {6, 4}}, 0}, {Box{{0, 4}, {6, 4}}, 1}}),
                      tensor("optim.state.ebc.embedding_bags.t0.weight.t0.momentum1", {12},
                             {{Box{{0}, {6}}, 0}, {Box{{6}, {6}}, 1}})};
  return contents;
}

TablePlan plan_of(const std::string& rule) {
  return TablePlan::from_json(R"({"schema":1,"world_size":2,"tables":{"t0":)" + rule + "}}",
                              "plan");
}

// Shows D9.
TEST(PlannerTest, StatePerColumnShardStaysWhileTheColumnsDo) {
  const Plan plan = plan_reshard(
      tables(), "src", {.table_plan = plan_of(R"({"sharding":"column_wise","ranks":[1,0]})")});
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_EQ(plan.destination.tensors[1].kind, StateKind::row_wise_per_shard);
  EXPECT_THAT(regions_of(plan, "model.ebc.embedding_bags.t0.weight"),
              ElementsAre(Box{{0, 0}, {6, 4}}, Box{{0, 4}, {6, 4}}));
}

// Shows D9.
TEST(PlannerTest, MergingStatePerColumnShardNeedsAllowLossy) {
  const TablePlan row_wise = plan_of(R"({"sharding":"row_wise","ranks":[0,1]})");
  const Plan refused = plan_reshard(tables(), "src", {.table_plan = row_wise});
  ASSERT_THAT(refused.problems, SizeIs(1));
  EXPECT_EQ(refused.problems[0].remedy.action, Remedy::Action::allow_lossy);

  const Plan merged =
      plan_reshard(tables(), "src", {.table_plan = row_wise, .lossy = Relaxation::allow});
  EXPECT_THAT(merged.problems, IsEmpty());
  EXPECT_THAT(merged.notes, SizeIs(1));
  EXPECT_EQ(merged.destination.tensors[1].meta.shape, (Shape{6}));
  EXPECT_THAT(merged.copies[1].merged_widths, ElementsAre(4, 4));
}

// Shows D7.
TEST(PlannerTest, PiecesOfAGridComeInOrderOfRegionAsWritersHaveThem) {
  TablePlan grid = plan_of(R"({"sharding":"grid","ranks":[0,1],"column_shards":2})");
  grid.world_size = 4;
  grid.tables["t0"].ranks = {3, 2, 1, 0};
  const Plan plan = plan_reshard(tables(), "src", {.format = Format::dcp, .table_plan = grid});
  EXPECT_THAT(plan.destination.tensors[0].pieces,
              ElementsAre(Piece{Box{{0, 0}, {3, 4}}, 3}, Piece{Box{{0, 4}, {3, 4}}, 1},
                          Piece{Box{{3, 0}, {3, 4}}, 2}, Piece{Box{{3, 4}, {3, 4}}, 0}));
  EXPECT_THAT(plan.destination.tensors[1].pieces,
              ElementsAre(Piece{Box{{0}, {3}}, 3}, Piece{Box{{3}, {3}}, 2}, Piece{Box{{6}, {3}}, 1},
                          Piece{Box{{9}, {3}}, 0}));
}

// Shows D9.
TEST(PlannerTest, StateUnderTorchrecsNamesGetsABlockForEachNewColumnShard) {
  CheckpointContents contents = tables();
  contents.tensors[0].pieces = {{whole_box(Shape{6, 8}), 0}};
  contents.tensors[1] = tensor(contents.tensors[1].meta.fqn, {6});
  const TablePlan columns = plan_of(R"({"sharding":"column_wise","ranks":[1,0]})");
  const Plan plan = plan_reshard(contents, "src", {.table_plan = columns});
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_EQ(plan.destination.tensors[1].kind, StateKind::row_wise_per_shard);
  EXPECT_THAT(plan.destination.tensors[1].pieces,
              ElementsAre(Piece{Box{{0}, {6}}, 1}, Piece{Box{{6}, {6}}, 0}));
  EXPECT_EQ(plan.copies[1].num_repeated_rows, 6);

  const Plan canonical = plan_reshard(
      contents, "src", {.table_plan = columns, .optimizer_names = OptimizerNames::canonical});
  EXPECT_THAT(canonical.problems, IsEmpty());
  const TensorEntry& state = canonical.destination.tensors[1];
  EXPECT_EQ(state.meta.fqn, "optim.state.ebc.embedding_bags.t0.weight.row_sum");
  EXPECT_EQ(state.kind, StateKind::row_wise);
  EXPECT_EQ(state.meta.shape, (Shape{6}));
}

// Shows D9.
TEST(PlannerTest, CanonicalStatePerRowNeedsLeaveToMergeColumnShards) {
  const PlanOptions options{.optimizer_names = OptimizerNames::canonical};
  const Plan refused = plan_reshard(tables(), "src", options);
  ASSERT_THAT(refused.problems, SizeIs(1));
  EXPECT_EQ(refused.problems[0].remedy.action, Remedy::Action::allow_lossy);

  const Plan merged = plan_reshard(
      tables(), "src", {.optimizer_names = OptimizerNames::canonical, .lossy = Relaxation::allow});
  EXPECT_THAT(merged.problems, IsEmpty());
  EXPECT_EQ(merged.destination.tensors[1].kind, StateKind::row_wise);
  EXPECT_THAT(merged.destination.tensors[1].pieces, ElementsAre(Piece{Box{{0}, {6}}, 0}));
  EXPECT_THAT(regions_of(merged, "model.ebc.embedding_bags.t0.weight"), SizeIs(2));
}

// Shows E3.
TEST(PlannerTest, StateWhoseShapeContradictsItsTagIsAProblem) {
  for (const StateKind kind :
       {StateKind::pointwise, StateKind::row_wise, StateKind::row_wise_per_shard}) {
    for (const Shape& shape : {Shape{}, Shape{5}, Shape{7, 8}, Shape{5, 2, 1}}) {
      CheckpointContents contents = tables();
      contents.tensors[1] = tensor(contents.tensors[1].meta.fqn, shape, {{whole_box(shape), 0}});
      contents.tensors[1].kind = kind;
      contents.tensors[1].parameter = contents.tensors[0].meta.fqn;
      const Plan plan =
          plan_reshard(contents, "src", {.world_size = 3, .lossy = Relaxation::allow});
      ASSERT_THAT(plan.problems, SizeIs(1)) << state_kind_name(kind) << shape.size();
      EXPECT_EQ(plan.problems[0].where.fqn, contents.tensors[1].meta.fqn);
    }
  }
}

/// A table `t` of 6 x 8 with row-wise state.
CheckpointContents table_with_rows(Shape table = {6, 8}, Shape rows = {6}) {
  CheckpointContents contents;
  contents.tensors = {tensor("model.embedding_bags.t.weight", std::move(table)),
                      tensor("optim.state.embedding_bags.t.weight.row_sum", std::move(rows))};
  return contents;
}

PlanOptions column_plan(const std::string& table) {
  PlanOptions options;
  options.table_plan = TablePlan::from_json(R"({"schema":1,"world_size":2,"tables":{")" + table +
                                                R"(":{"sharding":"column_wise","ranks":[0,1]}}})",
                                            "plan");
  return options;
}

// Shows D10.
TEST(PlannerTest, APlanIsForTablesUnderTheirNewNames) {
  PlanOptions options = column_plan("u");
  options.optimizer_names = OptimizerNames::torchrec;
  options.renames = {{"model.embedding_bags.t.", "model.embedding_bags.u."},
                     {"optim.state.embedding_bags.t.", "optim.state.embedding_bags.u."}};
  const Plan plan = plan_reshard(table_with_rows(), "src", options);
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_THAT(regions_of(plan, "model.embedding_bags.u.weight"),
              ElementsAre(Box{{0, 0}, {6, 4}}, Box{{0, 4}, {6, 4}}));
  EXPECT_THAT(regions_of(plan, "optim.state.embedding_bags.u.weight.u.momentum1"),
              ElementsAre(Box{{0}, {6}}, Box{{6}, {6}}));

  options.renames.clear();
  const Plan old_names = plan_reshard(table_with_rows(), "src", options);
  ASSERT_THAT(old_names.problems, SizeIs(2));
  EXPECT_EQ(old_names.problems[0].where.fqn, "u");
}

// Shows D7.
TEST(PlannerTest, AnythingButTwoDimensionsIsNoPlannedTable) {
  for (const Shape& shape : {Shape{48}, Shape{6, 4, 2}}) {
    const Plan plan = plan_reshard(table_with_rows(shape), "src", column_plan("t"));
    ASSERT_THAT(plan.problems, SizeIs(1));
    EXPECT_EQ(plan.problems[0].where.fqn, "model.embedding_bags.t.weight");
    EXPECT_THAT(plan.problems[0].expected, HasSubstr("2 dimensions"));
    EXPECT_EQ(plan.problems[0].found, shape_to_string(shape));
  }
}

// Shows E10.
TEST(PlannerTest, StateThatDoesNotFitItsNameIsMovedWholeAndTold) {
  const Plan fitting = plan_reshard(table_with_rows(), "src", column_plan("t"));
  EXPECT_THAT(fitting.notes, IsEmpty());
  const Plan plan = plan_reshard(table_with_rows({6, 8}, {7}), "src", column_plan("t"));
  EXPECT_THAT(plan.problems, IsEmpty());
  ASSERT_THAT(plan.notes, SizeIs(1));
  EXPECT_EQ(plan.notes[0].where.fqn, "optim.state.embedding_bags.t.weight.row_sum");
  EXPECT_THAT(plan.notes[0].found, HasSubstr("[7]"));
}

TEST(PlannerTest, TableThatThePlanNamesAndTheSourceLacksIsAProblem) {
  TablePlan plan = plan_of(R"({"sharding":"row_wise","ranks":[0,1]})");
  plan.tables["t9"] = plan.tables["t0"];
  const Plan planned =
      plan_reshard(tables(), "src", {.table_plan = plan, .lossy = Relaxation::allow});
  ASSERT_THAT(planned.problems, SizeIs(1));
  EXPECT_EQ(planned.problems[0].where.fqn, "t9");
}

// Shows D10.
TEST(PlannerTest, TableThatThePlanLacksIsAProblemUnlessAStrategyIsGiven) {
  TablePlan plan = plan_of(R"({"sharding":"column_wise","ranks":[1,0]})");
  CheckpointContents contents = tables();
  const Shape shape{4, 8};
  contents.tensors.insert(contents.tensors.begin() + 1, tensor("model.ebc.embedding_bags.t1.weight",
                                                               shape, {{whole_box(shape), 0}}));
  const Plan refused = plan_reshard(contents, "src", {.table_plan = plan});
  ASSERT_THAT(refused.problems, SizeIs(1));
  EXPECT_EQ(refused.problems[0].where.fqn, "model.ebc.embedding_bags.t1.weight");
  EXPECT_THAT(refused.problems[0].expected, HasSubstr("a rule for table t1"));

  const Plan planned = plan_reshard(contents, "src", {.strategy = "dim0", .table_plan = plan});
  EXPECT_THAT(planned.problems, IsEmpty());
  EXPECT_THAT(regions_of(planned, "model.ebc.embedding_bags.t1.weight"),
              ElementsAre(Box{{0, 0}, {2, 8}}, Box{{2, 0}, {2, 8}}));
  EXPECT_THAT(
      plan_reshard(contents, "src", {.table_plan = plan, .only = NameSelection({"*.t0.weight*"})})
          .problems,
      IsEmpty());
}

/// The tables t0 and t1 are one tensor, cut into two column shards. Each has state of its own.
CheckpointContents tied_tables() {
  CheckpointContents contents = tables();
  contents.tensors.push_back(tensor("optim.state.ebc.embedding_bags.t1.weight.t1.momentum1", {12},
                                    {{Box{{0}, {6}}, 0}, {Box{{6}, {6}}, 1}}));
  contents.aliases = {{"model.ebc.embedding_bags.t1.weight", "model.ebc.embedding_bags.t0.weight"}};
  return contents;
}

TablePlan plan_of_4_columns(const std::string& table) {
  return TablePlan::from_json(R"({"schema":1,"world_size":4,"tables":{")" + table +
                                  R"(":{"sharding":"column_wise","ranks":[0,1,2,3]}}})",
                              "plan");
}

TEST(PlannerTest, TiedTablesFollowTheRuleOfEitherNameWithTheStateOfBoth) {
  for (const std::string table : {"t0", "t1"}) {
    SCOPED_TRACE(table);
    const Plan plan = plan_reshard(
        tied_tables(), "src", {.table_plan = plan_of_4_columns(table), .lossy = Relaxation::allow});
    EXPECT_THAT(plan.problems, IsEmpty());
    EXPECT_THAT(regions_of(plan, "model.ebc.embedding_bags.t0.weight"),
                ElementsAre(Box{{0, 0}, {6, 2}}, Box{{0, 2}, {6, 2}}, Box{{0, 4}, {6, 2}},
                            Box{{0, 6}, {6, 2}}));
    for (const std::size_t state : {std::size_t{1}, std::size_t{2}}) {
      EXPECT_EQ(plan.destination.tensors[state].kind, StateKind::row_wise_per_shard);
      EXPECT_EQ(plan.destination.tensors[state].meta.shape, (Shape{24}));
    }
  }
}

TEST(PlannerTest, ATensorThatIsATableByItsAliasOnlyFollowsThePlan) {
  CheckpointContents contents = tied_tables();
  contents.tensors[0].meta.fqn = "model.decoder.weight";
  contents.tensors.erase(contents.tensors.begin() + 1);
  contents.aliases[0].target = "model.decoder.weight";
  const Plan plan = plan_reshard(
      contents, "src", {.table_plan = plan_of_4_columns("t1"), .lossy = Relaxation::allow});
  EXPECT_THAT(plan.problems, IsEmpty());
  EXPECT_THAT(regions_of(plan, "model.decoder.weight"), SizeIs(4));
  EXPECT_EQ(plan.destination.tensors[1].meta.shape, (Shape{24}));
}

TEST(PlannerTest, TiedTablesWithDifferentRulesAreAProblem) {
  TablePlan rules = plan_of(R"({"sharding":"column_wise","ranks":[0,1]})");
  rules.tables["t1"] = rules.tables["t0"];
  EXPECT_THAT(plan_reshard(tied_tables(), "src", {.table_plan = rules}).problems, IsEmpty());
  rules.tables["t1"].ranks = {1, 0};
  const Plan refused = plan_reshard(tied_tables(), "src", {.table_plan = rules});
  ASSERT_THAT(refused.problems, SizeIs(1));
  EXPECT_EQ(refused.problems[0].where.fqn, "model.ebc.embedding_bags.t1.weight");
  EXPECT_THAT(refused.problems[0].expected, HasSubstr("tables t0 and t1"));
}

TEST(PlannerTest, RenamedStateBesideListsOfParametersIsNoted) {
  CheckpointContents source = adamw();
  source.values = {{"optim.param_groups.0.lr", {}}, {"optim.param_groups.0.params", {}}};
  const auto notes = [&](std::vector<Rename> renames, NameSelection only = {}) {
    return lines_of(
        plan_reshard(source, "src", {.only = std::move(only), .renames = std::move(renames)})
            .notes);
  };
  EXPECT_THAT(notes({{"optim.state.up.", "optim.state.top."}}),
              ElementsAre(HasSubstr("optim.param_groups.0.params: rename: expected names of "
                                    "parameters as their state has them, found the old names")));
  EXPECT_THAT(notes({{"optim.state.", "optim.state.module."}}), SizeIs(1));
  EXPECT_THAT(notes({{"optim.", "optimizer."}}), IsEmpty());
  EXPECT_THAT(notes({{"model.", "net."}}), IsEmpty());
  EXPECT_THAT(
      notes({{"optim.state.up.", "optim.state.top."}}, NameSelection({"*", "!optim.param_groups"})),
      IsEmpty());
  source.values.pop_back();  // as torch flattens groups: no list of parameters
  EXPECT_THAT(notes({{"optim.state.up.", "optim.state.top."}}), IsEmpty());
}

// Hugging Face's names have no dict `model`, though many of them begin with `model.`.
TEST(PlannerTest, StateThatDoesNotFollowARenamedParameterIsNoted) {
  const auto notes = [](const CheckpointContents& source, std::vector<Rename> renames,
                        NameSelection only = {}) {
    const PlanOptions options{.only = std::move(only), .renames = std::move(renames)};
    return lines_of(plan_reshard(source, "src", options).notes);
  };
  CheckpointContents contents = adamw();
  EXPECT_THAT(notes(contents, {{"model.up.", "model.top."}}),
              ElementsAre("src: optim.state.up.bias.exp_avg: rename: expected a new name that fits "
                          "that of its parameter, 'model.top.bias', found "
                          "'optim.state.up.bias.exp_avg', so that PyTorch gives it to no "
                          "parameter, and 3 more tensors of state like it (rename the state too)"));
  EXPECT_THAT(notes(contents, {{"optim.state.up.b", "optim.state.top.b"}}), IsEmpty());
  EXPECT_THAT(
      notes(contents, {{"model.up.", "model.top."}, {"optim.state.up.", "optim.state.top."}}),
      IsEmpty());
  EXPECT_THAT(notes(contents, {{"model.", "net."}}), IsEmpty());
  EXPECT_THAT(notes(contents, {{"optim.", "adam."}}), IsEmpty());
  EXPECT_THAT(notes(contents, {{"model.", ""}}), IsEmpty());
  EXPECT_THAT(notes(contents, {{"model.", "run.model."}, {"optim.", "run.optim."}}), IsEmpty());
  // The state fits the end of the new name, but PyTorch looks for the whole name in the module.
  for (const Rename& rename :
       {Rename{"model.up.", "model.net.up."}, Rename{"model.", "model.net."}}) {
    EXPECT_THAT(notes(contents, {rename}),
                ElementsAre(HasSubstr("that of its parameter, 'model.net.up.bias', found "
                                      "'optim.state.up.bias.exp_avg', so that PyTorch gives it to "
                                      "no parameter")));
  }
  EXPECT_THAT(notes(contents, {{"model.up.", "model.top."}}, NameSelection({"model"})), IsEmpty());

  // Two parameters of one shape change places; a record of the parameter does not help PyTorch.
  contents.tensors[0] = tensor("model.top.weight", {10, 4});
  contents.tensors[4].kind = StateKind::pointwise;
  contents.tensors[4].parameter = "model.up.weight";
  EXPECT_THAT(
      notes(contents, {{"model.up.", "model.top."}, {"model.top.", "model.up."}}),
      ElementsAre(HasSubstr("optim.state.up.weight.exp_avg: rename: expected a new name that "
                            "fits that of its parameter, 'model.top.weight', found "
                            "'optim.state.up.weight.exp_avg', so that PyTorch gives it to "
                            "'model.up.weight', and 1 more tensor")));
}

TEST(PlannerTest, NumberedStateOfParametersThatChangePlacesIsNoted) {
  const auto notes = [](const CheckpointContents& source, std::vector<Rename> renames) {
    return lines_of(plan_reshard(source, "src", {.renames = std::move(renames)}).notes);
  };
  CheckpointContents source;
  source.tensors = {tensor("model.a", {4}), tensor("model.b", {4}),
                    tensor("optim.state.0.exp_avg", {4}), tensor("optim.state.1.exp_avg", {4})};
  const std::vector<Rename> exchange = {{"model.a", "model.b"}, {"model.b", "model.a"}};
  EXPECT_THAT(notes(source, exchange),
              ElementsAre(HasSubstr("model.a: rename: expected a name that no other tensor of the "
                                    "source has, because optimizer state is under numbers "
                                    "(optim.state.0.exp_avg), found 'model.b', and 1 more "
                                    "tensor like it")));
  EXPECT_THAT(notes(source, {{"model.", "net."}}), IsEmpty());
  EXPECT_THAT(notes(source, {{"model.a", "model.c"}}), IsEmpty());
  source.tensors.resize(2);
  EXPECT_THAT(notes(source, exchange), IsEmpty());
}

TEST(PlannerTest, NamesThatATrainerOfRankFilesWouldNotFindAreNoted) {
  const auto notes = [](const CheckpointContents& source, std::vector<Rename> renames = {},
                        Format format = Format("rank_files")) {
    return lines_of(plan_reshard(source, "src", {.format = format, .renames = renames}).notes);
  };
  CheckpointContents llama;
  llama.tensors = {tensor("lm_head.weight", {4, 2}), tensor("model.norm.weight", {2})};
  EXPECT_THAT(
      notes(llama),
      ElementsAre(HasSubstr("lm_head.weight: names of the model: expected names that begin with "
                            "'model.', found 1 tensor without it")));
  CheckpointContents tied;
  tied.tensors = {tensor("model.norm.weight", {2})};
  EXPECT_THAT(notes(tied),
              ElementsAre(HasSubstr("found names that begin with 'model.' only once")));
  for (const CheckpointContents& source : {llama, tied}) {
    EXPECT_THAT(notes(source, {{"", "model."}}), IsEmpty());
    EXPECT_THAT(notes(source, {}, Format::dcp), IsEmpty());
  }
  CheckpointContents nested = tied;
  nested.tensors[0].key_path = {"model", "norm.weight"};
  EXPECT_THAT(notes(nested), IsEmpty());
  EXPECT_THAT(notes(adamw()), IsEmpty());
  // accelerate calls the optimizer otherwise; torchtitan has the weights at the top.
  CheckpointContents accelerate = adamw();
  for (TensorEntry& each : accelerate.tensors) {
    if (each.meta.fqn.starts_with("optim.")) each.meta.fqn.insert(5, "izer");
  }
  EXPECT_THAT(
      notes(accelerate),
      ElementsAre(HasSubstr("optimizer.state.up.bias.exp_avg: names of the optimizer: expected "
                            "names that begin with 'optim.', found 4 tensors without it")));
  EXPECT_THAT(notes(accelerate, {{"optimizer.", "optim."}}), IsEmpty());
  CheckpointContents torchtitan = adamw();
  for (TensorEntry& each : torchtitan.tensors) {
    if (each.meta.fqn.starts_with("model.")) each.meta.fqn.erase(0, 6);
  }
  EXPECT_THAT(notes(torchtitan),
              ElementsAre(HasSubstr("names of the model: expected names that begin with 'model.', "
                                    "found 2 tensors without it")));
  // A user's tensor beside a model and its optimizer does not count as a tensor of the model.
  for (CheckpointContents source : {nested, adamw()}) {
    source.tensors.push_back(tensor("sampler.generator", {2}));
    EXPECT_THAT(notes(source), IsEmpty());
  }
}

}  // namespace
}  // namespace tessera::reshard
