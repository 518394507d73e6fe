#include "formats/pickle/numpy_array.h"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera::formats::pickle {
namespace {

/// An array of NumPy's `_reconstruct`, whose state is (1, shape, dtype, is_fortran, bytes).
struct NumpyArray {
  std::vector<std::int64_t> shape;
  std::string_view dtype;  // NumPy's code, such as `f4`
  Object dtype_call;
  Object state;
};

std::optional<NumpyArray> numpy_array(Object object) {
  constexpr std::size_t kMaxDims = 64;
  if (!object.is(ObjectKind::call) || object.global_name("call") != "_reconstruct" ||
      !object.global_module("call").starts_with("numpy.")) {
    return std::nullopt;
  }
  const std::optional<Object> state = object.call_state("array");
  if (!state || !state->is(ObjectKind::tuple) || state->num_items("array") < 3) return std::nullopt;
  const Object shape = state->item(1);
  const Object dtype = state->item(2);
  if (!shape.is(ObjectKind::tuple) || shape.num_items("shape") > kMaxDims ||
      !dtype.is(ObjectKind::call) || dtype.call_arguments("dtype").num_items("dtype") == 0) {
    return std::nullopt;
  }
  const Object code = dtype.call_arguments("dtype").item(0);
  if (!code.is(ObjectKind::str)) return std::nullopt;
  NumpyArray array{{}, code.as_text("dtype"), dtype, *state};
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

std::optional<Object> bytes_of_generator_state(Object object) {
  constexpr std::int64_t kMaxNumel = 1024;
  const std::optional<NumpyArray> array = numpy_array(object);
  if (!array || array->dtype != "u4" || array->shape.size() != 1 || array->shape[0] < 0 ||
      array->shape[0] > kMaxNumel || array->state.num_items("array") != 5 ||
      !is_little_endian(array->dtype_call)) {
    return std::nullopt;
  }
  return array->state.item(4);
}

}  // namespace tessera::formats::pickle
