#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "formats/part_of_check.h"
#include "formats/partly_read.h"
#include "formats/torch_zip/sharded_tensor.h"
#include "formats/torch_zip/storage_checks.h"
#include "tessera/base/file_system.h"
#include "tessera/formats/checkpoint.h"

namespace tessera::formats::torch_zip {

/// A reader of one torch.save file. Has additional functions for readers of checkpoints that
/// consist of several such files.
class TorchFileReader : public DividedReader, public PartlyRead {
 public:
  /// Returns the place of a rank's part in its DTensor or ShardedTensor; null for an ordinary
  /// tensor.
  virtual const SharedPlace& place_of(std::size_t tensor_index) const = 0;
  /// Returns the stored CRC-32 of a tensor's bytes. Returns nothing unless the tensor is contiguous
  /// and fills its storage, because the archive has one CRC for each storage.
  virtual std::optional<std::uint32_t> crc32_of(std::size_t tensor_index) const = 0;
  /// Returns the error that `read_value` throws; null if the value can be read.
  virtual const Error* refusal_of(std::size_t value_index) const = 0;
  /// Returns a number that increases in the order of the pickle. (Contents are sorted by name.)
  virtual std::size_t order_of(std::size_t value_index) const = 0;
  /// Returns the name of the folder in the archive. torch.save takes it from the name of the file
  /// that it writes, without the suffix. Empty for files without folders (streams, tar archives).
  virtual std::string saved_name() const = 0;
  /// Whether the file holds one tensor or value instead of a dict. The name of this entry is then
  /// `tensor` or `value`.
  virtual bool has_sole_object() const = 0;
  /// Returns the classes and functions that the pickle names and Tessera does not know: sorted, at
  /// most 1000.
  virtual std::vector<std::string> foreign_names() const = 0;
  /// Returns the checks of the bytes read so far; null if the file has no storages of torch.save.
  virtual std::shared_ptr<StorageChecks> checks() const = 0;
  /// Adds what this reader reads to the checks of an earlier reader of the same file. Requires:
  /// nothing was read yet.
  virtual void continue_checks(std::shared_ptr<StorageChecks> checks) = 0;
  /// Empties the key paths in `contents()`, to save memory for callers that do not need them.
  virtual void drop_key_paths() = 0;
};

/// Whether `contents()` of a reader lists the one piece of each tensor (the whole tensor). Readers
/// of checkpoints of many files leave the pieces out to save memory.
enum class Pieces { listed, left_out };

/// Does what `open_torch_zip` does, for a file that is open. Ignores the names of files beside it.
std::unique_ptr<TorchFileReader> read_torch_zip(std::unique_ptr<ReadableFile> file,
                                                const std::vector<std::string>& as_dict = {},
                                                Pieces pieces = Pieces::listed);

}  // namespace tessera::formats::torch_zip
