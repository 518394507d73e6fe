#include "formats/torch_zip/tensor_parser.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "base/checked_math.h"
#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/torch_zip/sharded_tensor.h"
#include "formats/torch_zip/tensor_in_words.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::AllowedGlobal;
using pickle::Object;
using pickle::ObjectKind;

constexpr std::uint32_t number(TensorGlobal global) {
  return static_cast<std::uint32_t>(global);
}

constexpr AllowedGlobal kTensorGlobals[] = {
    {"torch._utils", "_rebuild_tensor", number(TensorGlobal::rebuild_tensor)},
    {"torch._utils", "_rebuild_tensor_v2", number(TensorGlobal::rebuild_tensor_v2)},
    {"torch._utils", "_rebuild_tensor_v3", number(TensorGlobal::rebuild_tensor_v3)},
    {"torch._utils", "_rebuild_parameter", number(TensorGlobal::rebuild_parameter)},
    {"torch._utils", "_rebuild_parameter_with_state", number(TensorGlobal::rebuild_parameter)},
    {"torch._tensor", "_rebuild_from_type", number(TensorGlobal::rebuild_from_type)},
    {"torch._tensor", "_rebuild_from_type_v2", number(TensorGlobal::rebuild_from_type)},
    {"torch", "Tensor", number(TensorGlobal::tensor_class)},
    {"torch.nn.parameter", "Parameter", number(TensorGlobal::tensor_class)},
    {"torch.nn.parameter", "Buffer", number(TensorGlobal::tensor_class)},
    {"torch", "BoolStorage", number(TensorGlobal::typed_storage)},
    {"torch", "ByteStorage", number(TensorGlobal::typed_storage)},
    {"torch", "CharStorage", number(TensorGlobal::typed_storage)},
    {"torch", "ShortStorage", number(TensorGlobal::typed_storage)},
    {"torch", "IntStorage", number(TensorGlobal::typed_storage)},
    {"torch", "LongStorage", number(TensorGlobal::typed_storage)},
    {"torch", "HalfStorage", number(TensorGlobal::typed_storage)},
    {"torch", "BFloat16Storage", number(TensorGlobal::typed_storage)},
    {"torch", "FloatStorage", number(TensorGlobal::typed_storage)},
    {"torch", "DoubleStorage", number(TensorGlobal::typed_storage)},
    {"torch", "ComplexFloatStorage", number(TensorGlobal::typed_storage)},
    {"torch", "ComplexDoubleStorage", number(TensorGlobal::typed_storage)},
    {"torch.storage", "UntypedStorage", number(TensorGlobal::untyped_storage)},
    {"torch", "UntypedStorage", number(TensorGlobal::untyped_storage)},
    {"torch._utils", "_rebuild_sparse_tensor", number(TensorGlobal::sparse_tensor)},
    {"torch._utils", "_rebuild_sparse_csr_tensor", number(TensorGlobal::sparse_tensor)},
    {"torch._utils", "_rebuild_qtensor", number(TensorGlobal::quantized_tensor)},
    {"torch._utils", "_rebuild_meta_tensor_no_storage", number(TensorGlobal::meta_tensor)},
    {"torch._utils", "_rebuild_nested_tensor", number(TensorGlobal::nested_tensor)},
    {"torch._utils", "_rebuild_device_tensor_from_numpy", number(TensorGlobal::device_tensor)},
    {"torch._utils", "_rebuild_device_tensor_from_cpu_tensor", number(TensorGlobal::device_tensor)},
    {"torch._utils", "_rebuild_wrapper_subclass", number(TensorGlobal::wrapper_subclass)},
    {"torch", "QInt8Storage", number(TensorGlobal::quantized_kind)},
    {"torch", "QUInt8Storage", number(TensorGlobal::quantized_kind)},
    {"torch", "QInt32Storage", number(TensorGlobal::quantized_kind)},
    {"torch", "QUInt4x2Storage", number(TensorGlobal::quantized_kind)},
    {"torch", "QUInt2x4Storage", number(TensorGlobal::quantized_kind)},
    {"torch", "per_tensor_affine", number(TensorGlobal::quantized_kind)},
    {"torch", "per_tensor_symmetric", number(TensorGlobal::quantized_kind)},
    {"torch", "per_channel_affine", number(TensorGlobal::quantized_kind)},
    {"torch", "per_channel_symmetric", number(TensorGlobal::quantized_kind)},
    {"torch", "per_channel_affine_float_qparams", number(TensorGlobal::quantized_kind)},
};

