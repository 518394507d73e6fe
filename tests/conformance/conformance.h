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

/// A format under test: how it is opened and written, and what it can hold. Every format gets the
/// same tests. They never expect from a format what it cannot hold.
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
  Create create{};                    // none: the format can only be read
  std::string fixture{};              // a checkpoint to read, if the format can only be read
  Pieces pieces = Pieces::any;        // what a tensor may be cut into
  Extras aliases = Extras::kept;      // second names of tensors
  Extras state_kinds = Extras::kept;  // kinds of optimizer state, units and annotations
  Nesting values = Nesting::kept;     // opened: a dict in a value comes back as several values
  std::vector<DType> lacks{};

  bool holds(DType dtype) const;
  friend std::ostream& operator<<(std::ostream& out, const FormatUnderTest& format) {
    return out << format.name;
  }
};

std::vector<FormatUnderTest> formats_that_write();
std::vector<FormatUnderTest> formats_that_read();

/// Returns `source` without the dtypes, pieces, aliases and kinds that the format cannot hold. The
/// tensors that stay keep all elements: in a format without shards, each tensor is one piece.
MemoryCheckpoint fit_to_format(const MemoryCheckpoint& source, const FormatUnderTest& format);

/// Returns `source` as a reader shows it after it was written in this format: as fit_to_format, and
/// with the entries of nested dicts as values of their own if the format opens values.
MemoryCheckpoint as_it_comes_back(const MemoryCheckpoint& source, const FormatUnderTest& format);

/// Writes fit_to_format(source) on `num_threads` threads.
void write_checkpoint(const FormatUnderTest& format, FileSystem& fs, const std::string& path,
                      const MemoryCheckpoint& source, int num_threads = 1,
                      OverwritePolicy overwrite = OverwritePolicy::refuse);

/// Expects that both have equal contents: metas, bytes, kinds, key paths, values and aliases, and
/// that the regions in `found` cover each tensor.
void expect_equal_checkpoints(const formats::CheckpointReader& found,
                              const formats::CheckpointReader& expected);

/// A checkpoint of a few hundred bytes with one of everything: dtypes, shards, a rank without rows,
/// replicas, 0-d and empty tensors, optimizer state, nested key paths, values, an alias.
MemoryCheckpoint one_of_everything();

/// Values of every kind, including unusual ones.
std::vector<Value> values_of_every_kind();

/// Returns bytes that look like a tensor's. Equal arguments give equal bytes.
Bytes patterned_bytes(std::uint64_t nbytes, std::uint64_t seed);

}  // namespace tessera::test
