#include "inspect/summary.h"

#include <gmock/gmock.h>

#include <set>

#include "support/error_matchers.h"
#include "support/memory_checkpoint.h"

namespace tessera::inspect {
namespace {

using test::MemoryCheckpoint;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void add(MemoryCheckpoint& checkpoint, const std::string& fqn, Shape shape = {2}) {
  const TensorMeta meta{fqn, DType::float32, std::move(shape)};
  checkpoint.add(meta, test::Bytes(meta.nbytes()));
}

// One line per node: `label xN (tensors)`, indented.
void print(const TreeNode& node, int depth, std::vector<std::string>& lines) {
  std::string line = std::string(static_cast<std::size_t>(depth) * 2, ' ') + node.label;
  if (node.num_repeats > 1) line += " x" + std::to_string(node.num_repeats);
  if (node.kind == TreeNode::Kind::group) {
    line += " (" + std::to_string(node.totals.num_tensors) + ", " +
            std::to_string(node.totals.nbytes) + ")";
  }
  lines.push_back(line);
  for (const TreeNode& child : node.children) print(child, depth + 1, lines);
}

std::vector<std::string> tree(const MemoryCheckpoint& checkpoint, Folding folding = {}) {
  const auto& contents = checkpoint.contents();
  std::vector<std::string> lines;
  for (const TreeNode& node :
       make_tree(contents, select(contents, NameSelection(), "memory"), folding).children) {
    print(node, 0, lines);
  }
  return lines;
}

TEST(TreeTest, FoldsNumberedSiblingsThatAreAlike) {
  MemoryCheckpoint checkpoint;
  for (int layer = 0; layer < 12; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer);
    add(checkpoint, prefix + ".up.weight", {3});
    add(checkpoint, prefix + ".down.weight", {layer == 11 ? 5 : 3});
  }
  add(checkpoint, "model.norm.weight");
  EXPECT_THAT(tree(checkpoint),
              ElementsAre("model (25, 304)", "  layers (24, 296)", "    [0:11] x11 (22, 264)",
                          "      down.weight", "      up.weight", "    11 (2, 32)",
                          "      down.weight", "      up.weight", "  norm.weight"));
  EXPECT_EQ(tree(checkpoint, {.tensors = Folding::Tensors::none}).size(), 1U + 1 + 12 * 3 + 1);
}

TEST(TreeTest, FoldsLeavesAndChainsToo) {
  MemoryCheckpoint checkpoint;
  for (int i = 0; i < 3; ++i) add(checkpoint, "blocks." + std::to_string(i) + ".bias");
  for (int i = 0; i < 3; ++i) add(checkpoint, "list." + std::to_string(i));
  EXPECT_THAT(tree(checkpoint), ElementsAre("blocks.[0:3].bias x3", "list.[0:3] x3"));
}

// The node of layers in a checkpoint in which `layers.<i>.lm` is tied to `targets[i]`.
std::string folded_layers(const std::vector<std::string>& targets) {
  MemoryCheckpoint checkpoint;
  for (const std::string& target : std::set<std::string>(targets.begin(), targets.end())) {
    add(checkpoint, target);
  }
  for (std::size_t i = 0; i < targets.size(); ++i) {
    checkpoint.add_alias("layers." + std::to_string(i) + ".lm", targets[i]);
  }
  const auto& contents = checkpoint.contents();
  const Selection selection = select(contents, NameSelection({"*.lm"}), "memory");
  std::string text;
  for (const TreeNode& node : make_tree(contents, selection).children) {
    if (node.kind == TreeNode::Kind::alias) text += node.label + " = " + node.target + "; ";
    for (const TreeNode& child : node.children) {
      text += child.label + " = " + child.target + "; ";
    }
  }
  return text;
}

TEST(TreeTest, FoldsAliasesOfOneTensorOrOfTheirOwnLayers) {
  EXPECT_EQ(folded_layers({"w", "w", "w"}), "layers.[0:3].lm = w; ");
  EXPECT_EQ(folded_layers({"h.0.a.0", "h.1.a.1", "h.2.a.2"}),
            "layers.[0:3].lm = h.[0:3].a.[0:3]; ");
  EXPECT_EQ(folded_layers({"h.0.a.0", "h.1.a.0"}), "layers.[0:2].lm = h.[0:2].a.0; ");
  EXPECT_EQ(folded_layers({"w", "v", "v"}), "0.lm = w; [1:3].lm = v; ");
  EXPECT_EQ(folded_layers({"h.0", "h.2", "h.1"}), "0.lm = h.0; 1.lm = h.2; 2.lm = h.1; ");
  EXPECT_EQ(folded_layers({"h.0", "h.0", "h.2"}), "[0:2].lm = h.0; 2.lm = h.2; ");
  EXPECT_EQ(folded_layers({"h.0", "h.1", "h.0"}), "[0:2].lm = h.[0:2]; 2.lm = h.0; ");
  EXPECT_EQ(folded_layers({"h.0", "h.0.w"}), "0.lm = h.0; 1.lm = h.0.w; ");
}

TEST(TreeTest, FoldsByPiecesAndKeepsValuesApartWhenAsked) {
  MemoryCheckpoint checkpoint("memory", 2);
  const test::Bytes bytes(8);
  for (int i = 0; i < 4; ++i) {
    checkpoint.add({"w." + std::to_string(i), DType::float32, {2}}, bytes,
                   {{FlatRange{0, 2}, i / 2}});
    checkpoint.add_value("lr." + std::to_string(i), Value(i));
  }
  EXPECT_THAT(tree(checkpoint), ElementsAre("lr.[0:4] x4", "w.[0:4] x4"));
  EXPECT_THAT(tree(checkpoint, {.tensors = Folding::Tensors::of_equal_pieces}),
              ElementsAre("lr.[0:4] x4", "w (4, 32)", "  [0:2] x2", "  [2:4] x2"));
  EXPECT_THAT(tree(checkpoint, {.values = Folding::Values::none}),
              ElementsAre("lr (0, 0)", "  0", "  1", "  2", "  3", "w.[0:4] x4"));
}

TEST(TreeTest, ATensorMayShareItsNameWithAGroup) {
  MemoryCheckpoint checkpoint;
  add(checkpoint, "a");
  add(checkpoint, "a.b");
  add(checkpoint, "a.c");
  EXPECT_THAT(tree(checkpoint), ElementsAre("a", "a (2, 16)", "  b", "  c"));
}

TEST(TreeTest, OddNamesAreOrdinary) {
  MemoryCheckpoint checkpoint;
  for (const char* fqn : {"", ".", "..x", "a..b", "a.", "00", "0", "-1"}) add(checkpoint, fqn);
  std::vector<std::string> lines = tree(checkpoint);
  EXPECT_EQ(select(checkpoint.contents(), NameSelection(), "").totals.num_tensors, 8);
  std::int64_t num_leaves = 0;
  for (const auto& line : lines) num_leaves += line.find('(') == std::string::npos ? 1 : 0;
  EXPECT_EQ(num_leaves, 8);
}

TEST(TreeTest, NothingMakesAnEmptyTree) {
  EXPECT_THAT(tree(MemoryCheckpoint()), ElementsAre());
}

TEST(SelectionTest, AddsUpWhatIsSelected) {
  MemoryCheckpoint checkpoint;
  add(checkpoint, "model.w", {3, 5});
  add(checkpoint, "optim.w", {3, 5});
  checkpoint.add_value("optim.lr", Value(0.1));
  checkpoint.add_alias("model.tied", "model.w");
  const Selection all = select(checkpoint.contents(), NameSelection(), "memory");
  EXPECT_EQ(all.totals.num_tensors, 2);
  EXPECT_EQ(all.totals.num_aliases, 1);
  EXPECT_EQ(all.totals.num_values, 1);
  EXPECT_EQ(all.totals.nbytes, 120U);
  const Selection model = select(checkpoint.contents(), NameSelection({"model"}), "memory");
  EXPECT_THAT(model.tensors, ElementsAre(0));
  EXPECT_THAT(model.aliases, ElementsAre(0));
  EXPECT_THAT(model.values, ElementsAre());
}

TEST(SelectionTest, PatternsThatLeaveNothingAreAMistake) {
  MemoryCheckpoint checkpoint;
  add(checkpoint, "model.weight");
  EXPECT_THAT(
      [&] {
        select(checkpoint.contents(), NameSelection({"model", "!model.weight"}), "step-7");
      },
      test::ThrowsError(ErrorKind::invalid_argument,
                        "step-7: the patterns together select no names"));
  EXPECT_TRUE(select(MemoryCheckpoint().contents(), NameSelection(), "empty").empty());
}

TEST(SelectionTest, APatternThatSelectsNothingIsAMistake) {
  MemoryCheckpoint checkpoint;
  add(checkpoint, "model.weight");
  try {
    select(checkpoint.contents(), NameSelection({"model.wieght"}), "step-7");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::invalid_argument);
    EXPECT_STREQ(error.what(),
                 "step-7: no name matches 'model.wieght' (did you mean 'model.weight'?)");
  }
}