constexpr std::pair<std::string_view, DType> kStorageDTypes[] = {
    {"BoolStorage", DType::boolean},
    {"ByteStorage", DType::uint8},
    {"CharStorage", DType::int8},
    {"ShortStorage", DType::int16},
    {"IntStorage", DType::int32},
    {"LongStorage", DType::int64},
    {"HalfStorage", DType::float16},
    {"BFloat16Storage", DType::bfloat16},
    {"FloatStorage", DType::float32},
    {"DoubleStorage", DType::float64},
    {"ComplexFloatStorage", DType::complex64},
    {"ComplexDoubleStorage", DType::complex128},
};

std::optional<TensorGlobal> tensor_global(Object object) {
  if (!object.is(ObjectKind::call) && !object.is(ObjectKind::global)) return std::nullopt;
  const std::uint32_t meaning = object.meaning("global");
  if (meaning < number(TensorGlobal::rebuild_tensor) ||
      meaning > number(TensorGlobal::quantized_kind)) {
    return std::nullopt;
  }
  return static_cast<TensorGlobal>(meaning);
}

Object required_argument(Object arguments, std::size_t index, std::string_view rule) {
  const std::size_t num_arguments = arguments.num_items(rule);
  if (index >= num_arguments) {
    arguments.fail_expected(rule, "argument " + std::to_string(index + 1) + " of a tensor");
  }
  return arguments.item(index);
}

std::int64_t natural(Object object, std::string_view rule) {
  const std::int64_t value = object.as_integer(rule);
  if (value < 0) object.fail_expected(rule, "0 or more");
  return value;
}

[[noreturn]] void refuse(Object object, std::string_view found) {
  object.fail(ErrorKind::unsupported,
              "tensor: expected a dense tensor with its bytes, found " + std::string(found));
}

Shape naturals(Object object, std::string_view rule) {
  if (object.is(ObjectKind::call) && value_global(object) == pickle::ValueGlobal::torch_size) {
    object = required_argument(object.call_arguments(rule), 0, rule);
  }
  const std::size_t num_dims = object.num_items(rule);
  if (num_dims > kMaxDims) {
    refuse(object, "one with " + std::to_string(num_dims) + " dimensions (at most " +
                       std::to_string(kMaxDims) + " are read)");
  }
  Shape values;
  for (std::size_t i = 0; i < num_dims; ++i) values.push_back(natural(object.item(i), rule));
  return values;
}

/// Returns the number of the last storage element that the tensor uses, plus one; nothing if this
/// does not fit into 63 bits. Requires: the tensor is not empty.
std::optional<std::int64_t> reach_of(const TensorRecord& tensor) {
  std::optional<std::int64_t> reach = checked_add<std::int64_t>(tensor.storage_offset, 1);
  for (std::size_t i = 0; i < tensor.shape.size() && reach; ++i) {
    const auto extent = checked_mul(tensor.shape[i] - 1, tensor.strides[i]);
    reach = extent ? checked_add(*reach, *extent) : std::nullopt;
  }
  return reach;
}

/// The call that rebuilds a tensor, such as `_rebuild_tensor_v2`, and the properties that calls
/// around it add: a Parameter, a subclass, attributes.
struct RebuildCall {
  Object object;  // the object that messages name
  TensorGlobal function;
  Object arguments;
  std::optional<ShardPlace> place{};      // of a DTensor or a ShardedTensor
  bool requires_grad = false;             // set by a call around it
  bool is_parameter = false;              // a call around it makes a Parameter
  std::vector<std::string> attributes{};  // names, set by the calls around it
};

/// Adds the names of the attributes in the fourth argument of `_rebuild_from_type_v2` or of
/// `_rebuild_parameter_with_state`.
void add_state(Object arguments, std::vector<std::string>& attributes) {
  constexpr std::size_t kState = 3;
  if (arguments.num_items("tensor") <= kState) return;
  add_attribute_names(arguments.item(kState), attributes);
}

