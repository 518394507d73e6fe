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
      layout{};  // which ranks hold which regions; empty: every rank holds the whole tensor
};

/// All tensors of a job, in any order. Must be equal on all ranks. No name may occur twice.
struct JobState {
  int world_size = 1;
  std::vector<JobTensor> tensors{};
  std::vector<formats::Alias> aliases{};  // of `tensors`
  std::vector<FlatUnit> units{};          // the flat parameters that hold the tensors
  /// If true, share_out derives the kinds of optimizer state from the names, as for a checkpoint
  /// without kinds. If false, it takes JobTensor::kind and JobTensor::parameter.
  bool has_kinds_by_name = false;
  /// Names of the values that are saved with the tensors. With `has_kinds_by_name`, names such as
  /// `optim.param_groups` tell where optimizer state is.
  std::vector<std::string> value_names{};
};

/// Decides which rank writes which piece of a job's tensors, and returns the contents of the
/// checkpoint. Exactly one rank writes each piece: of the ranks that hold its region, the one with
/// the least to write so far. Cuts regions into pieces that the format can hold. If the format has
/// no aliases, each alias becomes a tensor. Equal arguments give equal contents, on every rank.
formats::CheckpointContents share_out(const JobState& state, const formats::FormatTraits& traits);

/// Counts what a save of these contents in the format changes: dict keys that become text, and tied
/// tensors that are stored once under each of their names. `num_aliases`: of the job. Returns no
/// entry for a change that does not occur.
std::vector<FormatChangeCount> count_save_changes(const formats::CheckpointContents& contents,
                                                  std::size_t num_aliases, formats::Format format);

/// Returns a SHA-256, in hex digits, that ranks compare instead of the state. It covers the format
/// and the state, except `units`, has_kinds_by_name and value_names. Of key paths, it covers the
/// kinds of keys (text, number, position), because a name does not tell 0 from "0".
std::string layout_digest(const JobState& state, formats::Format format);

/// Returns `contents` with other pieces: for each tensor, the regions that `rank` holds. These are
/// in `held`, which is parallel to `contents.tensors`.
formats::CheckpointContents held_contents(const formats::CheckpointContents& contents,
                                          const std::vector<std::vector<Region>>& held, int rank);

/// Returns a plan that writes the pieces of `rank` from the regions that it holds (`held`, as for
/// held_contents). Execute it with a source whose contents `held_contents` returned. Throws:
/// Error(mismatch) naming the tensor if a piece is not within one region that the rank holds.
Plan plan_save(const formats::CheckpointContents& contents,
               const std::vector<std::vector<Region>>& held, int rank);

/// Returns a source that reads a rank's memory. `contents`: from `held_contents`. `data`: for each
/// tensor and each of its pieces, the address of the piece's first element. A piece's elements are
/// contiguous, in the region's own row-major order. The memory must outlive the source.
std::unique_ptr<formats::TensorSource> memory_source(
    formats::CheckpointContents contents, std::vector<std::vector<const std::byte*>> data);

/// Returns a writer that copies tensors into a rank's memory. `contents` and `data`: as for
/// memory_source. Its `commit` does nothing. The memory must outlive the writer.
std::unique_ptr<formats::CheckpointWriter> memory_writer(formats::CheckpointContents contents,
                                                         std::vector<std::vector<std::byte*>> data);

/// What a load accepts although it does not fit exactly. By default nothing. A load with `allow`:
struct LoadPlanOptions {
  Relaxation missing = Relaxation::refuse;     // skips what the checkpoint lacks or has incomplete
  Relaxation unexpected = Relaxation::refuse;  // skips names that only the checkpoint has
  Relaxation cast = Relaxation::refuse;        // converts between floating-point dtypes
  Relaxation lossy = Relaxation::refuse;       // merges state that is stored per column shard
  NameSelection only{};           // the wanted names to load; other names keep their values
  std::vector<Rename> renames{};  // from the checkpoint's names to the wanted ones
};

