#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "property/generators.h"
#include "reshard/resharding.h"
#include "tessera/recipe/recipe.h"

namespace tessera::recipe {
namespace {

using formats::CheckpointReader;
using test::counting_bytes;
using test::MemoryCheckpoint;
using test::pick;

/// A random recipe as JSON, with a checkpoint to which it applies.
struct Case {
  MemoryCheckpoint source{"source", 2};
  std::vector<std::string> rules;

  std::string text() const {
    std::string all;
    for (const std::string& rule : rules) all += (all.empty() ? "" : ", ") + rule;
    return "{\"schema\": 1, \"rules\": [" + all + "]}";
  }
};

std::string list_of(const std::vector<std::int64_t>& numbers) {
  std::string text;
  for (const std::int64_t number : numbers)
    text += (text.empty() ? "" : ", ") + std::to_string(number);
  return "[" + text + "]";
}

Shape shape_of_tensor() {
  Shape shape;
  const std::int64_t num_dims = pick(1, 3);
  for (std::int64_t d = 0; d < num_dims; ++d) shape.push_back(pick(1, 5));
  if (pick(0, 15) == 0) shape[0] = 0;
  return shape;
}

/// Cuts a tensor into random pieces along a dimension, each with a rank of its own.
std::vector<formats::Piece> random_pieces(const Shape& shape) {
  if (pick(0, 2) == 0 || numel_of(shape) == 0) return {};
  std::vector<formats::Piece> pieces;
  if (pick(0, 1) == 0) {
    const std::int64_t middle = pick(0, numel_of(shape));
    return {{FlatRange{0, middle}, 0}, {FlatRange{middle, numel_of(shape)}, 1}};
  }
  const auto dim = static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(shape.size()) - 1));
  const std::int64_t middle = pick(0, shape[dim]);
  Box first = whole_box(shape);
  Box second = first;
  first.sizes[dim] = middle;
  second.offsets[dim] = middle;
  second.sizes[dim] -= middle;
  return {{first, 0}, {second, 1}};
}

void add_parameter(MemoryCheckpoint& source, const std::string& name, const Shape& shape) {
  static unsigned seed = 0;
  const auto nbytes = static_cast<std::size_t>(numel_of(shape)) * 4;
  source.add({name, DType::float32, shape}, counting_bytes(nbytes, ++seed), random_pieces(shape));
  source.add({"optim.state." + name + ".exp_avg", DType::float32, shape},
             counting_bytes(nbytes, ++seed), random_pieces(shape));
  source.add({"optim.state." + name + ".step", DType::float32, {}}, counting_bytes(4, 1));
}

/// Appends random operations on one tensor to `ops`, and changes `shape` as they do.
void add_operations_on_one(Shape& shape, std::vector<std::string>& ops) {
  const std::int64_t num_ops = pick(0, 4);
  for (std::int64_t i = 0; i < num_ops; ++i) {
    const auto dim = static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(shape.size()) - 1));
    const std::string d = std::to_string(dim);
    switch (pick(0, 4)) {
      case 0: {
        const auto other =
            static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(shape.size()) - 1));
        ops.push_back("{\"transpose\": [" + d + ", " + std::to_string(other) + "]}");
        std::swap(shape[dim], shape[other]);
        break;
      }
      case 1: {
        const std::int64_t to = shape[dim] + pick(0, 3);
        ops.push_back("{\"pad\": {\"dim\": " + d + ", \"from\": " + std::to_string(shape[dim]) +
                      ", \"to\": " + std::to_string(to) + ", \"value\": 2}}");
        shape[dim] = to;
        break;
      }
      case 2: {
        if (shape.size() < 2 || dim + 1 == shape.size()) break;
        ops.push_back("{\"flatten\": {\"dim\": " + d +
                      ", \"sizes\": " + list_of({shape[dim], shape[dim + 1]}) + "}}");
        Shape merged;
        for (std::size_t k = 0; k < shape.size(); ++k) {
          if (k == dim + 1) continue;
          merged.push_back(k == dim ? shape[k] * shape[k + 1] : shape[k]);
        }
        shape = merged;
        break;
      }
      case 3: {
        const std::int64_t size = shape[dim];
        const std::int64_t inner = size % 2 == 0 && size > 0 ? 2 : 1;
        ops.push_back("{\"unflatten\": {\"dim\": " + d +
                      ", \"sizes\": " + list_of({size / inner, inner}) + "}}");
        Shape wider;
        for (std::size_t k = 0; k < shape.size(); ++k) {
          wider.push_back(k == dim ? size / inner : shape[k]);
          if (k == dim) wider.push_back(inner);
        }
        shape = wider;
        break;
      }
      default: {
        const std::vector<std::int64_t> from(shape.begin(), shape.end());
        ops.push_back("{\"reshape\": {\"from\": " + list_of(from) +
                      ", \"to\": " + list_of({numel_of(shape)}) + "}}");
        shape = {numel_of(shape)};
      }
    }
  }
}

