#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/pickle/pickler.h"
#include "formats/zip/zip_layout.h"
#include "tessera/base/dtype.h"
#include "tessera/base/error.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"

namespace tessera::formats::torch_zip {

/// Writes a contiguous tensor into the pickle, as `torch.save` does: a view of the whole storage in
/// member `data/<storage_key>` of the archive.
void pickle_tensor(pickle::Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                   std::string_view storage_key);

/// Writes into the pickle a tensor whose storage has one element: all elements of the tensor are
/// that element. `torch.save` pickles the result of `expand` in this way.
void pickle_repeated(pickle::Pickler& pickler, DType dtype, std::span<const std::int64_t> shape,
                     std::string_view storage_key);

/// A file as `torch.save` writes it, except the bytes of the storages: a zip of `data.pkl`,
/// `byteorder`, `data/0`, `data/1`, …, `version` and `.data/serialization_id`. All places are known
/// from the start; the bytes around the storages are known once the storages' CRCs are.
/// Immutable; safe to share between threads.
class TorchSaveLayout {
 public:
  /// Where storages of 256 KiB or more begin: at multiples of 64 bytes, as in torch, or of pages.
  enum class LargeStorages { at_64_bytes, at_pages };

  TorchSaveLayout(std::string pickle, std::span<const std::uint64_t> storage_nbytes,
                  LargeStorages large_storages = LargeStorages::at_64_bytes);

  std::uint64_t nbytes() const { return nbytes_; }
  std::size_t num_storages() const { return num_storages_; }
  ByteRange storage_range(std::size_t storage) const;

  struct Segment {
    std::uint64_t begin;  // within the file
    std::string bytes;
  };
  /// Returns the bytes before, between and after the storages, in order: n + 1 segments for a file
  /// with n storages.
  std::vector<Segment> segments_around_storages(std::span<const std::uint32_t> storage_crcs) const;

 private:
  zip::ZipLayout layout_;
  std::vector<std::string> contents_;  // of each member; empty for storages
  std::size_t first_storage_ = 0;
  std::size_t num_storages_ = 0;
  std::uint64_t nbytes_ = 0;
};

/// Returns the layout of the file that `torch.save` would write for a contiguous tensor.
TorchSaveLayout tensor_save_layout(DType dtype, std::span<const std::int64_t> shape);

/// Returns all bytes of the file that `torch.save` would write for a value.
std::string torch_save_value(const Value& value);

}  // namespace tessera::formats::torch_zip
