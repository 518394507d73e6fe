#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>
#include <vector>

#include "formats/pickle/pickle_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/zip/zip_reader.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::formats::torch_zip {

/// A dense tensor as torch.save writes it: a strided view of a storage, which is a member of the
/// archive. Already checked: every element that shape and strides reach lies within the storage.
struct TensorRecord {
  DType dtype = DType::float32;
  Shape shape;
  Shape strides;                    // in elements; 0 where the tensor is expanded
  std::int64_t storage_offset = 0;  // in elements
  std::size_t storage_member = 0;   // of the zip; meaningless where the tensor is empty
  // Signs that torch keeps beside the bytes and flips when it reads them.
  bool conjugate = false;
  bool negative = false;

  friend bool operator==(const TensorRecord&, const TensorRecord&) = default;
};

/// A leaf of the object that was saved, and the way to it.
struct Leaf {
  KeyPath path;  // empty where the root itself is the leaf
  std::variant<TensorRecord, Value> content;
};

/// One archive that torch.save or torch.jit.save wrote, filling a window of a file.
///
///     <prefix>/data.pkl     the object, tensors as calls over persistent ids
///     <prefix>/data/<key>   a storage, raw; 64-byte aligned
///     <prefix>/byteorder    `little` or `big`
///     <prefix>/version, .data/serialization_id, .format_version, .storage_alignment: not needed
///
/// Opening reads the zip directory and data.pkl, and no tensor bytes. Thread-safe; `file` must
/// outlive it. The layout in full: docs/formats/torch_zip.md.
class TorchArchive {
 public:
  /// Throws: Error(corruption), Error(unsupported) by name for what is no dense tensor or plain
  /// value, Error(io).
  TorchArchive(const ReadableFile& file, ByteRange window);

  const zip::ZipReader& zip() const { return zip_; }
  /// Says whether torch.jit.save wrote it. Its code is never looked at.
  bool is_torchscript() const { return is_torchscript_; }

  /// Returns the tensors and values of the saved object, cut where PyTorch's distributed checkpoint
  /// cuts [Note: Flattening]: a dict is opened (one without entries is a value), a list is opened
  /// where it holds a tensor, a dict or a list that is opened, any other list is one value. Tuples
  /// are values there; here one that holds a tensor is opened. TorchScript modules are opened like
  /// dicts. In the order of the pickle.
  std::vector<Leaf> leaves() const;

  /// Returns elements `[range.begin, range.end)` of the tensor in row-major order, little-endian,
  /// whatever its strides. `fqn` is for messages. Memory beside `out`: a few MiB.
  /// A storage whose bytes have all been read, through contiguous tensors and in any order, is
  /// checked against its CRC with the last of them.
  /// Requires: `out.size() == range.numel() * itemsize`, range within the tensor.
  /// Throws: Error(corruption) with `fqn` and the byte range; Error(io).
  void read_elements(const TensorRecord& tensor, std::string_view fqn, FlatRange range,
                     std::span<std::byte> out) const;

  /// Returns the bytes in the file that hold the tensor, from its first to its last element in
  /// storage order; an empty range at 0 for an empty tensor.
  ByteRange stored_range(const TensorRecord& tensor) const;

 private:
  struct StorageCheck;  // CRCs of the parts read so far
  class TensorParser;

  zip::ZipReader zip_;
  std::string prefix_;
  bool is_torchscript_ = false;
  bool big_endian_ = false;
  std::optional<pickle::ObjectGraph> graph_;
  mutable std::mutex checks_mutex_;
  mutable std::map<std::size_t, StorageCheck> checks_;
};

/// Says whether the elements lie in the storage one after the other in row-major order.
bool is_contiguous(const TensorRecord& tensor);

}  // namespace tessera::formats::torch_zip
