#include "inspect/summary.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string_view>

#include "formats/per_rank_rules.h"
#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"

namespace tessera::inspect {
namespace {

Totals totals_of(const formats::TensorEntry& tensor) {
  Totals totals;
  totals.num_tensors = 1;
  totals.num_pieces = static_cast<std::int64_t>(tensor.pieces.size());
  totals.numel = tensor.meta.numel();
  totals.nbytes = tensor.meta.nbytes();
  return totals;
}

// A node of the tree of names: an entry (`leaf`), children by the next component of the name, or
// both.
struct Trie {
  std::optional<TreeNode> leaf;
  std::map<std::string_view, Trie> children;
};

// Trees are at most this deep, because functions walk them recursively. The rest of a deeper name
// becomes one label with dots.
constexpr int kMaxDepth = 2000;

TreeNode& insert(Trie& root, std::string_view name, TreeNode::Kind kind, std::size_t index,
                 const Totals& totals) {
  Trie* node = &root;
  std::string_view rest = name;
  for (int depth = 1;; ++depth) {
    const std::size_t dot = depth < kMaxDepth ? rest.find('.') : std::string_view::npos;
    node = &node->children[rest.substr(0, dot)];
    if (dot == std::string_view::npos) break;
    rest.remove_prefix(dot + 1);
  }
  node->leaf = TreeNode{kind, {}, 1, index, {}, totals, {}};
  return *node->leaf;
}

// Returns the number that a component of a name spells: `12`. Returns nothing for any other text,
// such as `-1` or `07`.
std::optional<std::int64_t> as_number(std::string_view label) {
  std::int64_t number = 0;
  const auto parsed = std::from_chars(label.data(), label.data() + label.size(), number);
  const bool is_canonical = label == "0" || (!label.empty() && label[0] != '0' && label[0] != '-');
  if (parsed.ec != std::errc() || parsed.ptr != label.data() + label.size() || !is_canonical) {
    return std::nullopt;
  }
  return number;
}

// The numbers of two siblings, as their names spell them.
struct SiblingNumbers {
  std::string a;
  std::string b;
};

bool comes_before(const TreeNode& a, const TreeNode& b) {
  const auto number_a = as_number(a.label);
  const auto number_b = as_number(b.label);
  if (number_a && number_b && *number_a != *number_b) return *number_a < *number_b;
  if (number_a.has_value() != number_b.has_value()) return number_a.has_value();
  return a.label < b.label;
}

// Takes the first component off a name.
std::string_view take_component(std::string_view& name) {
  const std::string_view component = name.substr(0, name.find('.'));
  name.remove_prefix(std::min(component.size() + 1, name.size()));
  return component;
}

// Returns whether the targets of aliases in two numbered siblings are the same, except for
// components that are the siblings' own numbers: `layers.0.emb` in 0 and `layers.1.emb` in 1.
bool have_like_targets(std::string_view a, std::string_view b, const SiblingNumbers& numbers) {
  if (a == b) return true;
  while (!a.empty() && !b.empty()) {
    const std::string_view in_a = take_component(a);
    const std::string_view in_b = take_component(b);
    if (in_a != in_b && (in_a != numbers.a || in_b != numbers.b)) return false;
  }
  return a.empty() && b.empty();
}

// Returns the target of the first of several siblings with its number replaced by `range` where
// the second sibling has its own number.
std::string folded_target(std::string_view first, std::string_view second,
                          const std::string& range) {
  if (first == second) return std::string(first);
  std::string folded;
  while (!first.empty()) {
    const std::string_view component = take_component(first);
    if (!folded.empty()) folded += '.';
    folded += component == take_component(second) ? component : std::string_view(range);
  }
  return folded;
}

void fold_targets(TreeNode& first, const TreeNode& second, const std::string& range) {
  if (first.kind == TreeNode::Kind::alias) {
    first.target = folded_target(first.target, second.target, range);
  }
  for (std::size_t i = 0; i < first.children.size(); ++i) {
    fold_targets(first.children[i], second.children[i], range);
  }
}

// Requires: the siblings have the numbers `numbers`.
bool are_alike(const formats::CheckpointContents& contents, const TreeNode& a, const TreeNode& b,
               const SiblingNumbers& numbers, Folding folding) {
  if (a.kind != b.kind || a.num_repeats != b.num_repeats ||
      a.children.size() != b.children.size()) {
    return false;
  }
  if (a.kind == TreeNode::Kind::alias && !have_like_targets(a.target, b.target, numbers)) {
    return false;
  }
  if (a.kind == TreeNode::Kind::value && folding.values == Folding::Values::none) return false;
  if (a.kind == TreeNode::Kind::tensor) {
    const TensorMeta& meta_a = contents.tensors[a.index].meta;
    const TensorMeta& meta_b = contents.tensors[b.index].meta;
    if (meta_a.dtype != meta_b.dtype || meta_a.shape != meta_b.shape) return false;
    if (folding.tensors == Folding::Tensors::of_equal_pieces &&
        contents.tensors[a.index].pieces != contents.tensors[b.index].pieces) {
      return false;
    }
    if (folding.meshes != nullptr &&
        folding.meshes->mesh_of(a.index) != folding.meshes->mesh_of(b.index)) {
      return false;
    }
  }
  for (std::size_t i = 0; i < a.children.size(); ++i) {
    if (a.children[i].label != b.children[i].label) return false;
    if (!are_alike(contents, a.children[i], b.children[i], numbers, folding)) return false;
  }
  return true;
}

// Merges siblings with consecutive numbers that `are_alike`, such as layers, into one node, without
// comparing elements. A label may have more than its number (`0.weight`), because single children
// are merged into their parents before. The number is the part before the first dot.
std::vector<TreeNode> fold(const formats::CheckpointContents& contents,
                           std::vector<TreeNode> siblings, Folding folding) {
  const auto split = [](const TreeNode& node) {
    const std::string_view label = node.label;
    const std::size_t dot = label.find('.');
    return std::pair(as_number(label.substr(0, dot)),
                     dot == std::string_view::npos ? std::string_view() : label.substr(dot));
  };
  const auto are_alike_at = [&](std::size_t a, std::size_t b) {
    const auto number_of = [&](std::size_t i) { return std::to_string(*split(siblings[i]).first); };
    return are_alike(contents, siblings[a], siblings[b], {number_of(a), number_of(b)}, folding);
  };
  std::vector<TreeNode> folded;
  for (std::size_t i = 0; i < siblings.size();) {
    const auto [first, suffix] = split(siblings[i]);
    std::size_t end = i + 1;
    while (first && end < siblings.size()) {
      const auto [number, other_suffix] = split(siblings[end]);
      if (number != *first + static_cast<std::int64_t>(end - i) || other_suffix != suffix ||
          !are_alike_at(i, end)) {
        break;
      }
      // Compares neighbours too. Else, an alias could have the tensor of the first sibling in one
      // sibling, and a tensor with the own number in another one.
      if (end - i > 1 && !are_alike_at(end - 1, end)) break;
      ++end;
    }
    TreeNode node = siblings[i];
    if (end - i > 1) {
      node.num_repeats = static_cast<std::int64_t>(end - i);
      const std::string range =
          "[" + std::to_string(*first) + ":" + std::to_string(*first + node.num_repeats) + "]";
      node.label = range + std::string(suffix);
      fold_targets(node, siblings[i + 1], range);
      for (std::size_t j = i + 1; j < end; ++j) node.totals.add(siblings[j].totals);
    }
    folded.push_back(std::move(node));
    i = end;
  }
  return folded;
}

// Converts a trie node to tree nodes: one for its entry, one for the group of its children, or
// both.
std::vector<TreeNode> build(const formats::CheckpointContents& contents, const Trie& trie,
                            std::string_view label, Folding folding) {
  std::vector<TreeNode> nodes;
  if (trie.leaf) {
    nodes.push_back(*trie.leaf);
    nodes.back().label = label;
  }
  if (trie.children.empty()) return nodes;
  TreeNode group;
  group.label = label;
  for (const auto& [name, child] : trie.children) {
    for (TreeNode& node : build(contents, child, name, folding)) {
      group.children.push_back(std::move(node));
    }
  }
  std::stable_sort(group.children.begin(), group.children.end(), comes_before);
  if (folding.tensors != Folding::Tensors::none) {
    group.children = fold(contents, std::move(group.children), folding);
  }
  for (const TreeNode& child : group.children) group.totals.add(child.totals);
  if (group.children.size() == 1) {
    TreeNode only = std::move(group.children.front());
    only.label = std::string(label) + "." + only.label;
    nodes.push_back(std::move(only));
  } else {
    nodes.push_back(std::move(group));
  }
  return nodes;
}

}  // namespace

void Totals::add(const Totals& other) {
  num_tensors += other.num_tensors;
  num_aliases += other.num_aliases;
  num_values += other.num_values;
  num_pieces += other.num_pieces;
  numel += other.numel;
  nbytes += other.nbytes;
}

void add_tensors_of_aliases(const formats::CheckpointContents& contents, Selection& selection) {
  std::set<std::size_t> tensors(selection.tensors.begin(), selection.tensors.end());
  for (const std::size_t a : selection.aliases) {
    const std::size_t t = tensor_of(contents, contents.aliases[a]);
    if (t >= contents.tensors.size() || !tensors.insert(t).second) continue;
    selection.totals.add(totals_of(contents.tensors[t]));
  }
  selection.tensors.assign(tensors.begin(), tensors.end());
}

std::size_t tensor_of(const formats::CheckpointContents& contents, const formats::Alias& alias) {
  const formats::TensorEntry* target = contents.find_tensor(alias.target);
  if (target == nullptr) return static_cast<std::size_t>(-1);
  return static_cast<std::size_t>(target - contents.tensors.data());
}

Selection select(const formats::CheckpointContents& contents, const NameSelection& names,
                 const std::string& path) {
  std::vector<std::string_view> all;
  Selection selection;
  const formats::EntrySelection entries(names);
  for (std::size_t t = 0; t < contents.tensors.size(); ++t) {
    all.push_back(contents.tensors[t].meta.fqn);
    if (!entries.selects(all.back())) continue;
    selection.tensors.push_back(t);
    selection.totals.add(totals_of(contents.tensors[t]));
  }
  for (std::size_t v = 0; v < contents.values.size(); ++v) {
    all.push_back(contents.values[v].name);
    if (!entries.selects(all.back())) continue;
    selection.values.push_back(v);
    ++selection.totals.num_values;
  }
  for (std::size_t a = 0; a < contents.aliases.size(); ++a) {
    all.push_back(contents.aliases[a].fqn);
    if (!entries.selects(all.back())) continue;
    selection.aliases.push_back(a);
    ++selection.totals.num_aliases;
  }
  if (names.selects_everything()) return selection;
  const std::vector<std::string> unused = formats::unused_patterns(names, all).wanted;
  if (!unused.empty()) {
    std::string what = "no name matches '" + printable(unused.front()) + "'";
    if (const auto closest = closest_word(unused.front(), all)) {
      what += " (did you mean '" + printable(*closest) + "'?)";
    }
    throw Error(ErrorKind::invalid_argument, {path, {}, {}}, what);
  }
  if (selection.empty()) {
    throw Error(ErrorKind::invalid_argument, {path, {}, {}},
                "the patterns together select no names (does a !pattern remove them all?)");
  }
  return selection;
}

TreeNode make_tree(const formats::CheckpointContents& contents, const Selection& selection,
                   Folding folding) {
  Trie trie;
  for (std::size_t t : selection.tensors) {
    insert(trie, contents.tensors[t].meta.fqn, TreeNode::Kind::tensor, t,
           totals_of(contents.tensors[t]));
  }
  for (std::size_t v : selection.values) {
    Totals totals;
    totals.num_values = 1;
    insert(trie, contents.values[v].name, TreeNode::Kind::value, v, totals);
  }
  for (std::size_t a : selection.aliases) {
    Totals totals;
    totals.num_aliases = 1;
    insert(trie, contents.aliases[a].fqn, TreeNode::Kind::alias, a, totals).target =
        contents.aliases[a].target;
  }
  TreeNode root;
  root.totals = selection.totals;
  for (const auto& [name, child] : trie.children) {
    for (TreeNode& node : build(contents, child, name, folding)) {
      root.children.push_back(std::move(node));
    }
  }
  std::stable_sort(root.children.begin(), root.children.end(), comes_before);
  if (folding.tensors != Folding::Tensors::none)
    root.children = fold(contents, std::move(root.children), folding);
  return root;
}

}  // namespace tessera::inspect
