#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/name_rules.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/checkpoint_series.h"
#include "tessera/formats/create.h"
#include "tessera/formats/format_driver.h"
#include "tessera/layout/strategy.h"
#include "tessera/reshard/planner.h"

// Saves and loads the state of a running job, on all ranks together, without libtorch. The caller
// describes the job's tensors, gives the addresses of their bytes, and sends the messages between
// the ranks. The C++ runtime (TrainState) and the Python package are built on this.

namespace tessera::reshard {

/// A tensor of a job, as every rank knows it.
struct JobTensor {
  TensorMeta meta{};
  formats::KeyPath key_path{};  // empty: the fqn is a top-level key
  formats::StateKind kind = formats::StateKind::plain;
  std::string parameter{};  // of optimizer state: the fqn of its parameter; else empty
  std::vector<Shard>
      layout{};  // which ranks hold which regions; empty: every rank holds everything
};

/// All tensors of a job, in any order. Must be equal on all ranks. No name may occur twice.
struct JobState {
  int world_size = 1;
  std::vector<JobTensor> tensors{};
  std::vector<formats::Alias> aliases{};  // of `tensors`
  std::vector<FlatUnit> units{};          // the flat parameters that hold the tensors
  /// If true, the kinds of optimizer state are derived from the names, as for a checkpoint without
  /// kinds. If false, JobTensor::kind and JobTensor::parameter are used.
  bool has_kinds_by_name = false;
  /// Names of the values that are saved with the tensors. With `has_kinds_by_name`, names such as
  /// `optim.param_groups` tell where optimizer state is.
  std::vector<std::string> value_names{};
};

/// Decides which rank writes which piece of a job's tensors, and returns the contents of the
/// checkpoint. Exactly one rank writes each piece: of the ranks that hold its region, the one with
/// the least to write so far. Cuts regions into pieces that the format can hold. If the format has
/// no aliases, each alias becomes a tensor.
formats::CheckpointContents share_out(const JobState& state, const formats::FormatTraits& traits);

/// Counts what a save of these contents in the format changes: keys of dicts that become text, and
/// tied tensors that are stored under each name. `num_aliases`: of the job. Returns only kinds that
/// occur.
std::vector<FormatChangeCount> count_save_changes(const formats::CheckpointContents& contents,
                                                  std::size_t num_aliases, formats::Format format);

/// Returns a SHA-256, in hex digits, of world size, tensors in their order, aliases and format (not
/// of `units`, the keys in key paths, and what tells kinds). Ranks compare it, not the state.
std::string layout_digest(const JobState& state, formats::Format format);

/// Returns `contents`, but with other pieces: the regions that `rank` holds. `held` is parallel to
/// `contents.tensors`.
formats::CheckpointContents held_contents(const formats::CheckpointContents& contents,
                                          const std::vector<std::vector<Region>>& held, int rank);

/// Returns a plan that writes the pieces of `rank` from the regions that it holds. The source of
/// the plan has the contents that `held_contents` returns. Throws: Error(mismatch) naming the
/// tensor if no single region that the rank holds contains a whole piece.
Plan plan_save(const formats::CheckpointContents& contents,
               const std::vector<std::vector<Region>>& held, int rank);

/// Returns a source that reads a rank's memory. `contents` comes from `held_contents`. For each
/// piece of `contents`, `data` has the address of the first element. Elements are contiguous, in
/// the region's own row-major order. The memory must outlive the source.
std::unique_ptr<formats::TensorSource> memory_source(
    formats::CheckpointContents contents, std::vector<std::vector<const std::byte*>> data);

/// Returns a writer that copies tensors into a rank's memory, with `contents` and `data` as for
/// `memory_source`. `commit` does nothing.
std::unique_ptr<formats::CheckpointWriter> memory_writer(formats::CheckpointContents contents,
                                                         std::vector<std::vector<std::byte*>> data);

/// What a load accepts beyond an exact fit (default: nothing).
struct LoadPlanOptions {
  Relaxation missing = Relaxation::refuse;     // missing and incomplete entries keep their values
  Relaxation unexpected = Relaxation::refuse;  // names that only the checkpoint has are skipped
  Relaxation cast = Relaxation::refuse;        // between floating dtypes
  Relaxation lossy = Relaxation::refuse;       // merge state that is stored per column shard
  NameSelection only{};           // the wanted names to load; other names keep their values
  std::vector<Rename> renames{};  // from the checkpoint's names to the wanted ones
};

/// Plans how to fill the tensors that `rank` holds. `wanted` lists all tensors of the job, each
/// with the pieces that this rank holds (none, one or more; they may overlap). It also has the
/// job's kinds and parameters of optimizer state, its aliases, and the names of its values.
///
/// The plan's destination has the wanted tensors and values that are loaded, for a writer that
/// copies into memory. The checkpoint must have every wanted name, as a tensor or as an alias. If
/// it has a tied tensor under only one name, that tensor is loaded, and the other names are
/// reported as missing.
///
/// State under torchrec's names fills wanted tensors with canonical names (torchrec_names.h),
/// unless torchrec's name itself is wanted.
///
/// `problems` lists everything that does not fit: one part of a checkpoint (PartOfWhole), missing
/// and unexpected names, shapes, dtypes, kinds of state, holes and overlaps in the checkpoint,
/// flat vectors without a layout. `problems` is the same on every rank, with one exception: if the
/// columns of a table are cut differently (row_wise_per_shard), only the ranks that hold a shard of
/// the table report this.
/// Requires: names sorted and unique, pieces within their tensors, `rank` below the world size.
/// Throws: Error(invalid_argument) if a pattern (other than `!GLOB`) or a rename matches no name.
/// Cost: O(pieces log pieces) per tensor for common layouts.
Plan plan_load(const formats::CheckpointContents& source, const std::string& source_path,
               const formats::CheckpointContents& wanted, int rank, const LoadPlanOptions& options);

/// Returns one line per problem, `<where>: <rule>: expected <x>, found <y>`. After `max_lines`
/// lines, one more line says how many problems are left. The last line has no line feed.
std::string problems_to_string(const std::vector<formats::Finding>& problems,
                               std::size_t max_lines);

/// Returns the format in which the ranks write their parts: `format`, or native if a single process
/// must write `format`.
formats::Format format_of_parts(formats::Format format);

/// Options of a save by all ranks of a job. Must be equal on all ranks, except memory and file
/// system.
struct RankSaveOptions {
  formats::Format format{};  // of the checkpoint
  /// What to do if there is a checkpoint at the path. Neither policy replaces other files.
  OverwritePolicy overwrite = OverwritePolicy::refuse;
  formats::NativeWriteOptions native{};  // for native only
  int keep_last = 0;                     // as SaveOptions::keep_last of the runtime
  std::string base{};                    // as SaveOptions::base of the runtime
  bool changed_rows = false;             // as SaveOptions::changed_rows of the runtime
  std::uint64_t memory_nbytes = std::uint64_t{64} << 20;  // for this rank's buffers
  FileSystem* file_system = &FileSystem::posix();         // must outlive the save
};

/// One rank's side of a save by all ranks of a job ([Note: Rank parts] in parts.h). No checkpoint
/// appears at the path before it is whole. At a URL, single files may appear earlier.
///
///     rank 0      stage; tells the directory to the others
///     all ranks   set_contents
///     rank 0      start_one_file
///     all ranks   compare_with_base; tells the text to the others
///     all ranks   link_equal_pieces
///     all ranks   write
///     rank 0      join; tells the token to the others
///     all ranks   seal
///     rank 0      finish
///
/// Without a base, you can leave out compare_with_base and link_equal_pieces. Begin an action only
/// when all ranks have finished the action before it. If an action throws on one rank, all ranks
/// must stop there and destroy this object; rank 0's destructor then removes what was written (not
/// files at a URL). An action may run on any thread, but two actions must not run at once.
class RankSave {
 public:
  /// `path`: of the checkpoint; trailing slashes are ignored.
  RankSave(std::string path, int rank, RankSaveOptions options);
  ~RankSave();
  RankSave(const RankSave&) = delete;
  RankSave& operator=(const RankSave&) = delete;

