#include "formats/pickle/numpy_array.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::formats::pickle {
namespace {

/// An array as NumPy pickles it: a call of `_reconstruct` with the state (1, shape, dtype,
/// is_fortran, bytes), or in protocol 5 of `_frombuffer` with (bytes, dtype, shape, order).
struct NumpyArray {
  std::vector<std::int64_t> shape;
  std::string_view dtype;  // NumPy's code, such as `f4`
  Object dtype_call;
  Object elements;
};

/// The three parts of a NumpyArray, which nothing has checked yet.
struct PickledArray {
  Object shape;
  Object dtype;
  Object elements;
};

std::optional<PickledArray> pickled_array(Object object) {
  if (!object.is(ObjectKind::call) || !object.global_module("call").starts_with("numpy.")) {
    return std::nullopt;
  }
  const std::string_view function = object.global_name("call");
  if (function == "_reconstruct") {
    const std::optional<Object> state = object.call_state("array");
    if (!state || !state->is(ObjectKind::tuple) || state->num_items("array") != 5) {
      return std::nullopt;
    }
    return PickledArray{state->item(1), state->item(2), state->item(4)};
  }
  const Object arguments = object.call_arguments("call");
  if (function != "_frombuffer" || arguments.num_items("arguments") != 4) return std::nullopt;
  return PickledArray{arguments.item(2), arguments.item(1), arguments.item(0)};
}

std::optional<NumpyArray> numpy_array(Object object) {
  constexpr std::size_t kMaxDims = 64;
  const std::optional<PickledArray> pickled = pickled_array(object);
  if (!pickled) return std::nullopt;
  const auto& [shape, dtype, elements] = *pickled;
  if (!shape.is(ObjectKind::tuple) || shape.num_items("shape") > kMaxDims ||
      !dtype.is(ObjectKind::call) || dtype.call_arguments("dtype").num_items("dtype") == 0) {
    return std::nullopt;
  }
  const Object code = dtype.call_arguments("dtype").item(0);
  if (!code.is(ObjectKind::str)) return std::nullopt;
  NumpyArray array{{}, code.as_text("dtype"), dtype, elements};
  for (std::size_t i = 0; i < shape.num_items("shape"); ++i) {
    if (!shape.item(i).is(ObjectKind::integer)) return std::nullopt;
    array.shape.push_back(shape.item(i).as_integer("shape"));
  }
  return array;
}

/// Returns `float32` for NumPy's `f4`.
std::string dtype_in_words(std::string_view code) {
  constexpr std::pair<char, std::string_view> kKinds[] = {
      {'f', "float"}, {'i', "int"}, {'u', "uint"}, {'c', "complex"}};
  if (code == "b1") return "bool";
  if (code.size() == 2 && code[1] >= '1' && code[1] <= '8') {
    for (const auto& [kind, word] : kKinds) {
      if (kind == code[0]) return std::string(word) + std::to_string(8 * (code[1] - '0'));
    }
  }
  return "of dtype " + printable(code, 20);
}

bool is_little_endian(Object dtype_call) {
  const std::optional<Object> state = dtype_call.call_state("dtype");
  return state && state->is(ObjectKind::tuple) && state->num_items("dtype") > 1 &&
         state->item(1).is(ObjectKind::str) && state->item(1).as_text("byte order") == "<";
}

}  // namespace

std::string numpy_array_in_words(Object object) {
  const std::optional<NumpyArray> array = numpy_array(object);
  if (!array) return {};
  std::string sizes;
  for (const std::int64_t size : array->shape) {
    sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  }
  return "NumPy array " + dtype_in_words(array->dtype) + " [" + sizes + "]";
}

std::optional<GeneratorState> generator_state(Object object) {
  constexpr std::int64_t kMaxNumel = 1024;
  const std::optional<NumpyArray> array = numpy_array(object);
  if (!array || (array->dtype != "u4" && array->dtype != "u8") || array->shape.size() != 1 ||
      array->shape[0] < 0 || array->shape[0] > kMaxNumel || !is_little_endian(array->dtype_call)) {
    return std::nullopt;
  }
  return GeneratorState{static_cast<std::size_t>(array->shape[0]),
                        array->dtype == "u4" ? std::size_t{4} : std::size_t{8}, array->elements};
}

}  // namespace tessera::formats::pickle