std::string rule_of(const std::string& from, const std::string& to,
                    const std::vector<std::string>& ops) {
  std::string list;
  for (const std::string& op : ops) list += (list.empty() ? "" : ", ") + op;
  return "{\"from\": " + from + ", \"to\": " + to + ", \"ops\": [" + list + "]}";
}

/// Two or three tensors that are joined, and then sometimes split along dimension 0.
void add_concat_rule(Case& made, const std::string& front) {
  const Shape shape = shape_of_tensor();
  const std::int64_t num_parts = pick(2, 3);
  const std::int64_t groups = pick(1, 2);
  const auto dim = static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(shape.size()) - 1));
  std::vector<std::int64_t> sizes;
  std::string names;
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < num_parts; ++i) {
    Shape part = shape;
    part[dim] = groups * pick(1, 3);
    sizes.push_back(part[dim]);
    sum += part[dim];
    const std::string name = front + ".p" + std::to_string(i);
    names += (names.empty() ? "\"" : ", \"") + name + "\"";
    add_parameter(made.source, name, part);
  }
  std::vector<std::string> ops = {groups == 1
                                      ? "{\"concat\": {\"dim\": " + std::to_string(dim) +
                                            ", \"sizes\": " + list_of(sizes) + "}}"
                                      : "{\"concat_grouped\": {\"dim\": " + std::to_string(dim) +
                                            ", \"groups\": 2, \"sizes\": " + list_of(sizes) + "}}"};
  Shape joined = shape;
  joined[dim] = sum;
  add_operations_on_one(joined, ops);
  std::string to = "\"" + front + ".all\"";
  if (pick(0, 1) == 0) {
    const std::int64_t first = pick(0, joined[0]);
    ops.push_back("{\"split\": {\"sizes\": " + list_of({first, joined[0] - first}) + "}}");
    to = "[\"" + front + ".x\", \"" + front + ".y\"]";
  }
  made.rules.push_back(rule_of("[" + names + "]", to, ops));
}

/// Tensors of numbered layers that are stacked.
void add_stack_rule(Case& made, const std::string& front) {
  const Shape shape = shape_of_tensor();
  const std::int64_t num_layers = pick(1, 4);
  for (std::int64_t layer = 0; layer < num_layers; ++layer) {
    add_parameter(made.source, front + "." + std::to_string(layer + 3) + ".w", shape);
  }
  const auto dim = pick(0, static_cast<std::int64_t>(shape.size()));
  Shape stacked;
  for (std::size_t k = 0; k <= shape.size(); ++k) {
    if (static_cast<std::int64_t>(k) == dim) stacked.push_back(num_layers);
    if (k < shape.size()) stacked.push_back(shape[k]);
  }
  std::vector<std::string> ops = {"{\"stack\": {\"over\": \"L\", \"dim\": " + std::to_string(dim) +
                                  "}}"};
  add_operations_on_one(stacked, ops);
  std::string to = "\"" + front + ".all\"";
  if (stacked.size() > 1 && stacked[0] > 0 && pick(0, 1) == 0) {
    ops.push_back("{\"unstack\": \"E\"}");
    to = "\"" + front + ".e.{E+1}.w\"";
  }
  made.rules.push_back(rule_of("\"" + front + ".{L+3}.w\"", to, ops));
}

