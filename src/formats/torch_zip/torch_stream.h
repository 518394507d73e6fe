#pragma once

#include <span>
#include <string>
#include <string_view>

#include "formats/torch_zip/torch_archive.h"
#include "tessera/base/file_system.h"

namespace tessera::formats::torch_zip {

/// Says whether a file that begins with these bytes is a TorchStream.
bool begins_as_stream(std::string_view first_bytes);

/// A file that torch.save wrote before PyTorch 1.6, or later with
/// `_use_new_zipfile_serialization=False`. Five pickles follow each other, then the storages.
///
///     pickle    the number 0x1950a86a20f9469cfc6c
///     pickle    the protocol, 1001
///     pickle    a dict: byte order and sizes of the machine
///     pickle    the object; a tensor is a call with the persistent id of its storage
///     pickle    the keys of the storages, a list
///     8 | data  for each key: the number of elements, and the bytes
///
/// Numbers and elements are little-endian, also from a big-endian machine. There are no checksums.
/// Opening reads the pickles and the sizes of the storages, and no tensor bytes.
class TorchStream final : public SavedObject {
 public:
  /// Throws: Error(corruption); Error(unsupported), such as for another protocol; Error(io).
  /// `as_dict`: as for TorchArchive. `file` must outlive it.
  explicit TorchStream(const ReadableFile& file, std::span<const std::string> as_dict = {});
};

/// Returns where the TorchStream at the beginning of a file ends, behind its last storage. Further
/// bytes may follow. Throws: as TorchStream.
std::uint64_t end_of_stream(const ReadableFile& file);

}  // namespace tessera::formats::torch_zip