/// Returns the call that rebuilds a tensor, without the calls around it that make a Parameter, or a
/// rank's part of a DTensor or ShardedTensor. Throws Error(unsupported) for any other subclass.
RebuildCall unwrap(Object object) {
  RebuildCall call{object, tensor_global(object).value_or(TensorGlobal::tensor_class),
                   object.call_arguments("tensor")};
  for (int depth = 0;; ++depth) {
    if (depth > 8) call.object.fail_expected("tensor", "at most 8 wrappers around a tensor");
    if (call.function == TensorGlobal::rebuild_parameter) {
      call.is_parameter = true;
      add_state(call.arguments, call.attributes);
      call.object = required_argument(call.arguments, 0, "parameter");
      if (!TensorParser::is_tensor(call.object)) {
        call.object.fail_expected("parameter", "a tensor");
      }
      if (call.object.is(ObjectKind::persistent)) {
        call.object.fail_expected("parameter", "a tensor that the pickle describes");
      }
      call.function = *tensor_global(call.object);
      call.arguments = call.object.call_arguments("parameter");
    } else if (call.function == TensorGlobal::rebuild_from_type) {
      const Object maker = required_argument(call.arguments, 0, "tensor");
      const Object type = required_argument(call.arguments, 1, "tensor");
      if (!maker.is(ObjectKind::global)) maker.fail_expected("tensor", "a function by its name");
      if (pickle::is_foreign(type)) {
        const std::optional<LocalTensor> local = local_tensor(call.object, type);
        if (local && local->tensor.is(ObjectKind::call) && TensorParser::is_tensor(local->tensor)) {
          call = {local->tensor,
                  *tensor_global(local->tensor),
                  local->tensor.call_arguments("tensor"),
                  local->place,
                  local->requires_grad,
                  call.is_parameter,
                  std::move(call.attributes)};
          continue;
        }
        refuse(call.object, tensor_subclass_in_words(call.object, type));
      }
      if (tensor_global(type) != TensorGlobal::tensor_class) {
        type.fail_expected("tensor type", "torch.Tensor, Parameter or Buffer");
      }
      call.is_parameter = call.is_parameter || type.global_name("tensor type") == "Parameter";
      call.function = tensor_global(maker).value_or(TensorGlobal::tensor_class);
      add_state(call.arguments, call.attributes);
      call.arguments = required_argument(call.arguments, 2, "tensor");
    } else {
      return call;
    }
  }
}

/// Returns how many arguments come before the optional dict of flags (`conj`, `neg`). Refuses
/// tensors that are not plain and dense, such as sparse, quantized and meta tensors.
std::size_t num_fixed_arguments(const RebuildCall& call) {
  switch (call.function) {
    case TensorGlobal::rebuild_tensor:
      return 4;
    case TensorGlobal::rebuild_tensor_v2:
      return 6;
    case TensorGlobal::rebuild_tensor_v3:
      return 7;
    case TensorGlobal::sparse_tensor:
      refuse(call.object, sparse_tensor_in_words(call.arguments));
    case TensorGlobal::quantized_tensor:
      refuse(call.object, quantized_tensor_in_words(call.arguments));
    case TensorGlobal::meta_tensor:
      refuse(call.object, meta_tensor_in_words(call.arguments));
    case TensorGlobal::nested_tensor:
      refuse(call.object, nested_tensor_in_words(call.arguments));
    case TensorGlobal::device_tensor:
      refuse(call.object, "a tensor of a device such as XLA (move it to the CPU before saving)");
    default:
      call.object.fail_expected(
          "tensor", "one of torch's rebuild functions, such as torch._utils._rebuild_tensor_v2");
  }
}

/// Returns the dtype in the arguments of `_rebuild_tensor_v3`.
DType stated_dtype(Object dtype) {
  if (pickle::is_foreign(dtype)) {
    dtype.fail(ErrorKind::unsupported,
               "dtype: expected a dtype that Tessera knows, found " + dtype.describe());
  }
  if (!dtype.is(ObjectKind::global) || value_global(dtype) != pickle::ValueGlobal::torch_dtype) {
    dtype.fail_expected("dtype", "a torch.dtype");
  }
  const std::optional<DType> known = parse_dtype(dtype.global_name("dtype"));
  if (!known)
    dtype.fail(ErrorKind::unsupported,
               "dtype: expected a dtype that Tessera knows, found " + dtype.describe());
  return *known;
}

DType dtype_of_typed_storage(Object storage, std::string_view type_name) {
  const std::optional<DType> known = dtype_of_storage(type_name);
  if (!known)
    storage.fail(ErrorKind::corruption, "dtype: expected a typed storage, found an UntypedStorage");
  return *known;
}

