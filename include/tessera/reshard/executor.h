#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stop_token>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/file_system.h"
#include "tessera/base/parallel.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"
#include "tessera/formats/merge.h"
#include "tessera/reshard/planner.h"

namespace tessera::reshard {

/// How many elements of one tensor were too large for the new dtype of a cast, and the largest of
/// them. If the new dtype has no infinity, infinite elements also count. Plan::on_overflow decides
/// what these elements become.
struct TensorOverflow {
  std::size_t tensor_index = 0;  // of the destination
  std::int64_t num_elements = 0;
  double largest_magnitude = 0.0;  // of these elements in the source; may be infinite
};

/// How many elements of one tensor were not zero, and became zero in a cast.
struct TensorUnderflow {
  std::size_t tensor_index = 0;  // of the destination
  std::int64_t num_elements = 0;
};

/// What happens to extra files: the files in the source's folder that are no part of the
/// checkpoint, such as `config.json` and a tokenizer.
enum class ExtraFilesPolicy {
  carry,   // copied into the destination's directory
  leave,   // not copied
  refuse,  // ExtraFilesPlan::problems gets an entry that names them
};

/// Returns the value for `carry`, `leave` or `refuse`; nothing for another word.
std::optional<ExtraFilesPolicy> parse_extra_files_policy(std::string_view name);

/// The default of ExtraFilesOptions::max_nbytes.
inline constexpr std::uint64_t kDefaultExtraFilesNbytes = std::uint64_t{256} << 20;

/// A cast: the old dtypes of the tensors, and their new dtype.
struct CastDTypes {
  std::set<DType> from;
  DType to;
};

/// Which extra files a move copies. If they exceed `max_nbytes` together, the largest are left out.
struct ExtraFilesOptions {
  ExtraFilesPolicy policy = ExtraFilesPolicy::carry;    // what happens to extra files
  std::uint64_t max_nbytes = kDefaultExtraFilesNbytes;  // of all copied files together
  std::string folder{};  // whose files are copied instead of the sources'; empty: the sources'
  /// If the sources of a merge have different files of one name: the source whose file is copied.
  formats::MergePreference preference = formats::MergePreference::none;
  /// Whether quantized weights became numbers. If true, the move does not copy their settings.
  bool removes_quantization = false;
  /// Whether the destination's tensors are other ones than one source's (a combination, a merge, a
  /// recipe), or have other names (also by a merge's prefixes), or the optimizer is left out. If
  /// true, the move does not copy the files of weights and optimizers that trainers resume from.
  /// Nor does it if the plan casts tensors or leaves some out.
  bool changes_tensors = false;
  /// Whether adapters were added to the weights. If true, the move does not copy
  /// `adapter_config.json`.
  bool merges_adapters = false;
  /// Whether a recipe made the tensors. If true, a destination of whole tensors does not get
  /// Megatron's `common.pt` and `metadata.json`, which describe the tensors before the recipe.
  bool is_converted = false;
  /// Set if the reader calculates tensors and shows them as float64, for the plan to cast: their
  /// dtypes before the calculation, and the dtype that the plan gives them.
  std::optional<CastDTypes> widened{};
};

/// What happens to the extra files of a move.
struct ExtraFilesPlan {
  /// An entry of the source's folder that is not copied, and the reason.
  struct Left {
    std::string name;
    std::string why;  // such as `a folder`; the words are in docs/cli/ckpt-reshard.md
  };
  /// A change that the move makes in the copy of a file.
  struct Edit {
    std::string name;
    std::string what;  // such as `text_config.torch_dtype: float32 to bfloat16`
  };

