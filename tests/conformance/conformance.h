#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "support/memory_checkpoint.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::test {

/// A format as the conformance suite sees it: how it is opened and written, and what it can hold.
/// What a format cannot hold is asked of it nowhere; all else is asked of every format alike.
struct FormatUnderTest {
  using Open = std::function<std::unique_ptr<formats::CheckpointReader>(const FileSystem& fs,
                                                                        const std::string& path)>;
  using Create = std::function<std::unique_ptr<formats::CheckpointWriter>(
      FileSystem& fs, const std::string& path, formats::CheckpointContents contents,
      std::vector<Value> values, OverwritePolicy overwrite)>;

  enum class Pieces { whole, rows, boxes, any };
  enum class Extras { lost, kept };
  enum class Nesting { kept, opened };

  std::string name;
  formats::Format format = formats::Format::native;
  std::string destination;  // name of the file or directory
  Open open;
  Create create{};                    // none: the format is read only
  std::string fixture{};              // what to read where nothing can be written
  Pieces pieces = Pieces::any;        // what a tensor may be cut into
  Extras aliases = Extras::kept;      // second names
  Extras state_kinds = Extras::kept;  // kinds of optimizer state, units and annotations
  Nesting values = Nesting::kept;     // whether a dict within a value is told from a dict around it
  std::vector<DType> lacks{};

  bool holds(DType dtype) const;
  friend std::ostream& operator<<(std::ostream& out, const FormatUnderTest& format) {
    return out << format.name;
  }
};

std::vector<FormatUnderTest> formats_that_write();
std::vector<FormatUnderTest> formats_that_read();

/// Returns `source` with its pieces, aliases and kinds cut down to what the format can hold. No
/// element is lost: where a format has no shards, each tensor is one piece.
MemoryCheckpoint fit_to_format(const MemoryCheckpoint& source, const FormatUnderTest& format);

/// Returns `source` as the format's reader shows it once it is written: cut down to what the format
/// can hold, and with values opened where the format cannot tell them from what is around them.
MemoryCheckpoint as_it_comes_back(const MemoryCheckpoint& source, const FormatUnderTest& format);

/// Writes `source`, cut down to what the format can hold, on `num_threads` threads.
void write_checkpoint(const FormatUnderTest& format, FileSystem& fs, const std::string& path,
                      const MemoryCheckpoint& source, int num_threads = 1,
                      OverwritePolicy overwrite = OverwritePolicy::refuse);

/// Expects everything of `expected` in `found`: metas, regions that cover, bytes, kinds, key paths,
/// values, aliases, and nothing else.
void expect_equal_checkpoints(const formats::CheckpointReader& found,
                              const formats::CheckpointReader& expected);

/// A checkpoint of a few hundred bytes with one of everything: dtypes, shards, a rank without rows,
/// replicas, 0-d and empty tensors, optimizer state, nested key paths, values, an alias.
MemoryCheckpoint one_of_everything();

/// One value of every kind, and the odd ones of each.
std::vector<Value> values_of_every_kind();

/// Returns bytes that look like a tensor's, the same ones for the same arguments.
Bytes patterned_bytes(std::uint64_t nbytes, std::uint64_t seed);

}  // namespace tessera::test
