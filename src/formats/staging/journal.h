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

#include "tessera/base/byte_range.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"

namespace tessera::formats {

/// Names a block of a writer by its piece and its first element there.
struct BlockId {
  std::size_t tensor_index = 0;
  std::size_t piece_index = 0;
  std::int64_t begin = 0;

  BlockId(CheckpointWriter::PieceId piece, std::int64_t first)
      : tensor_index(piece.tensor_index), piece_index(piece.piece_index), begin(first) {}
  friend auto operator<=>(const BlockId&, const BlockId&) = default;
};

/// How a block lies in its file. Stored on disk; never renumber.
enum class BlockForm : std::uint8_t {
  plain = 0,           // as it was handed in
  filtered_chunk = 1,  // shuffled and compressed (native)
  raw_chunk = 2,       // filled up to a chunk (native)
};

/// Where a finished block lies, and the checksum of what lies there. The writer says which one.
struct FinishedBlock {
  ByteRange range;  // of the block's file
  BlockForm form = BlockForm::plain;
  std::uint64_t checksum = 0;
};

/// What a journal says.
struct JournalContents {
  struct Entry {
    BlockId id;
    FinishedBlock block;
  };
  WorkIdentity identity;
  std::vector<Entry> entries;    // sorted by id, each once: the last that was written
  std::uint64_t end_nbytes = 0;  // of the last whole line
};

/// Reads the journal at `path`, up to the first line that is torn or damaged. Returns nothing where
/// it says of no finished block, or is not there. Memory: what it returns, twice, whatever the size
/// of the file.
/// Throws: Error(already_exists) where another file has the name; Error(unsupported) on a journal
/// of a later version.
std::optional<JournalContents> read_journal(const FileSystem& fs, const std::string& path);

/// Writes down finished blocks, and knows those of the run before.
///
/// A line goes to the file when its block has been written, and together with others where blocks
/// are small. Nothing is synced: what a journal says is held against the files before it is
/// believed, so that lines which outlive their blocks do no harm. Thread-safe.
class Journal {
 public:
  /// Starts a journal at `path`, where there is none.
  Journal(FileSystem& fs, std::string path, const WorkIdentity& identity);
  /// Goes on with the journal that `contents` were read from.
  Journal(FileSystem& fs, std::string path, JournalContents contents);
  /// Writes what is left, as far as it goes.
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  bool is_resumed() const { return goes_on_; }
  /// Whether any block is finished, by this run or one before.
  bool has_finished_blocks() const;

  /// Notes that the block lies there. Throws: Error(io).
  void note(const BlockId& id, const FinishedBlock& block);
  /// Hands all that has been noted to the system.
  void flush();

  /// Returns what a run before has written down about the block.
  std::optional<FinishedBlock> find(const BlockId& id) const;
  /// Fills `out` from the range of a file that a run before has written. Says whether that is
  /// possible; what it was filled with is the caller's to check.
  bool read_back(const std::string& path, ByteRange range, std::span<std::byte> out) const;

 private:
  void flush_locked();

  FileSystem& fs_;
  const std::string path_;
  const bool goes_on_;
  std::vector<JournalContents::Entry> entries_;  // of runs before

  mutable std::mutex mutex_;  // guards all below
  std::unique_ptr<WritableFile> file_;
  std::uint64_t end_nbytes_ = 0;
  std::string lines_;                      // not written yet
  std::uint64_t unnoted_data_nbytes_ = 0;  // of the blocks in `lines_`
  bool has_finished_blocks_ = false;
  mutable std::string open_path_;
  mutable std::shared_ptr<const ReadableFile> open_file_;  // blocks come file by file
};

/// Fills `room` with the block, if a run before has noted it as it was handed in, at `range` of the
/// file at `path`. Returns the checksum that the bytes must have. `journal` may be null.
std::optional<std::uint64_t> read_plain_block(const Journal* journal, const BlockId& id,
                                              const std::string& path, ByteRange range,
                                              std::span<std::byte> room);

/// Creates a file of a writer, to be written at offsets. One that a run before has begun keeps its
/// bytes. `journal` may be null.
std::unique_ptr<WritableFile> begin_file(FileSystem& fs, const Journal* journal,
                                         const std::string& path);
/// Creates a file of a writer. What a run before has left of it is removed.
std::unique_ptr<WritableFile> create_anew(FileSystem& fs, const Journal* journal,
                                          const std::string& path);

}  // namespace tessera::formats