/// Throws unless the storage holds all elements that the tensor uses.
void check_extent(Object object, const TensorRecord& tensor, std::uint64_t storage_nbytes) {
  const std::uint64_t element_nbytes = itemsize(tensor.dtype);
  const std::optional<std::int64_t> numel = checked_numel(tensor.shape);
  const auto nbytes =
      numel ? checked_mul(static_cast<std::uint64_t>(*numel), element_nbytes) : std::nullopt;
  if (!nbytes || *nbytes > static_cast<std::uint64_t>(INT64_MAX)) {
    object.fail(ErrorKind::corruption,
                "size: expected less than 2^63 bytes, found " + shape_to_string(tensor.shape));
  }
  if (*numel == 0) return;
  const std::uint64_t num_stored = storage_nbytes / element_nbytes;
  const std::optional<std::int64_t> reach = reach_of(tensor);
  if (!reach || static_cast<std::uint64_t>(*reach) > num_stored) {
    object.fail(ErrorKind::corruption,
                "storage: expected at least " + (reach ? std::to_string(*reach) : "2^63") +
                    " elements for size " + shape_to_string(tensor.shape) + ", stride " +
                    shape_to_string(tensor.strides) + ", found " + std::to_string(num_stored));
  }
}

/// Sets the tensor's conjugate and negative bits, as the dict `flags` says. `flags` may be None.
void set_flags(TensorRecord& tensor, Object flags) {
  const auto is_set = [&](std::string_view name) {
    const std::optional<Object> flag = flags.find(name);
    return flag && flag->as_boolean(name);
  };
  if (!flags.is(ObjectKind::none)) {
    tensor.conjugate = is_set("conj");
    tensor.negative = is_set("neg");
  }
  if ((tensor.conjugate && !is_complex(tensor.dtype)) ||
      (tensor.negative && !is_complex(tensor.dtype) &&
       (!is_floating_point(tensor.dtype) || itemsize(tensor.dtype) < 2))) {
    flags.fail_expected("conj and neg", "a complex or floating-point tensor with these flags");
  }
}

}  // namespace

std::span<const AllowedGlobal> tensor_globals() {
  return kTensorGlobals;
}

std::optional<DType> dtype_of_storage(std::string_view type_name) {
  for (const auto& [name, dtype] : kStorageDTypes) {
    if (name == type_name) return dtype;
  }
  return std::nullopt;
}

void add_attribute_names(Object state, std::vector<std::string>& names) {
  constexpr std::size_t kMaxNames = 11;
  constexpr std::size_t kMaxNameNbytes = 80;
  if (state.is(ObjectKind::tuple)) {  // (dict of attributes, dict of slots)
    for (std::size_t i = 0; i < std::min<std::size_t>(state.num_items("state"), 2); ++i) {
      if (state.item(i).is(ObjectKind::dict)) add_attribute_names(state.item(i), names);
    }
    return;
  }
  if (!state.is(ObjectKind::dict)) return;
  constexpr std::size_t kMaxKeys = 64;  // an object may be the state of many others
  const std::size_t num_keys = std::min(kMaxKeys, state.num_entries("state"));
  for (std::size_t i = 0; i < num_keys && names.size() < kMaxNames; ++i) {
    const Object key = state.entry_key(i);
    if (key.is(ObjectKind::str)) names.push_back(printable(key.as_text("state"), kMaxNameNbytes));
  }
}

bool TensorParser::is_tensor(Object object) {
  if (object.is(ObjectKind::persistent)) return object.persistent_id("id").is(ObjectKind::str);
  if (!object.is(ObjectKind::call)) return false;
  switch (tensor_global(object).value_or(TensorGlobal::tensor_class)) {
    case TensorGlobal::rebuild_tensor:
    case TensorGlobal::rebuild_tensor_v2:
    case TensorGlobal::rebuild_tensor_v3:
    case TensorGlobal::rebuild_parameter:
    case TensorGlobal::rebuild_from_type:
    case TensorGlobal::sparse_tensor:
    case TensorGlobal::quantized_tensor:
    case TensorGlobal::meta_tensor:
    case TensorGlobal::nested_tensor:
    case TensorGlobal::device_tensor:
      return true;
    case TensorGlobal::tensor_class:
    case TensorGlobal::wrapper_subclass:
    case TensorGlobal::typed_storage:
    case TensorGlobal::untyped_storage:
    case TensorGlobal::torchscript_class:
    case TensorGlobal::quantized_kind:
      return false;
  }
  return false;
}