TEST(SelectTest, APatternAlsoSelectsTheEntriesOfRanks) {
  MemoryCheckpoint checkpoint;
  add(checkpoint, "model.w");
  add(checkpoint, "per_rank.1.rng");
  add(checkpoint, "rng");
  const auto tensors = [&](std::vector<std::string> patterns) {
    return select(checkpoint.contents(), NameSelection(std::move(patterns)), "").tensors;
  };
  EXPECT_THAT(tensors({"rng"}), ElementsAre(1, 2));
  EXPECT_THAT(tensors({"!rng"}), ElementsAre(0));
  EXPECT_THAT(tensors({"rng", "!per_rank"}), ElementsAre(2));
  // A wildcard that fits the word `per_rank` alone does not take the entry away from `rng`.
  EXPECT_THAT(tensors({"!p*"}), ElementsAre(0, 1, 2));
  EXPECT_THAT(tensors({"!*_*"}), ElementsAre(0, 1, 2));
  EXPECT_THAT([&] { tensors({"m*", "p*"}); },
              test::ThrowsError(ErrorKind::invalid_argument, "no name matches 'p*'"));
  EXPECT_THAT(tensors({"per_rank*"}), ElementsAre(1));
  add(checkpoint, "per_rank.1.seed");  // only rank 1 has it
  EXPECT_THAT(tensors({"seed"}), ElementsAre(2));
}

}  // namespace
}  // namespace tessera::inspect
