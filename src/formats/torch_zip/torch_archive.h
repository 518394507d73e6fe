#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "formats/pickle/pickle_object.h"
#include "formats/pickle/unpickler.h"
#include "formats/torch_zip/sharded_tensor.h"
#include "formats/torch_zip/storage_checks.h"
#include "formats/torch_zip/storages.h"
#include "formats/zip/zip_reader.h"
#include "tessera/base/dtype.h"
#include "tessera/base/file_system.h"
#include "tessera/base/shape.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"
#include "tessera/layout/region.h"

namespace tessera::formats::torch_zip {

/// A dense tensor as torch.save writes it: a strided view of a storage. The code that makes
/// one has checked that all elements are within the storage.
struct TensorRecord {
  DType dtype = DType::float32;
  Shape shape;
  Shape strides;                    // in elements; 0 where the tensor is expanded
  std::int64_t storage_offset = 0;  // in elements
  std::size_t storage = 0;          // the number that Storages::find returns
  // Sign changes that torch stores as flags, and applies when it uses the elements.
  bool conjugate = false;
  bool negative = false;
  // Properties of the tensor in torch that Tessera does not keep.
  bool requires_grad = false;
  bool is_parameter = false;
  std::vector<std::string> attributes{};  // names of attributes that a program set; at most eight
  SharedPlace place{};                    // null: no part of a DTensor or ShardedTensor
};

/// Says whether the elements are contiguous in the storage, in row-major order.
bool is_contiguous(const TensorRecord& tensor);

/// A tensor or value of the saved object, and the path to it. For an object that Tessera does not
/// read, such as an object of a class, it holds an Error(unsupported) instead.
struct Leaf {
  KeyPath path;  // empty if the root itself is the leaf
  std::variant<TensorRecord, Value, Error> content;
};

/// All tensors and values of a saved object, in the order of the pickle.
struct Leaves {
  std::vector<Leaf> leaves;
  std::vector<OpenedClass> opened_classes;      // sorted by name
  std::vector<Simplification> simplifications;  // of containers
  std::size_t num_local_tensors = 0;  // of DTensors and ShardedTensors; other ranks hold the rest
};

/// An object that torch.save or torch.jit.save wrote: its pickle, and the bytes of its storages.
/// The base class of the readers of all file formats that hold a saved object. Thread-safe.
class SavedObject {
 public:
  virtual ~SavedObject() = default;
  SavedObject(const SavedObject&) = delete;
  SavedObject& operator=(const SavedObject&) = delete;

  const Storages& storages() const { return *storages_; }
  /// Frees the parsed pickle, which takes more memory than the tensors and values in it. Afterwards
  /// only the elements of tensors can be read. Requires: no other thread uses this object.
  void drop_pickle() { graph_.reset(); }
  /// Requires, like all functions that use the pickle: `drop_pickle` was not called.
  pickle::Object root() const { return graph_->root(); }
  /// Returns how the bytes of tensors are stored: `plain`, or `big-endian`.
  std::string_view encoding() const { return order_ == ByteOrder::big ? "big-endian" : "plain"; }

  /// Returns the tensors and values of the saved object, in the order of the pickle, flattened as
  /// PyTorch's distributed checkpoint (DCP) does. [Note: Flattening] A dict is opened: its entries
  /// get names of their own. A list is opened if it holds a tensor, a dict, or an opened list or
  /// tuple; other lists are one value. A tuple is opened if it holds a tensor at any depth (DCP:
  /// always one value). A dict without entries is a value (DCP loses it), unless it is the whole
  /// saved object. TorchScript modules are opened as dicts, and so are torch.nn.Modules, as their
  /// state_dict() would be. Anything that is neither a dense tensor nor a plain value is a leaf
  /// with an error. So is a dict with a key that is no plain value. Throws: Error(corruption);
  /// Error(unsupported) for a text key that cannot be a name.
  Leaves flatten() const;
  std::vector<Leaf> leaves() const { return flatten().leaves; }