bool TensorParser::is_torchscript_object(Object object) {
  return object.is(ObjectKind::call) && tensor_global(object) == TensorGlobal::torchscript_class;
}

StorageId storage_id(Object persistent) {
  const Object id = persistent.persistent_id("storage");
  if (id.num_items("storage id") < 5) id.fail_expected("storage id", "5 items");
  if (id.item(0).as_str("storage id") != "storage") {
    id.item(0).fail_expected("storage id", "'storage'");
  }
  const Object type = id.item(1);
  const auto kind = tensor_global(type);
  if (!type.is(ObjectKind::global) ||
      (kind != TensorGlobal::typed_storage && kind != TensorGlobal::untyped_storage &&
       kind != TensorGlobal::quantized_kind)) {
    type.fail_expected("storage type", "a storage class");
  }
  StorageId result{.items = id,
                   .type_name = type.global_name("storage type"),
                   .key = id.item(2).as_str("storage key"),
                   .numel = natural(id.item(4), "storage size"),
                   .is_quantized = kind == TensorGlobal::quantized_kind};
  result.element_nbytes = result.type_name == "QInt32Storage"
                              ? 4
                              : itemsize(dtype_of_storage(result.type_name).value_or(DType::uint8));
  const auto nbytes = checked_mul(static_cast<std::uint64_t>(result.numel), result.element_nbytes);
  if (!nbytes) id.item(4).fail_expected("storage size", "a size below 2^64 bytes");
  result.nbytes = *nbytes;
  return result;
}

TensorParser::Storage TensorParser::parse_storage(Object persistent) {
  const StorageId id = storage_id(persistent);
  if (id.is_quantized) refuse(id.items.item(1), "quantized elements");
  const std::string name = "'" + printable(stored_.name_of(id.key), 80) + "'";
  const std::optional<std::size_t> number = stored_.find(id.key);
  if (!number) {
    id.items.fail(ErrorKind::corruption, "storage: expected a member " + name + ", found none");
  }
  if (!stored_.is_plain(*number)) {
    id.items.fail(ErrorKind::unsupported,
                  "storage " + name +
                      ": expected uncompressed bytes, found compressed "
                      "bytes (torch never compresses; was it packed again?)");
  }
  const std::uint64_t found_nbytes = stored_.nbytes(*number);
  if (found_nbytes < id.nbytes || found_nbytes - id.nbytes >= id.element_nbytes) {
    id.items.fail(ErrorKind::corruption, "storage " + name + ": expected " +
                                             std::to_string(id.nbytes) + " bytes, found " +
                                             std::to_string(found_nbytes) + " (damaged archive?)");
  }
  const auto [known, is_new] = storages_.try_emplace(
      std::string(id.key),
      Storage{
          .number = *number, .type_name = id.type_name, .numel = id.numel, .nbytes = found_nbytes});
  const Storage& storage = known->second;
  if (storage.type_name != id.type_name || storage.numel != id.numel) {
    id.items.fail(ErrorKind::corruption,
                  "storage '" + printable(id.key, 40) + "': expected one type and size, found " +
                      std::string(storage.type_name) + " of " + std::to_string(storage.numel) +
                      " and " + std::string(id.type_name) + " of " + std::to_string(id.numel));
  }
  return view_of(storage, id);
}

/// Returns the part of a storage that its id names. Before PyTorch 0.4, a storage could be a view
/// of another storage. Its id then says which elements it has: (key, offset, numel).
TensorParser::Storage TensorParser::view_of(Storage storage, const StorageId& id) {
  if (id.items.num_items("storage id") < 6 || id.items.item(5).is(ObjectKind::none)) return storage;
  const Object view = id.items.item(5);
  if (view.num_items("storage view") != 3) view.fail_expected("storage view", "3 items");
  storage.first_element = natural(view.item(1), "offset of a storage view");
  const std::int64_t numel = natural(view.item(2), "size of a storage view");
  const auto end = checked_add(storage.first_element, numel);
  if (!end || *end > storage.numel) {
    view.fail(ErrorKind::corruption, "storage view: expected an end of at most " +
                                         std::to_string(storage.numel) + " elements, found " +
                                         std::to_string(storage.first_element) + " + " +
                                         std::to_string(numel));
  }
  storage.nbytes = static_cast<std::uint64_t>(*end) * id.element_nbytes;
  return storage;
}

