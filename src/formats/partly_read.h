#pragma once

#include <stop_token>

#include "tessera/base/error.h"
#include "tessera/formats/checkpoint.h"

// A checksum can cover more bytes than a read needs. In torch.save files, one CRC-32 covers a whole
// storage: a move that reads only a part of the storage, such as the rows of one rank without the
// padding at the end, cannot compare it. `check_rest` reads the rest later.
namespace tessera::formats {

/// How much a check of the rest may read, and when it stops.
struct RestOptions {
  /// Checks a storage only if its rest is at most this many times as large as what was read.
  double most_rest = 4;
  std::stop_token stop{};
};

/// Interface of a source that can check what was read only in part. Call `check_rest`.
class PartlyRead {
 public:
  virtual ~PartlyRead() = default;
  /// Does what the function `check_rest` does.
  virtual void check_rest(const RestOptions& options) const = 0;
};

/// Damage that is found after the bytes were used: what was written from them is damaged, too.
/// Kind: corruption.
class DamagedStorage : public Error {
 public:
  explicit DamagedStorage(const Error& error) : Error(error) {}
};

/// Reads the rest of each storage that was read only in part, and compares its checksum. Does
/// nothing if `source` has no such checksums. Call it after the last read.
/// Throws: DamagedStorage naming the file and the storage; Error(interrupted); Error(io).
void check_rest(const TensorSource& source, const RestOptions& options);

}  // namespace tessera::formats
