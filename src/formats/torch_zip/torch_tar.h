#pragma once

#include <span>
#include <string>
#include <vector>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::torch_zip {

/// A file that torch.save of PyTorch 0.1 wrote: a tar archive of four files.
///
///     sys_info   pickle: a dict with the protocol, 1000, and the byte order of the machine
///     pickle     pickle: the object; a tensor is a persistent id, the number of the tensor as text
///     tensors    pickle: their number; then for each tensor
///       pickle         (number of the tensor, number of its storage, its class)
///       4 | 4          the number of dimensions; ignored
///       8 * dims       sizes, then as many strides, in elements
///       8              where the tensor starts in the storage, in elements
///     storages   pickle: their number; then for each storage
///       pickle         (number of the storage, device, class such as torch.FloatStorage)
///       8 | data       the number of elements, and the bytes
///     then a pickle: a list of storages that are views of others, (number, number of the other
///     storage, offset, size), in elements
///
/// Numbers and elements are little-endian. Opening reads everything but the bytes of the storages.
class TorchTar final : public SavedObject {
 public:
  /// Throws: Error(corruption); Error(unsupported), such as for a tar archive of something else;
  /// Error(io). `as_dict`: as for TorchArchive. `file` must outlive it.
  explicit TorchTar(const ReadableFile& file, std::span<const std::string> as_dict = {});

  /// Returns the names of members that PyTorch 0.1 did not write. Nothing is read from them.
  const std::vector<std::string>& other_members() const { return other_members_; }

 private:
  std::vector<std::string> other_members_;
};

}  // namespace tessera::formats::torch_zip