/// Subtracts the bytes of a tensor from the limit for all tensors, and throws if the limit is
/// exceeded. A tensor with several names counts once.
void TensorParser::spend(Object object, const TensorRecord& tensor) {
  const std::uint64_t nbytes =
      static_cast<std::uint64_t>(numel_of(tensor.shape)) * itemsize(tensor.dtype);
  if (nbytes == 0 || !paid_.insert(object.id()).second) return;
  if (nbytes > nbytes_left_) {
    paid_.erase(object.id());
    object.fail(ErrorKind::unsupported,
                "expanded size: expected at most " +
                    std::to_string(max_tensor_nbytes(stored_.plain_nbytes())) +
                    " bytes in all tensors together, as " + std::to_string(stored_.plain_nbytes()) +
                    " are stored, found " + std::to_string(nbytes) + " more in " +
                    shape_to_string(tensor.shape) + " with stride " +
                    shape_to_string(tensor.strides));
  }
  nbytes_left_ -= nbytes;
}

/// Reads a tensor that the file describes outside of the pickle.
TensorRecord TensorParser::parse_saved(Object persistent) {
  const std::string_view id = persistent.persistent_id("tensor").as_text("tensor");
  const SavedTensor* const saved = stored_.saved_tensor(id);
  if (saved == nullptr) {
    persistent.fail(
        ErrorKind::corruption,
        "tensor: expected the id of a tensor in the file, found '" + printable(id, 40) + "'");
  }
  TensorRecord tensor;
  tensor.dtype = saved->dtype;
  tensor.shape = saved->shape;
  tensor.strides = saved->strides;
  tensor.storage_offset = saved->storage_offset;
  tensor.storage = saved->storage;
  check_extent(persistent, tensor, saved->stored_nbytes);
  spend(persistent, tensor);
  return tensor;
}

TensorRecord TensorParser::parse(Object object) {
  if (object.is(ObjectKind::persistent)) return parse_saved(object);
  RebuildCall call = unwrap(object);
  const bool is_part = call.place && (!call.place->problem.empty() ||
                                      call.place->region != whole_box(call.place->whole_shape));
  if (is_part) ++num_local_tensors_;
  const std::size_t num_fixed = num_fixed_arguments(call);
  const Object arguments = call.arguments;
  if (arguments.num_items("tensor") < num_fixed) {
    arguments.fail_expected("tensor", std::to_string(num_fixed) + " arguments");
  }

  TensorRecord tensor;
  const Storage storage = parse_storage(arguments.item(0));
  tensor.dtype = call.function == TensorGlobal::rebuild_tensor_v3
                     ? stated_dtype(arguments.item(6))
                     : dtype_of_typed_storage(arguments.item(0), storage.type_name);
  tensor.storage = storage.number;
  const auto offset =
      checked_add(storage.first_element, natural(arguments.item(1), "storage offset"));
  if (!offset) arguments.item(1).fail_expected("storage offset", "an offset below 2^63");
  tensor.storage_offset = *offset;
  tensor.shape = naturals(arguments.item(2), "size");
  tensor.strides = naturals(arguments.item(3), "stride");
  if (tensor.shape.size() != tensor.strides.size()) {
    arguments.item(3).fail_expected("stride", std::to_string(tensor.shape.size()) +
                                                  " strides for the sizes " +
                                                  shape_to_string(tensor.shape));
  }
  check_extent(call.object, tensor, storage.nbytes);
  spend(object, tensor);
  tensor.is_parameter = call.is_parameter;
  tensor.attributes = std::move(call.attributes);
  if (call.place) tensor.place = places_.share(std::move(*call.place));
  constexpr std::size_t kRequiresGrad = 4;  // its place among the arguments
  tensor.requires_grad =
      call.requires_grad ||
      (num_fixed > kRequiresGrad && arguments.item(kRequiresGrad).is(ObjectKind::boolean) &&
       arguments.item(kRequiresGrad).as_boolean("requires_grad"));
  if (arguments.num_items("tensor") > num_fixed) set_flags(tensor, arguments.item(num_fixed));
  return tensor;
}

}  // namespace tessera::formats::torch_zip
