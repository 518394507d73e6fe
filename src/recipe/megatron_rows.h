#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "recipe/operation.h"
#include "recipe/rules.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

// The order of rows in `linear_fc1` of experts. Megatron has all rows of the gate before those of
// the up projection, unless its arguments say that rows of both take turns. Rules of recipes expect
// the gate first.
namespace tessera::recipe {

/// In which order a checkpoint has the rows of the gate and of the up projection.
struct RowOrder {
  std::int64_t turns = 0;      // rows after which they take turns; 0: the gate comes first
  std::int64_t num_ranks = 0;  // tensor ranks of torch_dist, if known
  std::string unread{};        // why the arguments cannot be read; then the rest is not known

  friend bool operator==(const RowOrder&, const RowOrder&) = default;
};
struct RowOrders {
  RowOrder experts{};
  RowOrder shared_experts{};
};

/// Whether a tensor is one whose rows may take turns: `linear_fc1` of experts.
bool may_take_turns(std::string_view name);

/// Reads the arguments from the `common.pt` of a torch_dist checkpoint. Returns nothing if the
/// folder has no such file, and an empty set if another program's file cannot be read.
std::optional<MegatronArguments> arguments_in_common_file(const FileSystem& fs,
                                                          const std::string& folder);
/// Reads the arguments from the `common.pt` of a torch_dist checkpoint, and from the object that
/// replaces it in newer versions of Megatron. If both have arguments and they differ, neither
/// counts as read.
MegatronArguments arguments_of_checkpoint(const FileSystem& fs, const std::string& path);

/// Returns the order of rows of a checkpoint with these arguments.
RowOrders row_orders_in(const MegatronArguments& arguments);
/// Returns the order of rows in `reader`, as the arguments say: in `options.megatron_arguments`,
/// and in values such as `args.<name>`. Those of a merge's source count for its own tensors.
/// Throws: Error(unsupported) naming a tensor if another source of a merge has another order.
RowOrders row_orders_of(const formats::CheckpointReader& reader, const RecipeOptions& options);

/// Whether `rules` make something of a tensor whose rows may take turns.
bool use_rows(const Rules& rules, const std::string& prefix,
              const formats::CheckpointContents& contents);

/// Rules, and a note that says what they change.
struct RulesWithNote {
  Rules rules;
  formats::Finding note;
};

/// Returns rules that put all rows of the gate before those of the up projection, and drop the
/// values that say that they take turns; nothing if no tensor needs this. `contents`: with names as
/// `GPTModel.state_dict()` has them. `path`: of the checkpoint.
/// Throws: Error(unsupported) naming a tensor if the order is not known, or if several tensor ranks
/// of torch_dist have it: Megatron stores the first halves of all ranks first, whatever rows are in
/// them.
std::optional<RulesWithNote> rules_for_rows(const std::string& recipe_path,
                                            const formats::CheckpointContents& contents,
                                            const RowOrders& orders, const std::string& path);

/// Returns the names of the tensors whose rows may take turns.
std::set<std::string> names_with_rows(const formats::CheckpointContents& contents);
/// For a recipe that made Megatron's names, with the gate first: returns rules that drop the values
/// that say that rows take turns, and a note; nothing if no argument says so. `before`: the names
/// that had rows before the recipe.
std::optional<RulesWithNote> rules_for_made_rows(const std::string& recipe_path,
                                                 const formats::CheckpointReader& made,
                                                 const RecipeOptions& options,
                                                 const std::set<std::string>& before);

/// Throws Error(unsupported) naming a tensor whose rows are in the order of a `checkpoint_version`
/// below 2, which rules for Megatron's names do not expect.
void require_new_order_of_rows(const formats::CheckpointReader& reader);

}  // namespace tessera::recipe
