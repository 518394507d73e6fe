#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/shared_vector.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/strategy.h"
#include "tessera/layout/table_plan.h"

namespace tessera::reshard {

/// Which names (and shapes) the state of optimizers that are fused into embedding tables gets.
enum class OptimizerNames {
  as_stored,  // as in the source
  canonical,  // Tessera's own: `….state.<fqn>.row_sum`
  torchrec,   // torchrec's: `….state.<fqn>.<table>.momentum1`
};

/// Returns the value for `as-stored`, `canonical` or `torchrec`; nothing for another word.
std::optional<OptimizerNames> parse_optimizer_names(std::string_view name);
/// Returns the word that parse_optimizer_names reads.
std::string_view optimizer_names_name(OptimizerNames names);

using tessera::Rename;

/// Whether the caller allows something that is refused by default.
enum class Relaxation { refuse, allow };

/// What a cast does with numbers that are too large for the new dtype (TensorOverflow counts them).
enum class OnOverflow {
  refuse,    // the move fails
  saturate,  // they become the largest finite number of the new dtype, with their sign
  infinity,  // they become infinite, or NaN in float8_e4m3fn, which has no infinity
};

/// Returns the value for `refuse`, `saturate` or `infinity`; nothing for another word.
std::optional<OnOverflow> parse_on_overflow(std::string_view name);
/// Returns the word that parse_on_overflow reads.
std::string_view on_overflow_name(OnOverflow on_overflow);

/// Whether to move the entries of optimizers: state, `param_groups`, and gradient scalers.
enum class OptimizerSelection { keep, leave_out };

/// The format, layout, names and dtypes of the destination. By default, the format is native, and
/// everything else stays as it is in the source.
struct PlanOptions {
  formats::Format format{};               // of the destination
  int world_size = 0;                     // 0: from the strategy, table plan, mesh or source
  std::string strategy{};                 // for parse_strategy; empty: see plan_reshard
  std::optional<TablePlan> table_plan{};  // shards of each table; empty: by the strategy
  std::optional<MeshLayout> mesh{};       // rules by the destination's names; not with a strategy
  /// Another checkpoint. Each tensor of the destination is cut like the tensor of the same name in
  /// that checkpoint; optimizer state is cut like its parameter. Excludes all options above except
  /// the format.
  std::shared_ptr<const formats::CheckpointContents> like{};
  std::string like_path{};        // path of the checkpoint `like`, for errors
  std::vector<FlatUnit> units{};  // if not empty, replace the source's; same names, shapes, dtypes
  NameSelection only{};           // of the source's names
  OptimizerSelection optimizer = OptimizerSelection::keep;     // whether to move optimizer state
  OptimizerNames optimizer_names = OptimizerNames::as_stored;  // names of the state of fused tables
  std::vector<Rename> renames{};  // the first rename that fits a name is used
  std::optional<DType> cast{};    // new dtype of floating-point tensors; see plan_reshard
  OnOverflow on_overflow = OnOverflow::refuse;  // for numbers that the cast cannot hold
  std::string quantization_method{};  // method named by config.json beside the source; for messages
  std::size_t num_unordered_dicts = 0;      // MergedCheckpoint::num_unordered_dicts of the source
  Relaxation missing = Relaxation::refuse;  // leave out what is incomplete or missing
  Relaxation lossy = Relaxation::refuse;    // merge state that is stored per column shard
  Relaxation part = Relaxation::refuse;     // move a part of a checkpoint (PartOfWhole) as it is
};

/// Pieces and values that a source lists in its contents, but that it cannot read.
struct SourceGaps {
  formats::MissingData missing{};
  std::map<std::size_t, Error> refused_values{};  // key: index of a value that Tessera never reads
};

/// Finds the gaps of an open checkpoint. Reads the values that `names` selects. Throws: Error(io).
SourceGaps find_gaps(const formats::CheckpointReader& reader, const NameSelection& names);

/// Where one destination tensor's elements come from. The struct is kept small, because a move has
/// one for each tensor.
struct TensorCopy {
  std::size_t source_tensor = 0;
  /// For every destination piece, the indices of the source pieces that share elements with it,
  /// without replicas. Tensors of equal shapes and cuts share one list.
  SharedVector<std::vector<std::uint32_t>> source_pieces{};
  /// If the move merges row_wise_per_shard state: the widths of the source's column shards, which
  /// are the weights of the mean; otherwise empty. The source then has one block of rows for each
  /// of them, and every destination piece needs all source pieces.
  SharedVector<std::int64_t> merged_widths{};
  /// If each column shard of the destination gets a copy of row-wise state: the number of rows;
  /// otherwise 0. Element i of the destination is row `i % num_repeated_rows` of the source (or of
  /// the merged rows). Every destination piece lies within one copy.
  std::int64_t num_repeated_rows = 0;
};

/// What a move changes because a format, or a new name, has no place for it
/// (docs/formats/what-each-holds.md).
enum class FormatChange {
  text_keys,       // dict keys that are not strings become text (except optimizer_keys)
  optimizer_keys,  // the numbers of parameters in an optimizer's state become text
  split_ties,      // tied tensors are stored under each of their names
  list_root,       // the outermost list becomes a dict
  annotations,     // annotations of the checkpoint are left out
  requires_grad,   // the flag of a tensor is dropped
  parameters,      // a torch.nn.Parameter becomes a tensor
  shared_memory,   // tensors that share memory become separate tensors
  dict_classes,    // an OrderedDict becomes a dict
  tuples,          // a tuple with a tensor becomes a list
  attributes,      // attributes of a tensor or an OrderedDict are dropped
  value_types,     // a frozenset or the like becomes a plainer type
  dtensors,        // a DTensor or ShardedTensor becomes a tensor
  tensor_steps,    // an optimizer's step that is a number becomes a tensor
  key_order,       // the keys of a dict get the order of their names
  nested_keys,     // a key `model.w` of the outermost dict becomes a key `w` in a dict `model`
  model_names,     // a tensor `w` of the outermost dict becomes `model.w`
};

/// Returns the enumerator's name, as in JSON output: `text_keys`.
std::string_view format_change_name(FormatChange change);

/// How often a move makes a change.
struct FormatChangeCount {
  FormatChange change;
  std::size_t count;
  std::vector<std::string> names{};  // of attributes or types: sorted
  std::size_t by_rename = 0;         // part of `count` that a rename causes, not the format
  friend bool operator==(const FormatChangeCount&, const FormatChangeCount&) = default;
};

/// How much of the source is not moved, because PlanOptions::only and PlanOptions::optimizer leave
/// its names out. A tensor counts if none of its names is moved.
struct LeftOut {
  std::size_t tensors = 0;
  std::size_t values = 0;
  std::size_t aliases = 0;
  friend bool operator==(const LeftOut&, const LeftOut&) = default;
};

/// How many floating-point tensors keep their dtype although a cast asks for another one.
struct UncastTensors {
  std::size_t count = 0;
  std::string first{};  // the first of their names at the destination, as sorted; empty: none
  friend bool operator==(const UncastTensors&, const UncastTensors&) = default;
};

/// What to move where. A plan of plan_reshard depends only on its arguments, so it is equal on
/// every rank. A plan of plan_save or plan_load (job_state.h) is for one rank.
struct Plan {
  formats::CheckpointContents destination;
  std::vector<TensorCopy> copies;          // parallel to destination.tensors
  std::vector<std::size_t> value_sources;  // indices in the source; parallel to destination.values
  std::vector<formats::Finding>
      problems;                         // every reason to refuse the move; empty in a usable plan
  std::vector<formats::Finding> notes;  // findings that do not stop the move
  std::uint64_t nbytes_to_write = 0;    // of tensors
  OnOverflow on_overflow = OnOverflow::refuse;  // of casts
  std::vector<FormatChangeCount> changes{};  // made because the format has no place for something
  LeftOut left_out{};                        // because the options say so
  UncastTensors uncast{};                    // tensors that PlanOptions::cast leaves as they are
};

/// Plans a move of everything that is selected.
///
/// A cast changes floating-point parameters and buffers, and state of the kinds pointwise and
/// row_wise. All other tensors keep their dtype (`Plan::uncast`): tensors without dimensions,
/// entries of `param_groups`, other state. A cast of quantized codes or their scales is a problem.
///
/// Without a strategy:
/// - with a table plan, everything except its tables is `replicated`;
/// - with only a world size, or in a format that stores replicas, the strategy is `dim0`;
/// - otherwise the pieces stay as they are (replicas stored once).
///
/// safetensors and torch.save files hold whole tensors, so all options that cut tensors are
/// refused. A table without a rule in the table plan follows the strategy; without a strategy, it
/// is a problem. DCP has only boxes and no aliases: ranges become boxes, and an alias becomes a
/// tensor. Optimizer state is cut as its kind (StateKind) and its parameter require. A table's
/// row-wise state has one block of rows per column shard if its name at the destination is one of
/// torchrec's; otherwise it has one element per row.
///
/// If pieces of a tensor are missing, the plan uses their replicas, if there are any. Each entry
/// that `gaps` affects gets a note or a problem with its name. Throws: Error(invalid_argument) if
/// options contradict each other, or if a rename or a pattern (other than `!GLOB`) fits no name.
/// Plan::problems has what is wrong with the source's contents.
/// Cost: O(pieces log pieces) per tensor for common layouts.
Plan plan_reshard(const formats::CheckpointContents& source, const std::string& source_path,
                  const PlanOptions& options, const SourceGaps& gaps = {});

/// Returns the SHA-256, as hex digits, of what a plan decides about tensors, values and aliases
/// (not about units, annotations and key paths). Ranks compare this digest instead of the plan.
std::string plan_digest(const Plan& plan, const formats::CheckpointContents& source);

/// How much a move writes as the pieces of one rank.
struct RankShare {
  std::uint64_t num_pieces = 0;
  std::uint64_t nbytes = 0;
};

/// Returns how much a move writes for each rank of the destination, by rank.
std::vector<RankShare> rank_shares(const Plan& plan);

/// Prefixes that select tensors and values for PlanOptions. A prefix consists of whole components
/// of names: `encoder` or `encoder.` selects all names that begin with `encoder.`.
class NamePrefixes {
 public:
  NamePrefixes() = default;
  explicit NamePrefixes(std::vector<std::string> prefixes);

  bool empty() const { return prefixes_.empty(); }

  /// Returns patterns with which a NameSelection selects all names under the prefixes.
  std::vector<std::string> patterns() const;
  /// Returns renames that remove the prefixes from names.
  std::vector<Rename> removals() const;

  /// Throws Error(invalid_argument) naming `option` if a prefix selects no name of `contents`,
  /// because the prefix is then probably mistyped.
  void check_used(const formats::CheckpointContents& contents, std::string_view option) const;

 private:
  std::vector<std::string> prefixes_;  // each ends with a dot
};

}  // namespace tessera::reshard
