#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "formats/per_rank_rules.h"
#include "reshard/optimizer_rules.h"
#include "reshard/plan_report.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/reshard/planner.h"

// Decides which names of the source are moved, and which names they get at the destination.
namespace tessera::reshard {

/// The names of a source that are moved: the names that PlanOptions::only selects, except optimizer
/// state if the move leaves it out. Keeps a view of `source`, which must outlive it.
/// Thread-safe.
class MovedSelection {
 public:
  MovedSelection(const formats::CheckpointContents& source, const PlanOptions& options);

  /// Returns whether an entry of the source (a tensor, a value or an alias) is moved. A pattern
  /// that excludes `<name>` also excludes `per_rank.<rank>.<name>`. One that selects `<name>` also
  /// selects that, unless the destination is a file for all ranks: a program that loads such a file
  /// expects the names of the model alone. There, only patterns that spell `per_rank` select it.
  bool contains(std::string_view name) const;
  /// Returns whether the patterns select an entry, also one that the move leaves out for another
  /// reason.
  bool is_asked_for(std::string_view name) const;
  /// Returns whether a pattern for `<name>` also selects `per_rank.<rank>.<name>`.
  bool selects_of_ranks() const { return keeps_ranks_; }
  /// Returns whether a moved entry has the name of optimizer state, although the move leaves out
  /// optimizer state: nothing proves that the entry belongs to an optimizer.
  bool keeps_state(std::string_view name) const;
  /// Returns whether a moved entry is in the dict of an optimizer, although the move leaves out
  /// optimizer state, and `keeps_state` does not say so (OptimizerEntries::may_contain).
  bool keeps_in_optimizer(std::string_view name) const;
  /// Returns whether the patterns fit an entry of a single rank that is left out because the
  /// destination is a file for all ranks (see `contains`).
  bool leaves_out_of_rank(std::string_view name) const;

 private:
  formats::EntrySelection only_;
  bool has_wanted_ = false;                       // `only_` has patterns without `!`
  std::optional<NameSelection> wanted_of_ranks_;  // those that spell `per_rank`, if any
  bool keeps_ranks_;                              // the destination is no single file for all ranks
  std::optional<OptimizerEntries> left_out_;      // not set: optimizer state is moved
};

/// A source tensor under its name at the destination.
struct MovedTensor {
  std::size_t source_tensor = 0;
  const std::string* source_name = nullptr;  // of the tensor, or of an alias that becomes a tensor
  std::string name{};
  formats::SharedKeyPath key_path{};
  std::uint32_t dict_order = 0;
  bool has_torchrec_name = false;  // its name at the destination is one of torchrec's
};

/// A value of the source under its name at the destination.
struct MovedValue {
  std::size_t source_value = 0;
  formats::ValueEntry entry;
};

/// All that is moved, in the order of the source's lists. Aliases of the source that become tensors
/// come last in `tensors`. Refers to the source.
struct MovedNames {
  std::vector<MovedTensor> tensors;
  std::vector<formats::Alias> aliases;  // under the names of the destination
  std::vector<MovedValue> values;
  /// Names for `source_name` that no list of the source has. Example: `b` is an alias of `a`, and
  /// rank 1 has its own value of `a`, `per_rank.1.a`. Then `b` on rank 1 is `per_rank.1.b`.
  std::deque<std::string> own_names;
  /// Tensors of the source for which PlanOptions::optimizer_names asks for torchrec's names, but
  /// the table plan does not name their tables. They keep their names.
  std::vector<std::size_t> without_table_rule;
  /// Paths at the source. Each leads to a key that is not a string and that a rename makes text.
  std::set<formats::KeyPath> text_keys;
};

/// Returns all entries that are moved. An alias becomes a tensor if the destination's format has no
/// aliases. If some aliases are moved but their tensor is not, the first of them becomes a tensor,
/// and the others become aliases of this tensor.
MovedNames list_moved_names(const formats::CheckpointContents& source, const PlanOptions& options,
                            const MovedSelection& selection);

/// Counts the entries of the source that the move leaves out.
LeftOut count_left_out(const formats::CheckpointContents& source, const MovedNames& moved,
                       const MovedSelection& selection);

/// Throws Error(invalid_argument) if a pattern matches no name, if a rename fits no moved name, or
/// if no name is selected. Adds a note for each exclusion (`!GLOB`) that matches no name.
void check_patterns_match(const formats::CheckpointContents& source, const PlanOptions& options,
                          const MovedSelection& selection, PlanReport& report);

/// Adds a note if the move leaves out optimizer state, but keeps tensors that may be such state.
void note_kept_state(const MovedNames& moved, const MovedSelection& selection, PlanReport& report);

/// Adds a note if tensors are moved that do not get torchrec's names (`without_table_rule`).
void note_state_without_table_rule(const formats::CheckpointContents& source,
                                   const MovedNames& moved, const MovedSelection& selection,
                                   PlanReport& report);

/// A tied parameter has its state under one name only. Adds a note for each other name that is
/// selected, if the patterns leave this state out but would select it under that name.
void note_state_under_other_names(const formats::CheckpointContents& source,
                                  const PlanOptions& options, const MovedSelection& selection,
                                  PlanReport& report);

/// Adds a note for each optimizer whose `param_groups` are moved, and whose state gets other
/// parameter names by the renames: no rename changes the names that `param_groups` list.
void note_groups_with_old_names(const formats::CheckpointContents& source, const MovedNames& moved,
                                const PlanOptions& options, PlanReport& report);

/// Adds a note if the renames give a parameter another name, but its optimizer state no name that
/// belongs to it: PyTorch gives state to the parameter that its name says.
void note_state_of_renamed_parameters(const formats::CheckpointContents& source,
                                      const MovedNames& moved, const MovedSelection& selection,
                                      const PlanOptions& options, PlanReport& report);

/// Adds a note if the move writes files for torch.load, and optimizer state has the numbers of
/// parameters as text, as DCP makes it: `torch.optim.Optimizer.load_state_dict` finds none of it.
void note_numbers_in_text(const formats::CheckpointContents& source, const MovedNames& moved,
                          formats::Format format, PlanReport& report);

/// Adds a note if the renames give a parameter the name of another one, and optimizer state under
/// numbers is moved: a number stands for a place among the parameters, and stays with the place.
void note_numbers_of_renamed_parameters(const formats::CheckpointContents& source,
                                        const MovedNames& moved, const PlanOptions& options,
                                        PlanReport& report);

/// Adds a note for each rename that ends within a number of a moved name: `layers.1=layers.9` also
/// changes `layers.10`.
void note_renames_within_numbers(const formats::CheckpointContents& source, const MovedNames& moved,
                                 const PlanOptions& options, PlanReport& report);

}  // namespace tessera::reshard