  std::vector<formats::ExtraFile> carried{};  // sorted by name, for CreateOptions::extra_files
  std::vector<Left> left{};                   // sorted by name
  std::vector<Edit> edits{};                  // sorted by name
  /// For SafetensorsWriteOptions::stem: that of the source's own files if they keep it, otherwise
  /// `adapter_model` for an adapter, `diffusion_pytorch_model` if the copied `config.json` is one
  /// of diffusers, or `model`.
  std::string stem{};
  std::vector<formats::Finding> problems{};  // for Plan::problems
  std::vector<formats::Finding> notes{};     // for Plan::notes
};

/// Lists the extra files of the directories among `sources`, and decides which of them a move will
/// copy into a checkpoint of `format` at `destination`. If `options.folder` is set, the move will
/// copy files of that folder instead. Never follows links. Of the sources' subfolders, enters only
/// those that hold files of the checkpoint. A destination that is a single file gets none.
///
/// If sources have different files of one name, the move copies the preferred one; without a
/// preference, none. If the plan casts tensors, the copied `config.json` gets the new dtype. A file
/// whose name a checkpoint's own file could have is not copied, because readers could take it for
/// one. A file whose name the destination's writer uses is a problem (ExtraFilesPlan::problems).
/// Throws: Error(io); Error(not_found, invalid_argument) if `options.folder` is no folder.
ExtraFilesPlan plan_extra_files(const FileSystem& fs, const Plan& plan,
                                const formats::CheckpointReader& reader,
                                const std::vector<std::string>& sources,
                                const std::string& destination, formats::Format format,
                                const ExtraFilesOptions& options);

/// What tells whether a file has changed.
struct FileState {
  std::string words{};      // size and time of change (or ETag, at a URL); a journal stores this
  std::uint64_t inode = 0;  // of a local file; other machines may see another number

  bool operator==(const FileState&) const = default;
};
/// Key: the path of the file.
using FileStates = std::map<std::string, FileState>;

/// Returns the present states of a source's data files. Empty if the bytes are in memory. Throws:
/// Error(io).
FileStates source_file_states(const formats::CheckpointReader& reader);

/// Local files and files at URLs, for opening a source. Records the state of each file before the
/// file is opened for the first time. So `require_unchanged` notices also a change that happens
/// while the source is being opened, which may take long. Looks at each file once: if the file was
/// there, `kind_of` answers from the recorded state. Thread-safe.
class SourceFiles {
 public:
  SourceFiles();
  ~SourceFiles();
  SourceFiles(const SourceFiles&) = delete;
  SourceFiles& operator=(const SourceFiles&) = delete;

  /// Returns the file system. This object owns it, and must outlive all readers that use it.
  const FileSystem& file_system() const;

  /// Returns the states of a source's data files. For a file that has been opened: its state before
  /// the opening. For any other file: its state at the first call. Throws: Error(io).
  FileStates states_of(const formats::CheckpointReader& reader) const;
  /// Throws Error(mismatch) if another program has changed or replaced a file since just before it
  /// was opened (or since `states_of` first looked at it). Ignores files that are gone. Does not
  /// notice a change that keeps the file, its size and its time of change. Throws: Error(io).
  void require_unchanged() const;

