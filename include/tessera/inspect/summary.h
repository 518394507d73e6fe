#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "tessera/base/glob.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// What tensors add up to, as logical tensors: replicas count once, aliases not at all.
struct Totals {
  std::int64_t num_tensors = 0;
  std::int64_t num_aliases = 0;
  std::int64_t num_values = 0;
  std::int64_t num_pieces = 0;
  std::int64_t numel = 0;
  std::uint64_t nbytes = 0;

  /// Adds the counts of other names.
  void add(const Totals& other);
};

/// Some of a checkpoint's names, as indices into the lists of its contents, in their order.
struct Selection {
  std::vector<std::size_t> tensors{};
  std::vector<std::size_t> values{};
  std::vector<std::size_t> aliases{};
  Totals totals{};

  bool empty() const { return tensors.empty() && values.empty() && aliases.empty(); }
};

/// Throws: Error(invalid_argument) naming the first pattern that matches nothing, with the name
/// that is most like it, or where patterns together leave nothing.
Selection select(const formats::CheckpointContents& contents, const NameSelection& names,
                 const std::string& path);

/// Returns the index of a tensor that must be there; npos where an alias has no target.
std::size_t tensor_of(const formats::CheckpointContents& contents, const formats::Alias& alias);

/// A part of the tree that names make when they are cut at their dots.
struct TreeNode {
  /// What stands there: a group has children, all else is an entry of the contents.
  enum class Kind { group, tensor, alias, value } kind = Kind::group;

  /// The components between the parent and this, joined with dots: a group with one member has no
  /// line of its own. `[0:32]` for siblings 0 to 31 that are alike and stand here as one.
  std::string label;
  std::int64_t num_repeats = 1;    // the siblings that this one stands for
  std::size_t index = 0;           // in the contents, except for a group; of the first sibling
  Totals totals;                   // of all siblings together
  std::vector<TreeNode> children;  // of the first sibling; numbers in numerical order
};

/// Which numbered siblings become one, as `[0:32]`: those with the same names below them, tensors
/// of the same dtypes and shapes (and cut into the same pieces), and values of whatever content.
/// `none`: siblings with tensors below them, or with values, stay apart.
struct Folding {
  /// Which siblings with tensors below them become one.
  enum class Tensors { none, of_equal_shape, of_equal_pieces } tensors = Tensors::of_equal_shape;
  /// Which siblings with values below them become one.
  enum class Values { of_any_content, none } values = Values::of_any_content;
};

/// Returns the root, a group without a label.
TreeNode make_tree(const formats::CheckpointContents& contents, const Selection& selection,
                   Folding folding = {});

}  // namespace tessera::inspect