void add_single_rule(Case& made, const std::string& front) {
  Shape shape = shape_of_tensor();
  add_parameter(made.source, front + ".w", shape);
  std::vector<std::string> ops;
  add_operations_on_one(shape, ops);
  std::string to = "\"" + front + ".v\"";
  if (pick(0, 4) == 0) {
    ops.push_back("{\"duplicate\": 2}");
    to = "[\"" + front + ".v\", \"" + front + ".u\"]";
  }
  made.rules.push_back(rule_of("\"" + front + ".w\"", to, ops));
}

Case arbitrary_case() {
  Case made;
  const std::int64_t num_rules = pick(1, 4);
  for (std::int64_t r = 0; r < num_rules; ++r) {
    const std::string front = "m.r" + std::to_string(r);
    switch (pick(0, 2)) {
      case 0:
        add_concat_rule(made, front);
        break;
      case 1:
        add_stack_rule(made, front);
        break;
      default:
        add_single_rule(made, front);
    }
  }
  return made;
}

void assert_same_tensors(const CheckpointReader& a, const CheckpointReader& b) {
  RC_ASSERT(a.contents().tensors.size() == b.contents().tensors.size());
  for (std::size_t i = 0; i < a.contents().tensors.size(); ++i) {
    RC_ASSERT(a.contents().tensors[i].meta == b.contents().tensors[i].meta);
    RC_ASSERT(test::whole_tensor(a, i) == test::whole_tensor(b, i));
  }
}

std::unique_ptr<CheckpointReader> copied(const MemoryCheckpoint& source) {
  return std::make_unique<MemoryCheckpoint>(source);
}

RC_GTEST_PROP(RecipeLaws, ThereAndBackIsIdentity, ()) {
  const Case made = arbitrary_case();
  const Recipe recipe = Recipe::parse(made.text(), "r.json");
  const auto back = open_transformed(open_transformed(copied(made.source), recipe, {}), recipe,
                                     {.direction = Direction::inverse});
  assert_same_tensors(made.source, *back);
}

RC_GTEST_PROP(RecipeLaws, AMovedCheckpointGoesBackToo, ()) {
  const Case made = arbitrary_case();
  const Recipe recipe = Recipe::parse(made.text(), "r.json");
  reshard::PlanOptions options;
  options.format = formats::Format::native;
  options.strategy = *test::arbitrary_strategy();
  if (!options.strategy.starts_with("hybrid")) options.world_size = static_cast<int>(pick(1, 4));
  if (options.strategy.find("flat") != std::string::npos)
    options = {.format = formats::Format::native};
  const auto there = open_transformed(copied(made.source), recipe, {});
  const MemoryCheckpoint moved = test::reshard_in_memory(*there, options);
  assert_same_tensors(*there, moved);
  const auto back = open_transformed(copied(moved), recipe, {.direction = Direction::inverse});
  assert_same_tensors(made.source, *back);
}

RC_GTEST_PROP(RecipeLaws, PiecesCoverEveryTensorOnce, ()) {
  const Case made = arbitrary_case();
  const auto there =
      open_transformed(copied(made.source), Recipe::parse(made.text(), "r.json"), {});
  for (const formats::TensorEntry& tensor : there->contents().tensors) {
    std::vector<Region> regions;
    for (const formats::Piece& piece : tensor.pieces) regions.push_back(piece.region);
    RC_ASSERT(check_coverage(regions, tensor.meta.shape).empty());
  }
}

/// Returns the bytes of a tensor whose dimensions are in another order.
test::Bytes permuted(const test::Bytes& bytes, const Shape& shape,
                     const std::vector<std::size_t>& order, std::size_t size) {
  const Shape strides = row_major_strides(shape);
  test::Bytes result(bytes.size());
  std::byte* to = result.data();
  for (std::int64_t i = 0; i < shape[order[0]]; ++i) {
    for (std::int64_t j = 0; j < shape[order[1]]; ++j) {
      for (std::int64_t k = 0; k < shape[order[2]]; ++k) {
        const std::int64_t at =
            i * strides[order[0]] + j * strides[order[1]] + k * strides[order[2]];
        std::memcpy(to, bytes.data() + static_cast<std::size_t>(at) * size, size);
        to += size;
      }
    }
  }
  return result;
}

