#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "formats/tensor_mesh.h"
#include "tessera/base/name_rules.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::inspect {

/// Sums over several names. `numel` and `nbytes` count each tensor once, without replicas and
/// aliases; `num_pieces` includes replicas.
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

/// A subset of a checkpoint's names, as ascending indices into the lists of its contents.
struct Selection {
  std::vector<std::size_t> tensors{};
  std::vector<std::size_t> values{};
  std::vector<std::size_t> aliases{};
  Totals totals{};

  bool empty() const { return tensors.empty() && values.empty() && aliases.empty(); }
};

/// Returns the names that the patterns select. Throws: Error(invalid_argument) if a pattern that is
/// no exclusion matches nothing (the error suggests a similar name), or if no name is selected.
Selection select(const formats::CheckpointContents& contents, const NameSelection& names,
                 const std::string& path);

/// Adds the tensors of selected aliases to the selection, each once. For commands that report about
/// an alias what they report about its tensor.
void add_tensors_of_aliases(const formats::CheckpointContents& contents, Selection& selection);

/// Returns the index of an alias's tensor; `static_cast<std::size_t>(-1)` if there is no such
/// tensor.
std::size_t tensor_of(const formats::CheckpointContents& contents, const formats::Alias& alias);

/// A node of the tree of names, which are split at their dots.
struct TreeNode {
  /// A group has children; the other kinds are entries of the contents.
  enum class Kind { group, tensor, alias, value } kind = Kind::group;

  /// The components of the name below the parent node. A group with a single child is merged with
  /// this child: `a.b`. `[0:32]` stands for the equal siblings 0 to 31.
  std::string label;
  std::int64_t num_repeats = 1;  // number of siblings that this node stands for
  std::size_t index = 0;  // of the entry in the contents (of the first sibling); unused for a group
  std::string target;     // of an alias: the name of its tensor, folded like a label; else empty
  Totals totals;          // sums over all siblings
  std::vector<TreeNode> children;  // children of the first sibling; numbers are sorted as numbers
};

/// Which numbered siblings (such as layers) are merged into one node, `[0:32]`. They must have the
/// same names below them, and tensors of equal dtypes and shapes (or also of equal pieces). Aliases
/// must have the same tensor, or each a tensor with the sibling's own number: `layers.3.emb` in
/// layer 3. Values may differ. `Tensors::none` merges nothing; `Values::none`: nothing with values.
struct Folding {
  /// Which tensors siblings must have to be merged.
  enum class Tensors { none, of_equal_shape, of_equal_pieces } tensors = Tensors::of_equal_shape;
  /// Whether siblings with values below them are merged.
  enum class Values { of_any_content, none } values = Values::of_any_content;
  /// If given, tensors must also have equal meshes and placements to be merged.
  const formats::MeshSource* meshes = nullptr;
};

/// Returns the root node of the tree of the selected names: a group without a label.
TreeNode make_tree(const formats::CheckpointContents& contents, const Selection& selection,
                   Folding folding = {});

}  // namespace tessera::inspect