  /// Returns the names of the classes and functions that the pickle mentions and Tessera does not
  /// know: sorted, at most 1000.
  std::vector<std::string> foreign_names() const;

  /// Returns the keys of all storages that the pickle refers to.
  std::unordered_set<std::string_view> storage_keys() const;

  /// Returns the whole saved object as one value. Throws: Error(unsupported) naming the first part
  /// that is not a plain value, such as a tensor.
  Value as_value() const;
  /// Returns the classes whose objects `as_value` reads as dicts. Throws: as `as_value()`.
  std::vector<OpenedClass> classes_in_value() const;

  /// Fills `out` with elements `[range.begin, range.end)` of the tensor in row-major order, for any
  /// strides. Needs a MiB of memory besides `out`. `fqn` is for messages. When all bytes of a
  /// storage have been read, in any order and through any tensors, checks its CRC.
  /// Requires: `out.size() == range.numel() * itemsize`, the range within the tensor.
  /// Throws: Error(corruption) with `fqn` and the byte range; Error(io).
  void read_elements(const TensorRecord& tensor, std::string_view fqn, FlatRange range,
                     std::span<std::byte> out) const;

  /// Returns the range of the file from the tensor's first element to its last, in storage order;
  /// an empty one for an empty tensor. Throws as the constructor does.
  ByteRange stored_range(const TensorRecord& tensor) const;

  /// Does what `formats::check_rest` does, for the storages that were read in part.
  void check_rest(const RestOptions& options) const {
    checks_->check_rest(*storages_, path_, options);
  }
  const std::shared_ptr<StorageChecks>& checks() const { return checks_; }
  /// Adds what this object reads to the checks of an earlier object of the same file. Requires:
  /// nothing was read yet.
  void continue_checks(std::shared_ptr<StorageChecks> checks) { checks_ = std::move(checks); }

 protected:
  enum class ByteOrder { little, big };

  SavedObject() = default;
  /// Sets the content that a subclass has read from its file. `path` is for messages. Call it once,
  /// in the constructor of the subclass.
  void take(std::string path, pickle::ObjectGraph graph, std::unique_ptr<Storages> storages,
            ByteOrder order = ByteOrder::little);

 private:
  std::string path_;
  std::optional<pickle::ObjectGraph> graph_;
  std::unique_ptr<Storages> storages_;
  ByteOrder order_ = ByteOrder::little;
  std::shared_ptr<StorageChecks> checks_ = std::make_shared<StorageChecks>();
};

/// An archive that torch.save or torch.jit.save wrote. It fills a window of a file, often all of
/// it.
///
///     <prefix>/data.pkl     the pickled object; a tensor is a call with a persistent id
///     <prefix>/data/<key>   a storage, raw; 64-byte aligned
///     <prefix>/byteorder    `little` or `big`
///     <prefix>/version, .data/serialization_id, .format_version, .storage_alignment: not needed
///
/// Opening reads the zip directory and data.pkl, and no tensor bytes. The layout in full:
/// docs/formats/torch_zip.md.
class TorchArchive final : public SavedObject {
 public:
  /// Throws: Error(corruption); Error(unsupported); Error(io). `file` must outlive it.
  /// `window`: the range of the file that the archive fills. Objects of the classes in `as_dict`
  /// are read as dicts of their attributes (OpenOptions::as_dict).
  TorchArchive(const ReadableFile& file, ByteRange window,
               std::span<const std::string> as_dict = {});

  const zip::ZipReader& zip() const { return *zip_; }
  /// Returns the folder in the archive that holds all of torch's records, such as `archive`.
  const std::string& prefix() const { return prefix_; }

 private:
  const zip::ZipReader* zip_;  // of `storages()`
  std::string prefix_;
};

/// Returns the classes and functions that Tessera knows in pickles of torch.save.
const pickle::AllowList& saved_globals();

}  // namespace tessera::formats::torch_zip
