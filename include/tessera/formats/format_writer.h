#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"
#include "tessera/base/value.h"
#include "tessera/formats/base_checkpoint.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/formats/create.h"
#include "tessera/formats/format.h"
#include "tessera/formats/parts.h"
#include "tessera/formats/shared_contents.h"

namespace tessera::formats {

/// How several processes, each one rank of a job, write one checkpoint of a format together. The
/// functions of parts.h call these. See [Note: Rank parts] there.
class PartsWriter {
 public:
  virtual ~PartsWriter() = default;

  /// As `create_part` of parts.h.
  virtual std::unique_ptr<CheckpointWriter> create_part(FileSystem& fs, std::string directory,
                                                        CheckpointContents contents,
                                                        std::vector<Value> values, int rank,
                                                        const PartOptions& options) const = 0;
  /// As `join_parts` of parts.h.
  virtual std::uint64_t join_parts(const FileSystem& fs, const std::string& directory,
                                   const CheckpointContents& contents,
                                   const std::vector<Value>& values,
                                   const PartOptions& options) const = 0;
  /// As `seal_part` of parts.h.
  virtual void seal_part(FileSystem& fs, const std::string& directory, int rank,
                         std::uint64_t token) const = 0;
  /// As `finish_parts` of parts.h.
  virtual void finish_parts(FileSystem& fs, const std::string& directory,
                            const CheckpointContents& contents,
                            const std::vector<Value>& values) const = 0;
};

/// What one of several processes does for a checkpoint that they write together, without messages.
/// Each process writes a share of the blocks. See [Note: Shared work].
struct ShareOptions {
  /// What the process does.
  enum class Step {
    write,   // writes one share
    finish,  // makes the checkpoint appear, once all shares are complete
  };

  Step step = Step::write;  // what to do
  int index = 0;            // of this process's share, from 0; only for `write`
  int num_shares = 1;       // into how many shares the work is divided; equal in all processes
  std::string command{};    // any text, kept for the process that finishes
  /// Whether this process may begin the work, if none has begun it. If not: Error(already_exists).
  enum class Beginning { allowed, refused } beginning = Beginning::allowed;
};

/// Writes one share of a checkpoint (Step::write: the caller calls `write_block` for each block of
/// the share, then `commit_share`), or finishes a checkpoint whose shares are all complete
/// (Step::finish: the caller calls `adopt_block` for each block of all shares, then `commit`).
class ShareWriter : public CheckpointWriter {
 public:
  /// What the caller may put into one share.
  enum class Unit {
    block,  // any blocks
    file,   // whole files: all blocks of a file are in one share
  };

  /// Returns what a share of this writer consists of: any blocks, or only whole files.
  virtual Unit unit() const = 0;
  /// Returns the number of the file that holds the bytes of `piece`. In `write_order`, the pieces
  /// of one file follow each other.
  virtual std::size_t file_of(PieceId piece) const = 0;
  /// Counts a block as written that another process has written and synced, without reading it.
  /// Throws: Error(corruption) if no share records the block (for Unit::file, `commit` throws it).
  virtual void adopt_block(PieceId piece, std::int64_t begin) = 0;
  /// Syncs the blocks that this process wrote, and records durably that its share is complete.
  virtual void commit_share() = 0;
};

/// Starts checkpoints of one format. Implementations are stateless and thread-safe.
class FormatWriter {
 public:
  virtual ~FormatWriter() = default;

  /// Returns the format that this object writes.
  virtual Format format() const = 0;

  /// Starts a checkpoint: see `create_checkpoint`.
  virtual std::unique_ptr<CheckpointWriter> start(FileSystem& fs, const std::string& destination,
                                                  SharedContents contents,
                                                  std::vector<Value> values,
                                                  const CreateOptions& options) const = 0;
  /// Throws what `start` would throw about the destination, its staging path and the files beside
  /// them. Changes nothing.
  virtual void check_staging(FileSystem& fs, const std::string& destination,
                             const CheckpointContents& contents, const std::vector<Value>& values,
                             const CreateOptions& options) const = 0;
  /// The only element of a tensor: its bytes, and its dtype in the source.
  struct Element {
    DType dtype;
    std::string bytes;
  };
  /// Reads tensor number `tensor` of the contents. Requires: this tensor has one element.
  using ReadElement = std::function<Element(std::size_t tensor)>;
  /// Throws what a writer would throw later about elements of tensors, such as step counters that
  /// contradict each other. `read` reads an element. Changes nothing.
  virtual void check_elements(const std::string& /*destination*/,
                              const CheckpointContents& /*contents*/,
                              const std::vector<Value>& /*values*/,
                              const CreateOptions& /*options*/, const ReadElement& /*read*/) const {
  }
  /// Returns notes about what the writer adds, and about what programs of the format will read in
  /// another way than the source has it. `values` returns the values, parallel to
  /// `contents.values`; `read` reads an element.
  virtual std::vector<Finding> notes(const std::string& /*destination*/,
                                     const CheckpointContents& /*contents*/,
                                     const CreateOptions& /*options*/,
                                     const std::function<std::vector<Value>()>& /*values*/,
                                     const ReadElement& /*read*/) const {
    return {};
  }
  /// Returns, in words, the set options that change the bytes of the files; empty if none is set.
  /// The text is stored in the journal: a run can resume only the work of a run with the same text
  /// (JournalOptions).
  virtual std::string describe_options(const CreateOptions& /*options*/) const { return {}; }

  /// Returns whether a writer without a journal writes each byte of a file at most once, and reads
  /// no byte back before the file is synced. If so, the bytes can be sent to a server as they come.
  virtual bool writes_bytes_once() const { return true; }

  /// Returns how the ranks of a job write one checkpoint of this format together (parts.h); null if
  /// they cannot.
  virtual const PartsWriter* parts() const { return nullptr; }

  /// Opens a base as `BaseCheckpoint::open` does; returns null if the format allows no base.
  virtual std::shared_ptr<const BaseCheckpoint> open_base(const FileSystem& /*fs*/,
                                                          const std::string& /*path*/) const {
    return nullptr;
  }

  /// As `start`, for one of several processes, which start at any time and send each other no
  /// messages. Returns null if the format does not allow this. Requires: `options.journal`. Throws:
  /// as `start`; Error(already_exists) for a share in use; Error(unsupported) without file locks.
  virtual std::unique_ptr<ShareWriter> start_share(FileSystem& /*fs*/,
                                                   const std::string& /*destination*/,
                                                   SharedContents /*contents*/,
                                                   std::vector<Value> /*values*/,
                                                   const CreateOptions& /*options*/,
                                                   const ShareOptions& /*share*/) const {
    return nullptr;
  }
};

/// Adds the writer of a format whose driver says that the format can be written. Same rules as for
/// `register_format`.
void register_format_writer(const FormatWriter& writer);

/// Returns the writer of a format. Throws: Error(unsupported), which names the formats that can be
/// written, if this format has none.
const FormatWriter& writer_of(Format format);

}  // namespace tessera::formats