// Many of these tensors are large enough for tiles, with every dtype.
RC_GTEST_PROP(RecipeLaws, AnyWindowOfAPermutedTensorIsRight, ()) {
  const DType dtype = std::vector{DType::uint8, DType::bfloat16, DType::float32, DType::float64,
                                  DType::complex128}[static_cast<std::size_t>(pick(0, 4))];
  const Shape shape{pick(1, 12), pick(1, 140), pick(1, 12)};
  std::vector<std::size_t> order{0, 1, 2};
  for (std::size_t d = 2; d > 0; --d) {
    std::swap(order[d], order[static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(d)))]);
  }
  const auto size = static_cast<std::size_t>(itemsize(dtype));
  const auto whole = counting_bytes(static_cast<std::size_t>(numel_of(shape)) * size, 1);
  MemoryCheckpoint source{"source", 2};
  source.add({"w", dtype, shape}, whole, random_pieces(shape));
  std::vector<std::int64_t> numbers(order.begin(), order.end());
  const auto there = open_transformed(
      copied(source),
      Recipe::parse("{\"schema\": 1, \"rules\": [" +
                        rule_of("\"w\"", "\"v\"", {"{\"permute\": " + list_of(numbers) + "}"}) +
                        "]}",
                    "r.json"),
      {});
  const test::Bytes expected = permuted(whole, shape, order, size);
  RC_ASSERT(test::whole_tensor(*there, 0) == expected);
  for (std::size_t p = 0; p < there->contents().tensors[0].pieces.size(); ++p) {
    const Region& region = there->contents().tensors[0].pieces[p].region;
    const std::int64_t numel = numel_of(region);
    const std::int64_t begin = pick(0, numel);
    const FlatRange window{begin, pick(begin, numel)};
    test::Bytes found(static_cast<std::size_t>(window.numel()) * size);
    there->read_piece(0, p, window, found);
    const test::Bytes piece =
        test::gather_region(expected, there->contents().tensors[0].meta.shape, region, size);
    const auto first = piece.begin() + begin * static_cast<std::int64_t>(size);
    RC_ASSERT(std::equal(found.begin(), found.end(), first));
  }
}

RC_GTEST_PROP(RecipeLaws, TheCheckProvesEveryRecipe, ()) {
  const Case made = arbitrary_case();
  const RecipeReport report =
      check_recipe(Recipe::parse(made.text(), "r.json"), made.source.contents(), {});
  RC_ASSERT(report.problems.empty());
  RC_ASSERT(report.is_invertible);
}

RC_GTEST_PROP(RecipeLaws, DamageInAnyRuleIsFound, ()) {
  Case made = arbitrary_case();
  std::string& rule = made.rules[static_cast<std::size_t>(
      pick(0, static_cast<std::int64_t>(made.rules.size()) - 1))];
  switch (pick(0, 3)) {
    case 0:  // remove the rule
      made.rules.erase(made.rules.begin() + (&rule - made.rules.data()));
      break;
    case 1:  // rename one of its tensors
      rule.replace(rule.find("m.r"), 3, "m.x");
      break;
    case 2:  // add a rule whose source does not exist
      made.rules.push_back(R"({"from": "missing", "to": "found"})");
      break;
    default:  // add the rule a second time
      made.rules.push_back(rule);
  }
  const RecipeReport report =
      check_recipe(Recipe::parse(made.text(), "r.json"), made.source.contents(), {});
  RC_ASSERT(!report.problems.empty());
}

// A wrong size in any operation is a problem.
RC_GTEST_PROP(RecipeLaws, AWrongSizeIsFound, ()) {
  const Case made = arbitrary_case();
  std::string text = made.text();
  std::vector<std::size_t> places;
  for (const char* key : {"\"sizes\": [", "\"from\": [", "\"from\": "}) {
    for (std::size_t at = text.find(key); at != std::string::npos; at = text.find(key, at + 1)) {
      const std::size_t digit = at + std::string(key).size();
      if (text[digit] >= '0' && text[digit] <= '9') places.push_back(digit);
    }
  }
  RC_PRE(!places.empty());
  const std::size_t at =
      places[static_cast<std::size_t>(pick(0, static_cast<std::int64_t>(places.size()) - 1))];
  text.insert(at, "3");  // 5 becomes 35
  const RecipeReport report =
      check_recipe(Recipe::parse(text, "r.json"), made.source.contents(), {});
  RC_ASSERT(!report.problems.empty());
}

}  // namespace
}  // namespace tessera::recipe
