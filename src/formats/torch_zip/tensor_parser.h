#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "formats/expansion_limit.h"
#include "formats/pickle/pickle_object.h"
#include "formats/pickle/unpickler.h"
#include "formats/torch_zip/sharded_tensor.h"
#include "formats/torch_zip/storages.h"
#include "formats/torch_zip/torch_archive.h"

namespace tessera::formats::torch_zip {

/// The classes and functions that make tensors in torch.save's pickles.
enum class TensorGlobal : std::uint32_t {
  rebuild_tensor = 0x200,
  rebuild_tensor_v2,
  rebuild_tensor_v3,
  rebuild_parameter,
  rebuild_from_type,
  tensor_class,
  typed_storage,
  untyped_storage,
  torchscript_class,
  // Listed only so that messages can name what is refused.
  sparse_tensor,
  quantized_tensor,
  meta_tensor,
  nested_tensor,
  device_tensor,
  wrapper_subclass,
  quantized_kind,
};

/// Returns the names of the classes and functions in TensorGlobal, for an AllowList.
std::span<const pickle::AllowedGlobal> tensor_globals();

/// A storage as its persistent id in the pickle describes it. The members are references into the
/// parsed pickle.
struct StorageId {
  pickle::Object items;
  std::string_view type_name;  // as in the pickle: `FloatStorage`
  std::string_view key;
  std::int64_t numel = 0;  // bytes for an UntypedStorage
  bool is_quantized = false;
  std::uint64_t element_nbytes = 1;
  std::uint64_t nbytes = 0;
};

/// Returns the dtype of a storage class, such as `FloatStorage`; nothing for other names.
std::optional<DType> dtype_of_storage(std::string_view type_name);

/// Reads the persistent id of a storage. Throws: Error(corruption) if `persistent` is not the id of
/// a storage.
StorageId storage_id(pickle::Object persistent);

/// Makes tensor records from calls such as `torch._utils._rebuild_tensor_v2(storage, offset, …)`,
/// and checks each record against the bytes of its storage. Not thread-safe; `stored` must outlive
/// it.
class TensorParser {
 public:
  explicit TensorParser(const Storages& stored)
      : stored_(stored), nbytes_left_(max_tensor_nbytes(stored.plain_nbytes())) {}

  /// Says whether the object is a call that makes a tensor of any kind, or the id of a tensor that
  /// the file describes outside of the pickle.
  static bool is_tensor(pickle::Object object);
  static bool is_torchscript_object(pickle::Object object);

  /// Throws: Error(corruption) naming the rule; Error(unsupported) for a tensor that is not dense,
  /// or that would exceed the limit for the bytes of the archive (expansion_limit.h).
  TensorRecord parse(pickle::Object object);

  /// Returns how many of the parsed tensors were only one rank's part of a DTensor or a
  /// ShardedTensor.
  std::size_t num_local_tensors() const { return num_local_tensors_; }

 private:
  struct Storage {
    std::size_t number = 0;      // as Storages::find returns it
    std::string_view type_name;  // as in the pickle: `FloatStorage`
    std::int64_t numel = 0;      // bytes for an UntypedStorage
    std::uint64_t nbytes = 0;
    std::int64_t first_element = 0;  // where a view of the storage starts
  };
  TensorRecord parse_saved(pickle::Object persistent);
  Storage parse_storage(pickle::Object persistent);
  static Storage view_of(Storage storage, const StorageId& id);
  void spend(pickle::Object object, const TensorRecord& tensor);

  const Storages& stored_;
  PlacePool places_;
  std::map<std::string, Storage, std::less<>> storages_;  // key: what the pickle calls the storage
  std::size_t num_local_tensors_ = 0;
  std::uint64_t nbytes_left_;     // the rest of the limit, for further tensors
  std::set<std::uint32_t> paid_;  // ids of tensors that were subtracted from `nbytes_left_`
};

/// Adds the names of the attributes that the state of an object sets, up to eleven in all: the
/// summary of a move lists ten, and says if there are more.
void add_attribute_names(pickle::Object state, std::vector<std::string>& names);

}  // namespace tessera::formats::torch_zip
