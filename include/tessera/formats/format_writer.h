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

/// The functions by which several processes write one checkpoint of a format; parts.h calls them.
/// See [Note: Rank parts].
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

/// What one of several processes does for a checkpoint that they write together. See
/// [Note: Shared work].
struct ShareOptions {
  /// What the process does.
  enum class Step {
    write,   // writes one share
    finish,  // makes the checkpoint appear, once all shares are complete
  };

  Step step = Step::write;  // what to do
  int index = 0;            // of the share, from 0; for `write`
  int num_shares = 1;       // number of shares of the work
  std::string command{};    // stored for the process that finishes the work; not compared
  /// Whether this process may begin the work of all shares, if no other process has done so.
  enum class Beginning { allowed, refused } beginning = Beginning::allowed;
};

/// Writes one share of a checkpoint, or finishes a checkpoint whose shares are complete. In
/// `write`, call `write_block` for the blocks of the share, and then `commit_share`. In `finish`,
/// call `adopt_block` for all blocks, and then `commit`.
class ShareWriter : public CheckpointWriter {
 public:
  /// What one share can consist of.
  enum class Unit {
    block,  // any blocks
    file,   // all blocks of a file
  };

  /// Returns the unit in which the work of this writer is divided into shares.
  virtual Unit unit() const = 0;
  /// Returns the number of the file with the bytes of `piece`. In `write_order`, the pieces of one
  /// file follow each other.
  virtual std::size_t file_of(PieceId piece) const = 0;
  /// Takes a block that another process has written and synced, without reading it. Throws:
  /// Error(corruption) if no share records the block.
  virtual void adopt_block(PieceId piece, std::int64_t begin) = 0;
  /// Syncs the blocks that were written, and records durably that the share is complete.
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
  /// Throws what `start` would throw about the destination and the files beside it. Changes
  /// nothing.
  virtual void check_staging(FileSystem& fs, const std::string& destination,
                             const CheckpointContents& contents, const std::vector<Value>& values,
                             const CreateOptions& options) const = 0;
  /// The one element of a tensor, and its dtype in the source.
  struct Element {
    DType dtype;
    std::string bytes;
  };
  /// Reads tensor number `tensor` of the contents. Requires: it has one element.
  using ReadElement = std::function<Element(std::size_t tensor)>;
  /// Throws what a writer would throw about the elements of tensors, such as step counters that
  /// contradict each other. Changes nothing.
  virtual void check_elements(const std::string& /*destination*/,
                              const CheckpointContents& /*contents*/,
                              const std::vector<Value>& /*values*/,
                              const CreateOptions& /*options*/, const ReadElement& /*read*/) const {
  }
  /// Returns notes about what the writer adds, and about what programs of the format will read
  /// otherwise than the source has it. `values` returns the values, parallel to `contents.values`;
  /// `read` reads the element of a tensor that has only one.
  virtual std::vector<Finding> notes(const std::string& /*destination*/,
                                     const CheckpointContents& /*contents*/,
                                     const CreateOptions& /*options*/,
                                     const std::function<std::vector<Value>()>& /*values*/,
                                     const ReadElement& /*read*/) const {
    return {};
  }
  /// Returns the options that change the bytes of the files, in words; empty if none is set. A run
  /// cannot resume the work of a run whose text differs (JournalOptions). The text is stored in
  /// journals.
  virtual std::string describe_options(const CreateOptions& /*options*/) const { return {}; }

  /// Whether a writer without a journal writes each byte of a file at most once, and reads no byte
  /// back before the file is synced. The bytes can then be sent to a server as they come.
  virtual bool writes_bytes_once() const { return true; }

  /// Returns how several processes write one checkpoint together; null if the format does not allow
  /// several writers.
  virtual const PartsWriter* parts() const { return nullptr; }

  /// Opens a base as `BaseCheckpoint::open` does; returns null if the format has no base.
  virtual std::shared_ptr<const BaseCheckpoint> open_base(const FileSystem& /*fs*/,
                                                          const std::string& /*path*/) const {
    return nullptr;
  }

  /// Starts a checkpoint as `start` does, for one of several processes that start at any time and
  /// send each other no messages. Returns null if the format does not allow this. Requires:
  /// `options.journal`. Throws: what `start` throws; what StagedWork throws about shares.
  virtual std::unique_ptr<ShareWriter> start_share(FileSystem& /*fs*/,
                                                   const std::string& /*destination*/,
                                                   SharedContents /*contents*/,
                                                   std::vector<Value> /*values*/,
                                                   const CreateOptions& /*options*/,
                                                   const ShareOptions& /*share*/) const {
    return nullptr;
  }
};

/// Adds the writer of a format whose driver says that it can be written. Same rules as
/// `register_format`.
void register_format_writer(const FormatWriter& writer);

/// Returns the writer of a format. Throws: Error(unsupported) naming the formats that can be
/// written.
const FormatWriter& writer_of(Format format);

}  // namespace tessera::formats