 private:
  class Files;
  std::unique_ptr<const Files> files_;
};

/// How to execute a plan. The files that are written do not depend on these options.
struct ExecuteOptions {
  std::uint64_t memory_nbytes = kDefaultMemoryNbytes;  // all buffers of all threads together
  int num_threads = 0;                                 // 0: default_num_threads()
  std::stop_token stop{};            // a stop request ends the work with Error(interrupted)
  formats::ProgressSink progress{};  // gets the bytes of tensors that this or an earlier run wrote
  formats::ProgressSink resumed{};   // gets those of them that an interrupted earlier run wrote
  std::string source_path{};         // path of the source, for errors; finish_move sets it
  /// The states of the source's files when it was opened, as from SourceFiles. finish_move compares
  /// them with the states at the end. Empty: the states when finish_move begins.
  std::optional<FileStates> source_files{};
  /// Called at the end, once for each tensor of the destination that has elements too large for its
  /// dtype, in the order of the tensors. Elements in blocks that an interrupted run wrote also
  /// count. An element that several ranks store (a replica) counts once.
  std::function<void(const TensorOverflow&)> overflowed{};
  /// Called in the same way for each tensor with elements that a cast made zero.
  std::function<void(const TensorUnderflow&)> underflowed{};
  /// Whether to read the source also for blocks that an interrupted run wrote already. Set it for a
  /// source that calculates its elements, because that source counts rounding losses as it is read.
  bool reads_kept_blocks = false;
};

/// Moves the bytes that a plan names, block by block, so memory does not grow with the size of a
/// tensor. Checks the source's checksums as it reads. Skips blocks that the writer has from an
/// interrupted run, but reads them from the source to count losses of a cast, or if
/// `reads_kept_blocks` is set. Does not commit. If it throws, it has abandoned the writer.
/// Requires: `plan.problems` is empty; `writer` was made for `plan.destination`.
/// Throws:
/// - what source and writer throw;
/// - Error(invalid_argument) if the memory is too small for one block;
/// - Error(mismatch) if numbers are too large for a cast and the plan refuses them. The error names
///   the tensor, the number of elements and the largest magnitude;
/// - Error(interrupted) on a stop request.
void execute(const Plan& plan, const formats::TensorSource& source,
             formats::CheckpointWriter& writer, const ExecuteOptions& options);

/// Starts the checkpoint of a plan, with its values but without its tensors, and returns its
/// writer. If `create` has a journal, adds what identifies the move to it (ResumeIdentity).
/// `source_files`: as in ExecuteOptions; empty: takes the present states for the identity.
/// Requires: `plan.problems` is empty; `create.format` is the plan's; the plan outlives the writer.
/// Throws: what read_value and create_checkpoint throw; Error(io).
std::unique_ptr<formats::CheckpointWriter> start_move(
    const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
    const std::string& destination, formats::CreateOptions create,
    const std::optional<FileStates>& source_files = {});
/// Adds a note to `plan.notes` for each thing that the format's writer itself adds to a checkpoint.
/// If the plan has problems, adds nothing. Of `create`, reads only the format and the extra files.
/// Throws: the error that `start_move` would throw about the contents.
void add_notes_of_writer(Plan& plan, const formats::CheckpointReader& reader,
                         const std::string& destination, const formats::CreateOptions& create);
/// Checks whether a move could start, and changes nothing: whether `start_move` would accept the
/// contents, replace the destination and resume the staging directory; whether all files of the
/// source exist; and whether the writer would accept the elements (such as step counters, which
/// must agree). `num_shares`: set if several workers do the move; then it is no error if others
/// have begun the same work with that number of shares. `source_files`: as for start_move. Throws:
/// the error that the move would throw.
void check_move(const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
                const std::string& destination, formats::CreateOptions create,
                std::optional<int> num_shares = {},
                const std::optional<FileStates>& source_files = {});
/// Moves the tensors to the writer that `start_move` returned, and commits. Before the commit, may
/// read the rest of storages that it read in part (torch.save) to check their checksums, and checks
/// that no source file has changed since ExecuteOptions::source_files, so that the destination does
/// not mix old and new bytes. Throws: what execute and commit throw; Error(corruption, mismatch).
void finish_move(const Plan& plan, const formats::CheckpointReader& reader,
                 formats::CheckpointWriter& writer, const ExecuteOptions& options);

/// Calls start_move and finish_move: the checkpoint appears only when it is complete.
void move_checkpoint(const Plan& plan, const formats::CheckpointReader& reader, FileSystem& fs,
                     const std::string& destination, const formats::CreateOptions& create,
                     const ExecuteOptions& options);

/// Finishes a move as `finish_move` does. A writer with a journal keeps its finished blocks
/// - after an error that may not occur in the next run: Error(io), an interruption, no memory, or
///   Error(already_exists) for a file in the way;
/// - after any error, if the writer resumed work (not if the source proves damaged at the end).
/// The error then says `kept: DST.partial, 43% done`, with the remedy to resume. If the writer
/// keeps nothing, the error names a file in DST.partial that Tessera did not write (if any): it
/// stays there. Returns how many bytes of tensors an earlier run wrote. Requires: `start_move`
/// returned the writer for `destination` on `fs`. Throws: as finish_move.
std::uint64_t finish_or_keep(const Plan& plan, const formats::CheckpointReader& reader,
                             formats::CheckpointWriter& writer, FileSystem& fs,
                             const std::string& destination, ExecuteOptions options);

// Several processes (workers) can do one move together. They send each other no messages. Each
// worker calls `move_share` with the same source and options, and with a share of its own. On disk:
// docs/formats/journal.md.

/// Options of one worker that writes a share of a move.
struct SharedMoveOptions {
  /// Whether the worker also writes, after its own share, the shares that no living worker writes.
  enum class OtherShares { leave, take_over };

