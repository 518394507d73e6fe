#include <gmock/gmock.h>

#include "support/memory_checkpoint.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {
namespace {

using formats::Format;
using formats::Simplification;
using test::bytes_of;
using test::MemoryCheckpoint;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// A checkpoint with one of everything that some format cannot hold.
MemoryCheckpoint rich_source() {
  MemoryCheckpoint source;
  source.add({"0.w", DType::float32, {1}}, bytes_of<float>({1})).key_path = {0, "w"};
  source.add({"optim.state.5.exp_avg", DType::float32, {1}}, bytes_of<float>({1})).key_path = {
      "optim", "state", *formats::dict_key(5), "exp_avg"};
  source.add({"optim.state.5.step", DType::float32, {1}}, bytes_of<float>({1})).key_path = {
      "optim", "state", *formats::dict_key(5), "step"};
  source.add_value("by_size.7", 1).key_path = {"by_size", *formats::dict_key(7)};
  source.add_alias("tied", "0.w");
  auto& contents = source.contents_for_change();
  contents.annotations = {{"note", "mine"}};
  contents.simplifications = {{Simplification::Kind::requires_grad, "0.w"},
                              {Simplification::Kind::dict_class, ""},
                              {Simplification::Kind::dict_class, "optim"},
                              {Simplification::Kind::tuple, "gone"}};
  return source;
}

std::vector<FormatChangeCount> changes_to(Format format, PlanOptions options = {}) {
  const MemoryCheckpoint source = rich_source();
  options.format = format;
  return plan_reshard(source.contents(), source.path(), options).changes;
}

TEST(FormatChangesTest, EachFormatIsCountedByWhatItHasNoPlaceFor) {
  using enum FormatChange;
  EXPECT_THAT(changes_to(Format::native),
              ElementsAre(FormatChangeCount{requires_grad, 1}, FormatChangeCount{dict_classes, 2}));
  EXPECT_EQ(changes_to(Format::safetensors), changes_to(Format::native));
  EXPECT_THAT(changes_to(Format::torch_zip),
              ElementsAre(FormatChangeCount{annotations, 1}, FormatChangeCount{requires_grad, 1},
                          FormatChangeCount{dict_classes, 2}));
  EXPECT_THAT(changes_to(Format::dcp),
              ElementsAre(FormatChangeCount{text_keys, 1}, FormatChangeCount{optimizer_keys, 1},
                          FormatChangeCount{split_ties, 1}, FormatChangeCount{list_root, 1},
                          FormatChangeCount{annotations, 1}, FormatChangeCount{requires_grad, 1},
                          FormatChangeCount{dict_classes, 2}));
}

TEST(FormatChangesTest, NamesOfAttributesAndTypesAreListedOnce) {
  using Kind = Simplification::Kind;
  using enum FormatChange;
  MemoryCheckpoint source;
  source.add({"v", DType::float32, {1}}, bytes_of<float>({1}));
  source.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
  source.contents_for_change().simplifications = {{Kind::attributes, "w", {"note", "a"}},
                                                  {Kind::attributes, "v", {"note"}},
                                                  {Kind::value_type, "", {"frozenset"}}};
  EXPECT_THAT(plan_reshard(source.contents(), source.path(), {.format = Format::native}).changes,
              ElementsAre(FormatChangeCount{attributes, 2, {"a", "note"}},
                          FormatChangeCount{value_types, 1, {"frozenset"}}));
}

TEST(FormatChangesTest, AttributesOfAModuleWithoutEntriesAreCountedIfItsNameIsSelected) {
  using enum FormatChange;
  MemoryCheckpoint source;
  source.add({"model.head.weight", DType::float32, {1}}, bytes_of<float>({1}));
  source.contents_for_change().simplifications = {
      {Simplification::Kind::attributes, "model.table", {"values"}},
      {Simplification::Kind::attributes, "model.head", {"scratch"}}};
  const auto changes = [&](NameSelection only) {
    const PlanOptions options{.format = Format::native, .only = std::move(only)};
    return plan_reshard(source.contents(), source.path(), options).changes;
  };
  EXPECT_THAT(changes({}), ElementsAre(FormatChangeCount{attributes, 2, {"scratch", "values"}}));
  EXPECT_THAT(changes(NameSelection({"model.head"})),
              ElementsAre(FormatChangeCount{attributes, 1, {"scratch"}}));
}

TEST(FormatChangesTest, AListOfNamesHasAllNames) {
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
  std::vector<std::string> attributes;
  for (char letter = 'a'; letter <= 'k'; ++letter) attributes.emplace_back(1, letter);
  source.contents_for_change().simplifications = {
      {Simplification::Kind::attributes, "w", attributes}};
  const auto changes =
      plan_reshard(source.contents(), source.path(), {.format = Format::native}).changes;
  ASSERT_EQ(changes.size(), 1U);
  EXPECT_EQ(changes[0].names, attributes);
}

TEST(FormatChangesTest, FlatUnitsThatAreNotRecordedAreNoted) {
  MemoryCheckpoint source;
  for (const char* name : {"a", "b", "c"}) {
    source.add({name, DType::float32, {1}}, bytes_of<float>({1}));
  }
  source.contents_for_change().units = {
      make_flat_unit("one", DType::float32, {{"a", {1}}, {"b", {1}}}),
      make_flat_unit("two", DType::float32, {{"c", {1}}})};
  const auto notes = [&](PlanOptions options) {
    std::vector<std::string> found;
    for (const auto& note : plan_reshard(source.contents(), source.path(), options).notes) {
      if (note.rule == "units") found.push_back(note.found.substr(0, note.found.find(':')));
    }
    return found;
  };
  EXPECT_THAT(notes({.format = Format::native}), IsEmpty());
  EXPECT_THAT(notes({.format = Format::dcp}), ElementsAre("2 units left out"));
  EXPECT_THAT(notes({.format = Format::torch_zip}), ElementsAre("2 units left out"));
  EXPECT_THAT(notes({.format = Format::native, .only = NameSelection({"a", "c"})}),
              ElementsAre("1 unit left out"));
}

TEST(FormatChangesTest, StepsThatBecomeTensorsAreCounted) {
  using enum FormatChange;
  MemoryCheckpoint source;
  source.add({"model.w", DType::float32, {1}}, bytes_of<float>({1}));
  source.add_value("optim.state.w.step", 7).key_path = {"optim", "state", "w", "step"};
  source.add_value("optim.param_groups.0.lr", 0.5);
  source.add_value("step", 7);
  const auto changes = [&](Format format) {
    return plan_reshard(source.contents(), source.path(), {.format = format}).changes;
  };
  EXPECT_THAT(changes(Format("deepspeed")), ElementsAre(FormatChangeCount{tensor_steps, 1}));
  EXPECT_THAT(changes(Format::torch_zip), IsEmpty());
}

TEST(FormatChangesTest, WhatChangesUnderATiedNameIsCounted) {
  using Kind = Simplification::Kind;
  using enum FormatChange;
  MemoryCheckpoint source;
  source.add({"a", DType::float32, {1}}, bytes_of<float>({1}));
  source.add_alias("p", "a");
  source.add_alias("t.0", "a");
  source.contents_for_change().simplifications = {
      {Kind::parameter, "p"}, {Kind::requires_grad, "a"}, {Kind::tuple, "t"}};
  const auto changes = [&](Format format, PlanOptions options) {
    options.format = format;
    return plan_reshard(source.contents(), source.path(), options).changes;
  };
  for (const Format format : {Format::native, Format::torch_zip}) {
    EXPECT_THAT(changes(format, {}),
                ElementsAre(FormatChangeCount{requires_grad, 1}, FormatChangeCount{parameters, 1},
                            FormatChangeCount{tuples, 1}));
    EXPECT_THAT(changes(format, {.only = NameSelection({"t"})}),
                ElementsAre(FormatChangeCount{tuples, 1}));
    EXPECT_THAT(changes(format, {.only = NameSelection({"a"})}),
                ElementsAre(FormatChangeCount{requires_grad, 1}));
  }
  EXPECT_THAT(changes(Format::dcp, {.only = NameSelection({"p", "t"}), .renames = {{"p", "q"}}}),
              ElementsAre(FormatChangeCount{split_ties, 1}, FormatChangeCount{parameters, 1},
                          FormatChangeCount{tuples, 1}));
}

TEST(FormatChangesTest, ANumberThatARenameMakesTextIsCountedInEveryFormat) {
  using enum FormatChange;
  const PlanOptions options{.only = NameSelection({"optim"}),
                            .renames = {{"optim.state.5", "optim.state.w"}}};
  for (const Format format : {Format::native, Format::dcp}) {
    EXPECT_THAT(changes_to(format, options), Contains(FormatChangeCount{optimizer_keys, 1, {}, 1}));
  }
  EXPECT_THAT(
      changes_to(Format::native, {.only = NameSelection({"by_size", "optim"}),
                                  .renames = {{"by_size.", "sizes."}, {"by_size.7", "seven"}}}),
      ElementsAre(FormatChangeCount{dict_classes, 2}));
  EXPECT_THAT(changes_to(Format::native, {.only = NameSelection({"by_size"}),
                                          .renames = {{"by_size.7", "sizes.7"}}}),
              Contains(FormatChangeCount{text_keys, 1, {}, 1}));
}

TEST(FormatChangesTest, TheFormatOfSafetensorsCountsUnlessItIsThatOfPyTorch) {
  using enum FormatChange;
  MemoryCheckpoint source;
  source.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
  const auto changes = [&](const std::string& format) {
    source.contents_for_change().annotations = {{"format", format}};
    return plan_reshard(source.contents(), source.path(), {.format = Format::dcp}).changes;
  };
  EXPECT_THAT(changes("pt"), IsEmpty());
  EXPECT_THAT(changes("mlx"), ElementsAre(FormatChangeCount{annotations, 1}));
}

TEST(FormatChangesTest, AnEmptyOrderedDictIsCounted) {
  using enum FormatChange;
  MemoryCheckpoint source;
  source.contents_for_change().simplifications = {{Simplification::Kind::dict_class, ""}};
  EXPECT_THAT(plan_reshard(source.contents(), source.path(), {.format = Format::torch_zip}).changes,
              ElementsAre(FormatChangeCount{dict_classes, 1}));
}

TEST(FormatChangesTest, WhatIsLeftOutIsNotCounted) {
  using enum FormatChange;
  EXPECT_THAT(changes_to(Format::native, {.only = NameSelection({"optim"})}),
              ElementsAre(FormatChangeCount{dict_classes, 2}));
  const MemoryCheckpoint source = [] {
    MemoryCheckpoint plain;
    plain.add({"w", DType::float32, {1}}, bytes_of<float>({1}));
    plain.add({"v", DType::float32, {1}}, bytes_of<float>({1}));
    return plain;
  }();
  EXPECT_THAT(plan_reshard(source.contents(), source.path(), {.format = Format::dcp}).changes,
              IsEmpty());
}

}  // namespace
}  // namespace tessera::reshard
