#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"

namespace tessera::formats {

/// Identifies a block of a writer: its piece, and the position of the block's first element in that
/// piece.
struct BlockId {
  std::size_t tensor_index = 0;
  std::size_t piece_index = 0;
  std::int64_t begin = 0;

  BlockId(CheckpointWriter::PieceId piece, std::int64_t first)
      : tensor_index(piece.tensor_index), piece_index(piece.piece_index), begin(first) {}
  friend auto operator<=>(const BlockId&, const BlockId&) = default;
};

/// How a block is stored in its file. Stored on disk; never renumber.
enum class BlockForm : std::uint8_t {
  plain = 0,           // the bytes as the caller passed them
  filtered_chunk = 1,  // shuffled and compressed (native)
  raw_chunk = 2,       // padded to a whole chunk (native)
};

/// The place of a finished block and the checksum of the bytes there. The writer chooses the kind
/// of checksum.
struct FinishedBlock {
  ByteRange range;  // in the block's file
  BlockForm form = BlockForm::plain;
  std::uint64_t checksum = 0;
};

/// The contents of a journal.
struct JournalContents {
  struct Entry {
    BlockId id;
    FinishedBlock block;
  };
  ResumeIdentity identity;
  std::vector<Entry> entries;    // sorted by id; only the last entry of each id
  std::uint64_t end_nbytes = 0;  // the end of the last whole line
};

/// Reads the journal at `path`, up to the first line that is torn or damaged. Returns nothing if
/// the journal records no finished block or does not exist. Memory: at most twice that of the
/// result, however large the file is.
/// Throws: Error(already_exists) if the file is not a journal; Error(unsupported) for a journal of
/// a later version.
std::optional<JournalContents> read_journal(const FileSystem& fs, const std::string& path);

/// The lines of a journal that come before the lines of finished blocks.
struct JournalHead {
  ResumeIdentity identity;
  std::uint64_t identity_end_nbytes = 0;  // where the identity's line ends
  bool is_exchange = false;               // whether `exchange_line()` follows
};

/// Reads the head of the journal at `path`. Returns an empty head if there is no journal of this
/// version.
JournalHead read_journal_head(const FileSystem& fs, const std::string& path);

/// Returns the line that replaces all lines of blocks, just before the new checkpoint and the old
/// one swap paths. From then on, the staging path may hold the old checkpoint.
std::string exchange_line();

/// Records finished blocks, and finds the blocks that an interrupted run recorded.
///
/// The line of a block is written after the block; lines of small blocks are written together. Only
/// `sync` syncs the journal, so after a crash it may list blocks that are not on the disk. This
/// does no harm: a run that resumes checks each block against its checksum. Thread-safe.
class Journal {
 public:
  /// Creates a journal at `path`, or empties the one that is there; its file stays the same,
  /// because the writer holds a lock on it.
  Journal(FileSystem& fs, std::string path, const ResumeIdentity& identity);
  /// Continues the journal at `path`, from which `contents` were read. Cuts off what follows them.
  Journal(FileSystem& fs, std::string path, JournalContents contents);
  /// Writes the remaining lines and ignores failures.
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  bool is_resumed() const { return is_resumed_; }
  /// Whether other processes write into the same files ([Note: Shared work] in shared_work.h).
  bool is_shared() const { return is_shared_; }
  void set_shared() { is_shared_ = true; }
  /// Whether any block is finished, by this run or an interrupted one.
  bool has_finished_blocks() const;

  /// Records a finished block. Throws: Error(io).
  void note(const BlockId& id, const FinishedBlock& block);
  /// Writes all recorded lines to the file.
  void flush();
  /// Writes all recorded lines to the file, and syncs it.
  void sync();

  /// Returns the interrupted run's record of the block; nothing if it has none.
  std::optional<FinishedBlock> find(const BlockId& id) const;
  /// Fills `out` with a range of a file that an interrupted run has written. Returns whether the
  /// range could be read. Does not check the bytes; the caller does.
  bool read_back(const std::string& path, ByteRange range, std::span<std::byte> out) const;

 private:
  void flush_locked();

  FileSystem& fs_;
  const std::string path_;
  const bool is_resumed_;
  bool is_shared_ = false;
  std::vector<JournalContents::Entry> entries_;  // of the interrupted run

  mutable std::mutex mutex_;  // guards all below
  std::unique_ptr<WritableFile> file_;
  std::uint64_t end_nbytes_ = 0;
  std::string lines_;                      // not written yet
  std::uint64_t unnoted_data_nbytes_ = 0;  // of the blocks in `lines_`
  bool has_finished_blocks_ = false;
  mutable std::string open_path_;
  mutable std::shared_ptr<const ReadableFile> open_file_;  // kept open: blocks come file by file
};

/// If an interrupted run recorded the block as plain bytes at `range` of the file at `path`, reads
/// these bytes into `room`, and returns their recorded checksum, which the caller compares.
/// Otherwise returns nothing. `journal` may be null.
std::optional<std::uint64_t> read_plain_block(const Journal* journal, const BlockId& id,
                                              const std::string& path, ByteRange range,
                                              std::span<std::byte> room);

/// Returns the record of a block that another worker has written, for the process that finishes
/// shared work. Throws: Error(corruption) naming `path`, the block's file, if the journal has no
/// plain block at `range`, or is null.
FinishedBlock recorded_plain_block(const Journal* journal, const BlockId& id,
                                   const std::string& path, ByteRange range);

/// Creates a file whose bytes its writer may write in any order. If the file exists in a resumed
/// run or in shared work, opens it and keeps its bytes. In other runs, throws Error(already_exists)
/// if the file exists. `journal` may be null.
std::unique_ptr<WritableFile> begin_file(FileSystem& fs, const Journal* journal,
                                         const std::string& path);
/// Creates an empty file. In a resumed run, first removes the file that the interrupted run left.
/// `journal` may be null.
std::unique_ptr<WritableFile> create_anew(FileSystem& fs, const Journal* journal,
                                          const std::string& path);

}  // namespace tessera::formats