/// Plans how to fill the tensors that `rank` holds. `wanted` lists all tensors of the job, each
/// with the pieces that this rank holds (none, one or more; they may overlap). `wanted` also has
/// the job's aliases, the names of its values, and the kinds and parameters of its optimizer state.
///
/// The plan's destination has the wanted tensors and values that are loaded; execute the plan with
/// memory_writer. The checkpoint must have every wanted name, as a tensor or as an alias. If the
/// job has several names for a tensor, and the checkpoint only one of them, the tensor is loaded,
/// and the other names are reported as missing.
///
/// Optimizer state under torchrec's names fills wanted tensors that have Tessera's own (canonical)
/// names (src/reshard/torchrec_names.h), unless torchrec's name itself is wanted.
///
/// Plan::problems lists everything that does not fit: only a part of a checkpoint (PartOfWhole),
/// missing and unexpected names, shapes, dtypes, kinds of state, holes and overlaps in the
/// checkpoint, flat vectors without a layout. It is the same on every rank, with one exception: if
/// the columns of a table are cut differently (row_wise_per_shard), only the ranks that hold a
/// shard of the table report this.
/// Requires: names sorted and unique, pieces within their tensors, `rank` below the world size.
/// Throws: Error(invalid_argument) if a pattern (other than `!GLOB`) or a rename matches no name.
/// Cost: O(pieces log pieces) per tensor for common layouts.
Plan plan_load(const formats::CheckpointContents& source, const std::string& source_path,
               const formats::CheckpointContents& wanted, int rank, const LoadPlanOptions& options);

/// Returns one line per problem, `<where>: <rule>: expected <x>, found <y>`. After `max_lines`
/// lines, one more line says how many problems are left. The last line has no line feed.
std::string problems_to_string(const std::vector<formats::Finding>& problems,
                               std::size_t max_lines);

/// Returns the format in which the ranks write their parts: `format`; native if a single process
/// must write all of `format`.
formats::Format format_of_parts(formats::Format format);

/// Options of a save by all ranks of a job. Must be equal on all ranks, except memory and file
/// system.
struct RankSaveOptions {
  formats::Format format{};  // of the checkpoint
  /// What to do if there is a checkpoint at the path. Neither policy replaces other files.
  OverwritePolicy overwrite = OverwritePolicy::refuse;
  formats::NativeWriteOptions native{};  // for native only
  int keep_last = 0;          // how many checkpoints of the series to keep, with this one; 0: all
  std::string base{};         // path of an older checkpoint to share files with; empty: none
  bool changed_rows = false;  // with a base: writes only the rows of a piece that differ, if few
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
  /// Returns a line for each older checkpoint that `finish` should remove (`keep_last`) but did
  /// not, because the checkpoint's folder has other files too. Empty on ranks other than 0.
  const std::vector<std::string>& left_checkpoints() const;

  /// Creates the staging directory and returns its path. If a single process must write the format,
  /// this directory is for `<path>.parts`, and start_one_file later checks the path itself.
  /// Throws:
  /// - Error(already_exists) if something is at the path and `overwrite` is `refuse`, if another
  ///   process is writing there, or if an interrupted run left work to resume;
  /// - Error(invalid_argument) if `overwrite` is `replace` and there are files other than a
  ///   checkpoint's, if check_base refuses the base, or if there is a base and the path is a URL;
  /// - what BaseCheckpoint::open throws;
  /// - Error(io).
  std::string stage();
  /// Sets contents and values. `directory`: what `stage` returned on rank 0. `values`: parallel to
  /// `contents.values`. Throws: Error(invalid_argument) if one name is a value and a container.
  void set_contents(std::string directory, formats::CheckpointContents contents,
                    std::vector<Value> values);
  /// If one process must write the format, creates its file; otherwise does nothing. Throws:
  /// Error(mismatch) if the format cannot hold the contents; what create_checkpoint throws.
  void start_one_file();
  /// Compares the pieces that this rank writes with those of the base. Returns a text for
  /// `link_equal_pieces`; empty without a base. `plan` and `source` as for `write`.
  /// Throws: what BaseCheckpoint::open and find_equal_pieces throw.
  std::string compare_with_base(const Plan& plan, const formats::TensorSource& source);
  /// Decides, equally on all ranks, which pieces stay in files of the base. `texts`: what
  /// `compare_with_base` returned on each rank. Without a base, does nothing. Throws:
  /// Error(mismatch) if the ranks have opened different checkpoints as the base.
  void link_equal_pieces(const std::vector<std::string>& texts);
  /// Returns the bytes of this rank's pieces that stay in files of the base, before compression.
  std::uint64_t linked_nbytes() const;
  /// Writes this rank's part. `plan`: from `plan_save`. `source`: as plan_save requires. Throws: as
  /// `execute` and the writer; for a URL, Error(not_found) if the ranks do not share TMPDIR.
  void write(const Plan& plan, const formats::TensorSource& source);
  /// Checks that all parts exist; returns the token for `seal`. For a URL, removes the old index.
  std::uint64_t join();
  /// Marks this rank's part as part of the checkpoint. If the path is a URL, also uploads the part.
  void seal(std::uint64_t token);
  /// Makes the checkpoint appear at the path, then removes older ones as `keep_last` says. If only
  /// the removal fails, throws an Error that says that the new checkpoint is complete.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::reshard