  const std::string& path() const;         // of the checkpoint
  const RankSaveOptions& options() const;  // the options that the constructor got
  /// Returns a line for each older checkpoint that `keep_last` did not remove, because its folder
  /// also has other files. Known on rank 0 after `finish`.
  const std::vector<std::string>& left_checkpoints() const;

  /// Creates the staging directory and returns its path. If a single process must write the format,
  /// checks `<path>.parts` instead of the path, and `start_one_file` checks the path.
  /// Throws:
  /// - Error(already_exists) if something is at the path and `overwrite` is `refuse`, if another
  ///   process is writing there, or if an interrupted run left work to resume;
  /// - Error(invalid_argument) if `overwrite` is `replace` and there are files other than a
  ///   checkpoint's, or if check_base refuses the base for this path (a URL has no base);
  /// - what BaseCheckpoint::open throws;
  /// - Error(io).
  std::string stage();
  /// Sets contents and values. `directory`: the result of `stage` on rank 0. `values` is parallel
  /// to `contents.values`. Throws: Error(invalid_argument) if the names form no tree of containers.
  void set_contents(std::string directory, formats::CheckpointContents contents,
                    std::vector<Value> values);
  /// Creates the single file if one process must write the format. Otherwise does nothing. Throws:
  /// Error(mismatch) if the format cannot hold the contents; what create_checkpoint throws.
  void start_one_file();
  /// Compares the pieces that this rank writes with those of the base. Returns a text for
  /// `link_equal_pieces`; empty without a base. `plan` and `source` as for `write`.
  /// Throws: what BaseCheckpoint::open and find_equal_pieces throw.
  std::string compare_with_base(const Plan& plan, const formats::TensorSource& source);
  /// Decides which pieces stay in files of the base: the same on all ranks. `texts` has what
  /// `compare_with_base` returned on each rank. Throws: Error(mismatch) if the ranks have opened
  /// different checkpoints.
  void link_equal_pieces(const std::vector<std::string>& texts);
  /// Returns the bytes of this rank's pieces that stay in files of the base, before compression.
  std::uint64_t linked_nbytes() const;
  /// Writes this rank's part. `plan`: from `plan_save`. `source`: `memory_source`, or with equal
  /// contents. Throws: as `execute` and the writer; Error(not_found) if TMPDIR is not shared (URL).
  void write(const Plan& plan, const formats::TensorSource& source);
  /// Checks that all parts exist. Returns the token for `seal`. At a URL, removes the old index.
  std::uint64_t join();
  /// Marks this rank's part as belonging to the checkpoint. If it belongs at a URL, uploads it.
  void seal(std::uint64_t token);
  /// Makes the checkpoint appear at the path, then removes older ones as `keep_last` says. If the
  /// removal fails, the error says that the new checkpoint is complete.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::reshard
