#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/glob.h"
#include "tessera/base/rename.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/strategy.h"
#include "tessera/layout/table_plan.h"

namespace tessera::reshard {

/// Which names (and forms) the state of fused optimizers gets.
enum class OptimizerNames {
  as_stored,  // those it has
  canonical,
  torchrec,
};

/// Returns what `as-stored`, `canonical` or `torchrec` stands for, or nothing.
std::optional<OptimizerNames> parse_optimizer_names(std::string_view name);
/// Returns the word that parse_optimizer_names reads.
std::string_view optimizer_names_name(OptimizerNames names);

using tessera::Rename;

/// A relaxation of strictness, which only the caller can name.
enum class Relaxation { refuse, allow };

/// Whether what belongs to optimizers (OptimizerEntries) is moved.
enum class OptimizerPart { keep, leave_out };

/// What the destination shall be. The defaults keep everything as the source has it.
struct PlanOptions {
  formats::Format format{};               // of the destination
  int world_size = 0;                     // 0: as the strategy, the plan or the source says
  std::string strategy{};                 // for parse_strategy; empty: see plan_reshard
  std::optional<TablePlan> table_plan{};  // who holds what of each table; nothing: by the strategy
  std::vector<FlatUnit> units{};          // replace the source's; with its names, shapes and dtypes
  NameSelection only{};                   // over the source's names
  OptimizerPart optimizer = OptimizerPart::keep;  // whether optimizer state comes along
  OptimizerNames optimizer_names = OptimizerNames::as_stored;  // of tables' fused state
  std::vector<Rename> renames{};            // the first that fits a name is taken
  std::optional<DType> cast{};              // for floating tensors but scalars of an optimizer
  Relaxation missing = Relaxation::refuse;  // leave out what is incomplete or not there
  Relaxation lossy = Relaxation::refuse;    // merge state that is kept per column shard
};

/// What a source has by its contents, and cannot give.
struct SourceGaps {
  formats::MissingData missing{};
  std::map<std::size_t, Error> refused_values{};  // by value: those of kinds that are never read
};

/// Looks for the gaps of an open checkpoint; reads the values of these names.
SourceGaps find_gaps(const formats::CheckpointReader& reader, const NameSelection& names);

/// Where one destination tensor's elements come from.
struct TensorCopy {
  std::size_t source_tensor = 0;
  /// For every destination piece, the source pieces that share elements with it, replicas left out.
  std::vector<std::vector<std::uint32_t>> source_pieces{};
  /// Not empty for row_wise_per_shard state that is merged: the source holds one block of rows per
  /// column shard, and these are the shards' widths, the weights of the mean. All source pieces are
  /// then needed for every destination piece.
  std::vector<std::int64_t> merged_widths{};
  /// Not 0 for row-wise state that each column shard of the destination gets a copy of: element i
  /// of the destination is row `i % num_repeated_rows` of the source (or of what is merged). Every
  /// destination piece lies within one copy.
  std::int64_t num_repeated_rows = 0;
};

/// A plan: a pure function of the source's contents and the options, equal on every rank.
struct Plan {
  formats::CheckpointContents destination;
  std::vector<TensorCopy> copies;          // parallel to destination.tensors
  std::vector<std::size_t> value_sources;  // parallel to destination.values
  std::vector<formats::Finding> problems;  // all that strictness refuses; empty in a usable plan
  std::vector<formats::Finding> notes;     // what a relaxation let pass
  std::uint64_t nbytes_to_write = 0;       // of tensors
};

/// Plans a move of everything that is selected.
///
/// Without a strategy: the pieces stay as they are (replicas stored once) where neither world size
/// nor tables change; `replicated` beside a table plan; `dim0` at another world size. safetensors
/// and torch.save files hold whole tensors, so neither strategy nor world size nor plan may be
/// given. A table that the table plan has no rule for follows the strategy where one is given, and
/// is a problem where none is. DCP knows only boxes and no aliases: ranges become boxes, an alias a
/// tensor of its own. Optimizer state follows its parameter by its role (optimizer_rules.h).
/// Row-wise state of a table gets the form that its name at the destination stands for
/// (torchrec_names.h): under torchrec's, one block of rows per column shard; else one element per
/// row.
/// A tensor is taken from the replicas that there are; what is left out or refused as it lies in
/// `gaps` is noted or a problem, name by name.
/// Throws: Error(invalid_argument) where the options contradict each other. What is wrong with the
/// source's contents is in `problems`, all of it.
/// Cost: O(pieces log pieces) per tensor for the layouts met in practice.
Plan plan_reshard(const formats::CheckpointContents& source, const std::string& source_path,
                  const PlanOptions& options, const SourceGaps& gaps = {});

/// Returns the SHA-256 of everything a plan decides, as hex digits. Ranks compare it instead of the
/// plan.
std::string plan_digest(const Plan& plan, const formats::CheckpointContents& source);

/// What one rank's file gets.
struct RankShare {
  std::uint64_t num_pieces = 0;
  std::uint64_t nbytes = 0;
};

/// Returns the share of each rank of the destination.
std::vector<RankShare> rank_shares(const Plan& plan);

/// Prefixes of names, by whole steps: `encoder`, with or without a last dot, is that of all names
/// which begin with `encoder.`. They name a part of a checkpoint, for PlanOptions.
class NamePrefixes {
 public:
  NamePrefixes() = default;
  explicit NamePrefixes(std::vector<std::string> prefixes);

  bool empty() const { return prefixes_.empty(); }

  /// Returns patterns for a NameSelection: what lies under the prefixes.
  std::vector<std::string> patterns() const;
  /// Returns what takes the prefixes off the names.
  std::vector<Rename> removals() const;

  /// Throws Error(invalid_argument) naming `option` where no name has a prefix: that is more likely
  /// a slip than a wish.
  void check_used(const formats::CheckpointContents& contents, std::string_view option) const;

 private:
  std::vector<std::string> prefixes_;  // each with its last dot
};

}  // namespace tessera::reshard
