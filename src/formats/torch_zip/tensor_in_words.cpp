#include "formats/torch_zip/tensor_in_words.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "formats/pickle/foreign_object.h"
#include "formats/pickle/plain_value.h"
#include "formats/torch_zip/object_parts.h"

namespace tessera::formats::torch_zip {
namespace {

using pickle::Object;
using pickle::ObjectKind;
using pickle::ValueGlobal;

constexpr std::size_t kMaxShown = 8;  // of a shape's sizes, or a tensor's placements

/// Returns a shape as text, `[4, 3]`; an empty text if `sizes` is not a shape.
std::string shape_in_words(std::optional<Object> sizes) {
  if (sizes && sizes->is(ObjectKind::call) && value_global(*sizes) == ValueGlobal::torch_size) {
    sizes = item_of(sizes->call_arguments("size"), 0);
  }
  if (!sizes || (!sizes->is(ObjectKind::tuple) && !sizes->is(ObjectKind::list)) ||
      sizes->num_items("size") > kMaxShown) {
    return {};
  }
  std::string text;
  for (std::size_t i = 0; i < sizes->num_items("size"); ++i) {
    const Object size = sizes->item(i);
    if (!size.is(ObjectKind::integer)) return {};
    text += (i == 0 ? "" : ", ") + std::to_string(size.as_integer("size"));
  }
  return "[" + text + "]";
}

/// Returns the shape of a dense tensor as text, from the arguments of `_rebuild_tensor_v2`.
std::string tensor_shape_in_words(const std::optional<Object>& tensor) {
  if (!tensor || !tensor->is(ObjectKind::call)) return {};
  return shape_in_words(item_of(tensor->call_arguments("tensor"), 2));
}

/// Returns dtype and shape as text, ` float32 [8, 3]`, from the arguments of
/// `_rebuild_wrapper_subclass`.
std::string meta_in_words(Object call) {
  const std::optional<Object> arguments = item_of(call.call_arguments("tensor"), 2);
  const std::optional<Object> dtype = item_of(arguments, 1);
  const std::string shape = shape_in_words(item_of(arguments, 2));
  if (!dtype || !dtype->is(ObjectKind::global) || shape.empty()) return {};
  return " " + printable(dtype->global_name("dtype"), 40) + " " + shape;
}

/// Returns the placements of a DTensor as text: `Shard(0), Replicate`.
std::string placements_in_words(const std::optional<Object>& placements) {
  std::string text;
  for (std::size_t i = 0; i < kMaxShown; ++i) {
    const std::optional<Object> placement = item_of(placements, i);
    if (!placement || !placement->is(ObjectKind::call)) break;
    text += (i == 0 ? "" : ", ") + printable(placement->global_name("placement"), 40);
    const std::optional<Object> dim = attribute_of(placement, "dim");
    if (dim && dim->is(ObjectKind::integer)) {
      text += "(" + std::to_string(dim->as_integer("dim")) + ")";
    }
  }
  return text;
}

std::string dtensor_in_words(Object call) {
  const std::optional<Object> state = item_of(call.call_arguments("tensor"), 3);
  const std::string placements =
      placements_in_words(attribute_of(attribute_of(state, "_spec"), "placements"));
  const std::string local_shape = tensor_shape_in_words(attribute_of(state, "_local_tensor"));
  return "a DTensor" + meta_in_words(call) + (placements.empty() ? "" : ", placed " + placements) +
         ": one rank's part" + (local_shape.empty() ? "" : ", " + local_shape);
}

std::string sharded_tensor_in_words(Object call) {
  const std::optional<Object> state = item_of(call.call_arguments("tensor"), 3);
  const std::optional<Object> shard = item_of(item_of(state, 0), 0);  // the rank's first shard
  const std::optional<Object> metadata = attribute_of(shard, "metadata");
  const std::string sizes = shape_in_words(attribute_of(metadata, "shard_sizes"));
  const std::string offsets = shape_in_words(attribute_of(metadata, "shard_offsets"));
  return "a ShardedTensor" + meta_in_words(call) + ": one rank's part" +
         (sizes.empty() || offsets.empty() ? "" : ", " + sizes + " at " + offsets);
}

/// Returns the name with a space before it, or an empty text for an empty name.
std::string behind_space(std::string_view name) {
  return name.empty() ? std::string() : " " + std::string(name);
}

/// Returns the name of a torch.layout without `torch.`: `sparse_csr`.
std::string layout_in_words(std::optional<Object> layout) {
  constexpr std::string_view kPrefix = "torch.";
  std::string_view name;
  if (layout && layout->is(ObjectKind::call)) {
    layout = item_of(layout->call_arguments("layout"), 0);
    if (layout && layout->is(ObjectKind::str)) name = layout->as_text("layout");
  } else if (layout && layout->is(ObjectKind::global)) {
    name = layout->global_name("layout");
  }
  if (name.starts_with(kPrefix)) name.remove_prefix(kPrefix.size());
  return printable(name, 40);
}

/// Returns `qint8` for a storage of class torch.QInt8Storage.
std::string quantized_dtype_in_words(const std::optional<Object>& storage) {
  constexpr std::string_view kSuffix = "Storage";
  if (!storage || !storage->is(ObjectKind::persistent)) return {};
  const std::optional<Object> type = item_of(storage->persistent_id("storage"), 1);
  if (!type || !type->is(ObjectKind::global)) return {};
  std::string name = printable(type->global_name("storage"), 40);
  if (name.ends_with(kSuffix)) name.resize(name.size() - kSuffix.size());
  std::ranges::transform(name, name.begin(), [](char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  });
  return name;
}

}  // namespace

std::string sparse_tensor_in_words(Object arguments) {
  // The shape is the last argument, except for sparse_coo, where a flag follows the shape.
  const std::optional<Object> parts = item_of(arguments, 1);
  std::string shape = shape_in_words(item_of(parts, 3));
  if (shape.empty()) shape = shape_in_words(item_of(parts, 2));
  return "a sparse tensor" + behind_space(layout_in_words(item_of(arguments, 0))) +
         behind_space(shape);
}

std::string quantized_tensor_in_words(Object arguments) {
  return "a quantized tensor" + behind_space(quantized_dtype_in_words(item_of(arguments, 0))) +
         behind_space(shape_in_words(item_of(arguments, 2)));
}

std::string nested_tensor_in_words(Object arguments) {
  const std::optional<Object> sizes = item_of(arguments, 1);  // one row for each tensor: its shape
  const std::optional<Object> shape = sizes && sizes->is(ObjectKind::call)
                                          ? item_of(sizes->call_arguments("sizes"), 2)
                                          : std::nullopt;
  const std::optional<Object> num_rows = item_of(shape, 0);
  if (!num_rows || !num_rows->is(ObjectKind::integer)) return "a nested tensor";
  return "a nested tensor of " + std::to_string(num_rows->as_integer("sizes")) + " tensors";
}

std::string meta_tensor_in_words(Object arguments) {
  const std::optional<Object> dtype = item_of(arguments, 0);
  std::string name;
  if (dtype && dtype->is(ObjectKind::global)) name = printable(dtype->global_name("dtype"), 40);
  return "a tensor on the meta device" +
         (name.empty()
              ? ""
              : "," + behind_space(name) + behind_space(shape_in_words(item_of(arguments, 1))));
}

std::string tensor_subclass_in_words(Object call, Object type) {
  constexpr std::string_view kAdvice =
      " (save it with torch.distributed.checkpoint, or as a whole tensor)";
  const std::string name = pickle::foreign_name(type);
  if (name.starts_with("torch.distributed.")) {
    if (name.ends_with(".DTensor")) return dtensor_in_words(call) + std::string(kAdvice);
    if (name.ends_with(".ShardedTensor")) {
      return sharded_tensor_in_words(call) + std::string(kAdvice);
    }
  }
  return "a tensor of class " + name;
}

}  // namespace tessera::formats::torch_zip