  int share = 0;                                  // of this worker, from 0
  int num_shares = 1;                             // the number of workers
  OtherShares other_shares = OtherShares::leave;  // shares without a living worker
  std::string command{};  // stored for a program that finishes the move; empty: none
  /// Called before a share is written, with the share's number and its size in bytes.
  std::function<void(int share, std::uint64_t nbytes)> begins{};
  /// Called with a warning if the destination is on NFS, before a share is written that begins or
  /// ends in the middle of a file. NFS clients write whole pages, so bytes may be lost where
  /// another machine writes the neighbouring share.
  std::function<void(const std::string& warning)> warns{};
};

/// What a worker has written, and which shares are still missing.
struct SharedMoveOutcome {
  /// A share that this worker has written, or its own share that was complete before.
  struct Share {
    int index = 0;                     // from 0
    std::uint64_t nbytes = 0;          // of tensors
    std::uint64_t resumed_nbytes = 0;  // the part of `nbytes` that an interrupted worker wrote
    bool was_complete = false;         // if true, this call wrote nothing of it; both sizes are 0
  };
  /// A share that is not complete.
  struct Missing {
    int index = 0;      // from 0
    std::string state;  // such as `was never begun`
  };

  std::vector<Share> shares{};     // its own share, then the shares that it took over
  std::vector<Missing> missing{};  // sorted by index
  bool is_finished = false;        // the destination has appeared
};

/// Writes one share of a move, and records durably what it has finished. If all shares are then
/// complete, makes the destination appear, with the same bytes as a move by one process. Several
/// workers may call this at the same time, each for its own share.
/// Requires: `create` has a journal; `plan.problems` is empty.
/// Throws:
/// - what start_move and finish_move throw. An error while the share is written says that its
///   finished blocks are kept (not if the source proves damaged after they were written);
/// - Error(unsupported) if the format cannot be written by several processes, or if the file system
///   has no locks;
/// - Error(already_exists) if another process writes the share;
/// - Error(mismatch) naming the difference if another worker has another source, plan, options or
///   number of shares.
SharedMoveOutcome move_share(const Plan& plan, const formats::CheckpointReader& reader,
                             FileSystem& fs, const std::string& destination,
                             formats::CreateOptions create, const SharedMoveOptions& worker,
                             const ExecuteOptions& options);

/// Makes the destination appear if all shares are complete; otherwise returns the missing ones.
/// Writes no share. While another process is finishing the move, waits for it; a stop request ends
/// the wait. `source_files`: as for start_move. Requires and throws: as move_share.
SharedMoveOutcome finish_shares(const Plan& plan, const formats::CheckpointReader& reader,
                                FileSystem& fs, const std::string& destination,
                                formats::CreateOptions create, const std::stop_token& stop = {},
                                const std::optional<FileStates>& source_files = {});

}  // namespace tessera::reshard
