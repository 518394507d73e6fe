#include "formats/pickle/plain_value.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "base/float_text.h"
#include "base/json.h"
#include "formats/pickle/foreign_object.h"
#include "formats/pickle/numpy_array.h"
#include "formats/pickle/python_text.h"

namespace tessera::formats::pickle {
namespace {

constexpr std::uint32_t number(ValueGlobal global) {
  return static_cast<std::uint32_t>(global);
}

// Pickles of protocol 2 and below call the builtins module by its Python 2 name.
constexpr AllowedGlobal kValueGlobals[] = {
    {"collections", "OrderedDict", number(ValueGlobal::ordered_dict)},
    {"collections", "defaultdict", number(ValueGlobal::default_dict)},
    {"collections", "Counter", number(ValueGlobal::counter)},
    {"builtins", "set", number(ValueGlobal::set)},
    {"__builtin__", "set", number(ValueGlobal::set)},
    {"builtins", "frozenset", number(ValueGlobal::frozen_set)},
    {"__builtin__", "frozenset", number(ValueGlobal::frozen_set)},
    {"builtins", "bytearray", number(ValueGlobal::byte_array)},
    {"__builtin__", "bytearray", number(ValueGlobal::byte_array)},
    {"builtins", "bytes", number(ValueGlobal::bytes)},
    {"__builtin__", "bytes", number(ValueGlobal::bytes)},
    {"builtins", "complex", number(ValueGlobal::complex)},
    {"__builtin__", "complex", number(ValueGlobal::complex)},
    {"_codecs", "encode", number(ValueGlobal::codecs_encode)},
    {"builtins", "list", number(ValueGlobal::builtin_type)},
    {"__builtin__", "list", number(ValueGlobal::builtin_type)},
    {"builtins", "dict", number(ValueGlobal::builtin_type)},
    {"__builtin__", "dict", number(ValueGlobal::builtin_type)},
    {"builtins", "int", number(ValueGlobal::builtin_type)},
    {"__builtin__", "int", number(ValueGlobal::builtin_type)},
    {"__builtin__", "long", number(ValueGlobal::builtin_type)},  // int, in protocol 2
    {"builtins", "float", number(ValueGlobal::builtin_type)},
    {"__builtin__", "float", number(ValueGlobal::builtin_type)},
    {"pathlib", "PosixPath", number(ValueGlobal::path)},
    {"pathlib._local", "PosixPath", number(ValueGlobal::path)},
    {"torch", "Size", number(ValueGlobal::torch_size)},
    {"torch", "device", number(ValueGlobal::torch_device)},
    {"torch", "bool", number(ValueGlobal::torch_dtype)},
    {"torch", "uint8", number(ValueGlobal::torch_dtype)},
    {"torch", "int8", number(ValueGlobal::torch_dtype)},
    {"torch", "uint16", number(ValueGlobal::torch_dtype)},
    {"torch", "int16", number(ValueGlobal::torch_dtype)},
    {"torch", "uint32", number(ValueGlobal::torch_dtype)},
    {"torch", "int32", number(ValueGlobal::torch_dtype)},
    {"torch", "uint64", number(ValueGlobal::torch_dtype)},
    {"torch", "int64", number(ValueGlobal::torch_dtype)},
    {"torch", "float16", number(ValueGlobal::torch_dtype)},
    {"torch", "bfloat16", number(ValueGlobal::torch_dtype)},
    {"torch", "float32", number(ValueGlobal::torch_dtype)},
    {"torch", "float64", number(ValueGlobal::torch_dtype)},
    {"torch", "complex32", number(ValueGlobal::torch_dtype)},
    {"torch", "complex64", number(ValueGlobal::torch_dtype)},
    {"torch", "complex128", number(ValueGlobal::torch_dtype)},
    {"torch", "float8_e4m3fn", number(ValueGlobal::torch_dtype)},
    {"torch", "float8_e5m2", number(ValueGlobal::torch_dtype)},
    {"torch", "float8_e4m3fnuz", number(ValueGlobal::torch_dtype)},
    {"torch", "float8_e5m2fnuz", number(ValueGlobal::torch_dtype)},
    {"torch", "float8_e8m0fnu", number(ValueGlobal::torch_dtype)},
    {"torch", "float4_e2m1fn_x2", number(ValueGlobal::torch_dtype)},
    {"torch", "strided", number(ValueGlobal::torch_layout)},
    {"torch", "sparse_coo", number(ValueGlobal::torch_layout)},
    {"torch", "sparse_csr", number(ValueGlobal::torch_layout)},
    {"torch", "sparse_csc", number(ValueGlobal::torch_layout)},
    {"torch", "sparse_bsr", number(ValueGlobal::torch_layout)},
    {"torch", "sparse_bsc", number(ValueGlobal::torch_layout)},
    {"torch.serialization", "_get_layout", number(ValueGlobal::torch_get_layout)},
    {"torch.jit._pickle", "build_intlist", number(ValueGlobal::torch_typed)},
    {"torch.jit._pickle", "build_doublelist", number(ValueGlobal::torch_typed)},
    {"torch.jit._pickle", "build_boollist", number(ValueGlobal::torch_typed)},
    {"torch.jit._pickle", "build_tensorlist", number(ValueGlobal::torch_typed)},
    {"torch.jit._pickle", "restore_type_tag", number(ValueGlobal::torch_typed)},
    {"numpy.core.multiarray", "scalar", number(ValueGlobal::numpy_scalar)},
    {"numpy._core.multiarray", "scalar", number(ValueGlobal::numpy_scalar)},
    {"numpy", "dtype", number(ValueGlobal::numpy_dtype)},
    {"_io", "BytesIO", number(ValueGlobal::bytes_io)},
};

constexpr std::string_view kFrozenSet = "frozenset";
constexpr std::string_view kByteArray = "bytearray";

double half_to_double(std::uint16_t bits) {
  const int exponent = bits >> 10 & 0x1f;
  const int fraction = bits & 0x3ff;
  double magnitude = 0;
  if (exponent == 0x1f) {
    magnitude = fraction == 0 ? HUGE_VAL : std::nan("");
  } else if (exponent == 0) {
    magnitude = std::ldexp(fraction, -24);
  } else {
    magnitude = std::ldexp(fraction + 0x400, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

class ValueWalk {
 public:
  explicit ValueWalk(WalkBudget& budget) : budget_(budget) {}

  Value value(Object object) {
    budget_.spend(object, 64);
    switch (object.kind()) {
      case ObjectKind::none:
        return {};
      case ObjectKind::boolean:
        return object.as_boolean("value");
      case ObjectKind::integer:
        return object.as_integer("value");
      case ObjectKind::big_integer:
        return Value::BigInt{std::string(object.as_big_integer("value"))};
      case ObjectKind::floating:
        return object.as_floating("value");
      case ObjectKind::str:
        return text(object, object.as_text("value"));
      case ObjectKind::bytes:
        if (object.is_variant()) budget_.note_plainer(kByteArray);
        return Value::Bytes{text(object, object.as_bytes("value"))};
      case ObjectKind::list:
        return items(object);
      case ObjectKind::tuple:
        return Value::Tuple{items(object)};
      case ObjectKind::set:
        if (object.is_variant()) note_plainer(kFrozenSet);
        return set_of(object);
      case ObjectKind::dict:
        return entries(object);
      case ObjectKind::global:
        return constant(object);
      case ObjectKind::call:
        return built(object);
      case ObjectKind::persistent:
        object.fail(ErrorKind::unsupported,
                    "expected a plain value, found a storage: bytes without a dtype and a shape");
    }
    object.fail_expected("value", "a plain value");
  }

  Value key(Object object) {
    Value key = value(object);
    if (!is_hashable(key)) object.fail_expected("dict key", "a key that Python can hash");
    return key;
  }

 private:
  static bool is_hashable(const Value& key) {
    if (const auto* tuple = key.get_if<Value::Tuple>()) {
      return std::all_of(tuple->items.begin(), tuple->items.end(), is_hashable);
    }
    return !key.is<Value::List>() && !key.is<Value::Dict>();
  }

  using Descent = WalkBudget::Descent;

  std::string text(Object object, std::string_view source) {
    budget_.spend(object, source.size());
    return std::string(source);
  }

  std::vector<Value> items(Object object) {
    const Descent descent(budget_, object);
    std::vector<Value> values;
    const std::size_t num_items = object.num_items("items");
    values.reserve(num_items);
    for (std::size_t i = 0; i < num_items; ++i) values.push_back(value(object.item(i)));
    return values;
  }

  /// Remembers a type that gets plainer. A frozenset in a set or in a key does not: a set of this
  /// place can only be a frozenset, and comes back as one.
  void note_plainer(std::string_view type) {
    if (type != kFrozenSet || num_hashed_around_ == 0) budget_.note_plainer(type);
  }

  Value set_of(Object object) {
    ++num_hashed_around_;
    Value::Set set{items(object)};
    --num_hashed_around_;
    return set;
  }

  void add_entry(Value::Dict& dict, Object key, Object entry_value) {
    ++num_hashed_around_;
    Value key_value = this->key(key);
    --num_hashed_around_;
    dict.emplace_back(std::move(key_value), value(entry_value));
  }

  /// Returns the entries of a dict, or the entries that were added to a call.
  Value::Dict entries(Object object) {
    const Descent descent(budget_, object);
    Value::Dict dict;
    const std::size_t num_entries = object.num_entries("entries");
    for (std::size_t i = 0; i < num_entries; ++i) {
      add_entry(dict, object.entry_key(i), object.entry_value(i));
    }
    unite_compound_keys(dict);
    return dict;
  }

  /// Merges equal keys that are tuples, sets or symbols. Equal keys of simple kinds (str, int, …)
  /// were merged when the pickle was read.
  static void unite_compound_keys(Value::Dict& dict) {
    const auto is_compound = [](const Value& key) {
      return key.is<Value::Tuple>() || key.is<Value::Set>() || key.is<Value::Symbol>();
    };
    std::map<std::string, std::size_t> first_places;
    std::size_t kept = 0;
    for (std::size_t i = 0; i < dict.size(); ++i) {
      if (is_compound(dict[i].first)) {
        const auto [place, is_new] = first_places.emplace(value_to_json(dict[i].first), kept);
        if (!is_new) {
          dict[place->second].second = std::move(dict[i].second);
          continue;
        }
      }
      if (kept != i) dict[kept] = std::move(dict[i]);
      ++kept;
    }
    dict.resize(kept);
  }

  static Value constant(Object object) {
    switch (value_global(object).value_or(ValueGlobal::builtin_type)) {
      case ValueGlobal::torch_dtype:
      case ValueGlobal::torch_layout:
        return Value::Symbol{"torch." + std::string(object.global_name("constant"))};
      default:
        refuse(object);
    }
  }

  [[noreturn]] static void refuse(Object object) {
    if (is_foreign(object)) {
      object.fail(ErrorKind::unsupported, foreign_in_words(object) + "; nothing was executed");
    }
    if (object.is(ObjectKind::call) && object.global_module("call") == "torch._utils") {
      object.fail(
          ErrorKind::unsupported,
          "expected a plain value, found a value that holds a tensor (PyTorch flattens only "
          "dicts and lists: was the tensor in a tuple?)");
    }
    object.fail(
        ErrorKind::unsupported,
        "expected a plain value, such as a number, a text or a dict, found " + object.describe());
  }

  static Object argument(Object call, std::size_t index) {
    const Object arguments = call.call_arguments("call");
    if (index >= arguments.num_items("arguments")) {
      call.fail_expected("arguments", "at least " + std::to_string(index + 1));
    }
    return arguments.item(index);
  }
  static std::size_t num_arguments(Object call) {
    return call.call_arguments("call").num_items("arguments");
  }

  /// Returns the name of the type that a call of `global` makes, if a Value has no such type
  /// (`frozenset`, which becomes a set); else an empty name.
  static std::string_view type_that_changes(ValueGlobal global) {
    switch (global) {
      case ValueGlobal::ordered_dict:
        return "OrderedDict";
      case ValueGlobal::default_dict:
        return "defaultdict";
      case ValueGlobal::counter:
        return "Counter";
      case ValueGlobal::frozen_set:
        return kFrozenSet;
      case ValueGlobal::byte_array:
        return kByteArray;
      case ValueGlobal::path:
        return "PosixPath";
      case ValueGlobal::torch_size:
        return "torch.Size";
      case ValueGlobal::numpy_scalar:
        return "NumPy number";
      case ValueGlobal::bytes_io:
        return "io.BytesIO";
      default:
        return {};
    }
  }

  Value built(Object call) {
    const std::optional<ValueGlobal> global = value_global(call);
    if (!global) {
      const std::optional<GeneratorState> state = generator_state(call);
      return state ? integers(call, *state) : as_dict(call);
    }
    const Descent descent(budget_, call);
    if (const std::string_view type = type_that_changes(*global); !type.empty()) {
      note_plainer(type);
    }
    switch (*global) {
      case ValueGlobal::ordered_dict:
      case ValueGlobal::default_dict:
      case ValueGlobal::counter:
        return of_dict_class(call);
      case ValueGlobal::set:
      case ValueGlobal::frozen_set: {
        if (num_arguments(call) == 0) return Value::Set{};
        return set_of(argument(call, 0));
      }
      case ValueGlobal::bytes:
      case ValueGlobal::byte_array:
      case ValueGlobal::codecs_encode:
        return bytes(call);
      case ValueGlobal::complex: {
        const double real = argument(call, 0).as_floating("real part");
        const double imaginary = argument(call, 1).as_floating("imaginary part");
        return Value::Symbol{"complex:" + ::tessera::detail::float_to_exact_text(real) + "," +
                             ::tessera::detail::float_to_exact_text(imaginary)};
      }
      case ValueGlobal::path:
        return path(call);
      case ValueGlobal::torch_size:
        return Value::Tuple{items(argument(call, 0))};
      case ValueGlobal::torch_device:
        return device(call);
      case ValueGlobal::torch_get_layout:
        return Value::Symbol{text(call, argument(call, 0).as_str("layout"))};
      case ValueGlobal::torch_typed:
        return value(argument(call, 0));
      case ValueGlobal::numpy_scalar:
        return numpy_scalar(call);
      case ValueGlobal::bytes_io:
        return bytes_io(call);
      case ValueGlobal::builtin_type:
      case ValueGlobal::torch_dtype:
      case ValueGlobal::torch_layout:
      case ValueGlobal::numpy_dtype:
        refuse(call);
    }
    refuse(call);
  }

  /// Reads an object of a class that the caller asked to read as a dict.
  Value as_dict(Object object) {
    const std::optional<Object> attributes = entries_as_dict(object);
    if (!attributes) refuse(object);
    if (budget_.is_on_path(object)) refuse_reference_back(object);
    const Descent descent(budget_, object);
    budget_.note_as_dict(object);
    return attributes == object ? put_entries(object) : entries(*attributes);
  }

  /// Returns the elements of a NumPy array of unsigned integers as a list.
  Value integers(Object array, const GeneratorState& state) {
    const Descent descent(budget_, array);
    const auto& [numel, itemsize, elements] = state;
    // The bytes as they are, also of a bytearray, which is not a change of its own.
    const Value stored = elements.is(ObjectKind::bytes)
                             ? Value::Bytes{text(elements, elements.as_bytes("NumPy array"))}
                             : value(elements);
    const auto* raw = stored.get_if<Value::Bytes>();
    if (raw == nullptr || raw->data.size() != itemsize * numel) {
      elements.fail_expected("NumPy array", std::to_string(itemsize * numel) + " bytes");
    }
    budget_.spend(array, 64 * numel);
    budget_.note_plainer("NumPy array");
    Value::List list;
    list.reserve(numel);
    for (std::size_t i = 0; i < numel; ++i) {
      std::uint64_t element = 0;
      for (std::size_t byte = itemsize; byte-- > 0;) {
        element = element << 8 | static_cast<unsigned char>(raw->data[itemsize * i + byte]);
      }
      list.push_back(unsigned_integer(element));
    }
    return list;
  }

  static Value unsigned_integer(std::uint64_t number) {
    if (number >> 63 != 0) return Value::BigInt{std::to_string(number)};
    return static_cast<std::int64_t>(number);
  }

  // Returns the bytes of an io.BytesIO. The state is (bytes, position, attributes or None).
  Value bytes_io(Object call) {
    const std::optional<Object> state = call.call_state("BytesIO");
    if (!state) return Value::Bytes{};
    if (!state->is(ObjectKind::tuple) || state->num_items("BytesIO") == 0) {
      state->fail_expected("BytesIO", "a tuple of bytes and a position");
    }
    const Value content = value(state->item(0));
    if (!content.is<Value::Bytes>()) state->item(0).fail_expected("BytesIO", "bytes");
    return content;
  }

  Value put_entries(Object call) {
    Value::Dict dict;
    const std::size_t num_entries = call.num_entries("entries");
    for (std::size_t i = 0; i < num_entries; ++i) {
      add_entry(dict, call.entry_key(i), call.entry_value(i));
    }
    unite_compound_keys(dict);
    return dict;
  }

  Value of_dict_class(Object call) {
    if (!is_dict_class(call)) {
      call.fail(ErrorKind::unsupported,
                std::string(call.global_name("call")) +
                    ": expected entries as Python pickles them, found other arguments");
    }
    if (const std::optional<Object> state = call.call_state("dict")) {
      budget_.spend(call, sizeof(Object));
      budget_.note_state(*state);
    }
    const bool is_counter = value_global(call) == ValueGlobal::counter;
    return is_counter && num_arguments(call) > 0 ? entries(argument(call, 0)) : put_entries(call);
  }

  Value bytes(Object call) {
    if (num_arguments(call) == 0) return Value::Bytes{};
    const Object source = argument(call, 0);
    if (source.is(ObjectKind::bytes)) return Value::Bytes{text(call, source.as_bytes("bytes"))};
    if (source.is(ObjectKind::call) && value_global(source) == ValueGlobal::codecs_encode) {
      return value(source);
    }
    const std::string_view encoding = argument(call, 1).as_str("encoding");
    if (encoding != "latin1" && encoding != "latin-1") {
      argument(call, 1).fail_expected("encoding", "latin1");
    }
    const std::string_view characters = source.as_str("bytes");
    budget_.spend(call, characters.size());
    std::optional<std::string> encoded = encode_latin1(characters);
    if (!encoded) source.fail_expected("bytes", "characters up to U+00FF");
    return Value::Bytes{std::move(*encoded)};
  }

  Value path(Object call) {
    std::string joined;
    for (std::size_t i = 0; i < num_arguments(call); ++i) {
      const std::string_view component = argument(call, i).as_str("path");
      budget_.spend(call, component.size());
      if (!joined.empty() && joined.back() != '/') joined += '/';
      joined += component;
    }
    return joined.empty() ? std::string(".") : joined;  // as str() spells it
  }

  Value device(Object call) {
    std::string name = "device:" + text(call, argument(call, 0).as_str("device type"));
    if (num_arguments(call) > 1) {
      name += ':' + std::to_string(argument(call, 1).as_integer("device index"));
    }
    return Value::Symbol{std::move(name)};
  }

  // Returns a NumPy scalar as a bool, an int or a float. The dtype is numpy.dtype('f8', False,
  // True) with a state (3, '<', ...), which holds the byte order.
  Value numpy_scalar(Object call) {
    const Object dtype = argument(call, 0);
    if (!dtype.is(ObjectKind::call) || value_global(dtype) != ValueGlobal::numpy_dtype) {
      dtype.fail_expected("NumPy scalar's dtype", "numpy.dtype(...)");
    }
    const std::string_view name = argument(dtype, 0).as_str("NumPy dtype");
    bool big_endian = false;
    if (const std::optional<Object> state = dtype.call_state("NumPy dtype")) {
      if (state->num_items("NumPy dtype state") < 2)
        state->fail_expected("NumPy dtype state", "at least 2 items");
      big_endian = state->item(1).as_str("byte order") == ">";
    }
    const Value stored = value(argument(call, 1));
    const auto* raw = stored.get_if<Value::Bytes>();
    if (raw == nullptr) argument(call, 1).fail_expected("NumPy scalar", "bytes");

    const std::string_view kinds = "bifu";
    const bool known = name.size() == 2 && kinds.find(name[0]) != std::string_view::npos &&
                       std::string_view("1248").find(name[1]) != std::string_view::npos;
    const std::size_t nbytes = known ? static_cast<std::size_t>(name[1] - '0') : 0;
    if (!known || (name[0] == 'b' && nbytes != 1) || (name[0] == 'f' && nbytes == 1)) {
      call.fail(ErrorKind::unsupported, "NumPy scalar of dtype " + printable(name, 20) +
                                            ": expected a bool, an integer or a float");
    }
    if (raw->data.size() != nbytes) {
      argument(call, 1).fail_expected("NumPy scalar", std::to_string(nbytes) + " bytes");
    }
    std::uint64_t bits = 0;
    for (std::size_t i = 0; i < nbytes; ++i) {
      const std::size_t from = big_endian ? i : nbytes - 1 - i;
      bits = bits << 8 | static_cast<unsigned char>(raw->data[from]);
    }
    switch (name[0]) {
      case 'b':
        return bits != 0;
      case 'f':
        return nbytes == 2 ? half_to_double(static_cast<std::uint16_t>(bits))
               : nbytes == 4
                   ? static_cast<double>(std::bit_cast<float>(static_cast<std::uint32_t>(bits)))
                   : std::bit_cast<double>(bits);
      case 'i': {
        const auto unused = static_cast<int>(64 - 8 * nbytes);
        return static_cast<std::int64_t>(bits << unused) >> unused;
      }
      default:
        return unsigned_integer(bits);
    }
  }

  WalkBudget& budget_;
  int num_hashed_around_ = 0;  // sets and keys of dicts around the present object
};

}  // namespace

std::span<const AllowedGlobal> value_globals() {
  return kValueGlobals;
}

std::optional<ValueGlobal> value_global(Object object) {
  const std::uint32_t meaning = object.meaning("global");
  if (meaning < number(ValueGlobal::ordered_dict) || meaning > number(ValueGlobal::bytes_io)) {
    return std::nullopt;
  }
  return static_cast<ValueGlobal>(meaning);
}

bool is_dict_class(Object object) {
  if (!object.is(ObjectKind::call)) return false;
  const Object arguments = object.call_arguments("call");
  const std::size_t num_arguments = arguments.num_items("arguments");
  switch (value_global(object).value_or(ValueGlobal::builtin_type)) {
    case ValueGlobal::ordered_dict:
      return num_arguments == 0;
    case ValueGlobal::default_dict:
      return num_arguments <= 1;  // the factory
    case ValueGlobal::counter:    // the entries: in a dict, or added to the call
      return num_arguments == 0 || (num_arguments == 1 && arguments.item(0).is(ObjectKind::dict) &&
                                    object.num_entries("entries") == 0);
    default:
      return false;
  }
}

WalkBudget::WalkBudget(const ObjectGraph& graph) : WalkBudget(graph.nbytes()) {}

WalkBudget::WalkBudget(std::uint64_t pickle_nbytes)
    : left_(std::min((std::uint64_t{1} << 26) + 128 * pickle_nbytes, std::uint64_t{1} << 32)) {}

void WalkBudget::spend(Object at, std::uint64_t nbytes) {
  if (nbytes > left_) {
    at.fail(ErrorKind::corruption,
            "size of the unpickled values: expected a size in proportion to the pickle, found far "
            "more (does an object repeat itself many times?)");
  }
  left_ -= nbytes;
}

bool WalkBudget::is_on_path(Object object) const {
  return std::ranges::find(way_, object.id()) != way_.end();
}

void refuse_reference_back(Object object) {
  object.fail(ErrorKind::unsupported,
              "expected a value without cycles, found a reference back to the " +
                  foreign_in_words(object) + ", which contains this entry");
}

WalkBudget::Descent::Descent(WalkBudget& budget, Object object) : budget_(budget) {
  if (budget.is_on_path(object)) {
    object.fail(ErrorKind::corruption,
                object.describe() +
                    ": expected a value without cycles, found a value that contains itself");
  }
  if (budget.way_.size() == kMaxDepth) {
    object.fail_expected("value depth", "at most " + std::to_string(kMaxDepth) + " levels");
  }
  budget.way_.push_back(object.id());
}

Value to_value(Object object, WalkBudget& budget) {
  return ValueWalk(budget).value(object);
}

Value to_key(Object object, WalkBudget& budget) {
  return ValueWalk(budget).key(object);
}

}  // namespace tessera::formats::pickle
