#include "python_value.h"

#include <cstdint>
#include <optional>
#include <string_view>
#include <type_traits>
#include <variant>

#include "base/float_text.h"
#include "tessera/base/error.h"

namespace tessera::python {
namespace {

/// Takes ownership of a new reference. If it is null, throws the error that Python has set.
nb::object stolen(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

/// `hashed`: the value is in a set or is a dict's key, so a set must become a frozenset.
enum class Place { anywhere, hashed };

class ToPython {
 public:
  explicit ToPython(Place place) : place_(place) {}

  nb::object operator()(Value::None) const { return nb::none(); }
  nb::object operator()(bool truth) const { return nb::bool_(truth); }
  nb::object operator()(std::int64_t number) const { return nb::int_(number); }
  nb::object operator()(double number) const { return nb::float_(number); }
  nb::object operator()(const std::string& text) const { return str_of(text); }
  nb::object operator()(const Value::BigInt& number) const {
    return stolen(PyLong_FromString(number.decimal.c_str(), nullptr, 10));
  }
  nb::object operator()(const Value::Bytes& bytes) const {
    return nb::bytes(bytes.data.data(), bytes.data.size());
  }
  nb::object operator()(const Value::Symbol& symbol) const {
    if (const auto number = complex_of(symbol.name)) return *number;
    return nb::module_::import_("tessera._symbol").attr("Symbol")(text_to_python(symbol.name));
  }
  nb::object operator()(const Value::List& items) const { return list_of(items); }
  nb::object operator()(const Value::Tuple& tuple) const {
    return stolen(PySequence_Tuple(list_of(tuple.items).ptr()));
  }
  nb::object operator()(const Value::Set& set) const {
    const nb::object items = ToPython(Place::hashed).list_of(set.items);
    return stolen(place_ == Place::hashed ? PyFrozenSet_New(items.ptr()) : PySet_New(items.ptr()));
  }
  nb::object operator()(const Value::Dict& dict) const {
    nb::dict result;
    for (const auto& [key, value] : dict) {
      result[std::visit(ToPython(Place::hashed), key.storage())] = convert(value);
    }
    return result;
  }

 private:
  static constexpr std::string_view kComplex = "complex:";

  nb::object convert(const Value& value) const { return std::visit(*this, value.storage()); }

  nb::object list_of(const std::vector<Value>& items) const {
    nb::list list;
    for (const Value& item : items) list.append(convert(item));
    return list;
  }

  /// Returns a str. A Value stores surrogates of a str in the form that `surrogatepass` writes.
  static nb::object str_of(const std::string& text) {
    const auto nbytes = static_cast<Py_ssize_t>(text.size());
    PyObject* str = PyUnicode_DecodeUTF8(text.data(), nbytes, "surrogatepass");
    if (str != nullptr) return nb::steal(str);
    PyErr_Clear();
    return text_to_python(text);
  }

  /// Returns the complex number that a symbol stands for; nothing for any other symbol.
  static std::optional<nb::object> complex_of(std::string_view name) {
    using ::tessera::detail::float_from_exact_text;
    const std::size_t comma = name.find(',');
    if (!name.starts_with(kComplex) || comma == std::string_view::npos) return std::nullopt;
    const auto real = float_from_exact_text(name.substr(kComplex.size(), comma - kComplex.size()));
    const auto imaginary = float_from_exact_text(name.substr(comma + 1));
    if (!real || !imaginary) return std::nullopt;
    return stolen(PyComplex_FromDoubles(*real, *imaginary));
  }

  Place place_;
};

/// A deeper nesting is probably a structure that contains itself.
constexpr int kMaxDepth = 200;

// Calls only functions of the stable ABI, for which the wheel of CPython 3.12 and later is
// compiled.
class FromPython {
 public:
  explicit FromPython(const std::string& name) : name_(name) {}

  Value convert(nb::handle object, int depth = 0) const {
    if (depth > kMaxDepth) {
      throw Error::expected(ErrorKind::unsupported, {.fqn = name_}, "nesting of a value",
                            "at most " + std::to_string(kMaxDepth) + " levels", "more");
    }
    PyObject* const it = object.ptr();
    if (object.is_none()) return {};
    if (PyBool_Check(it)) return it == Py_True;
    if (PyLong_Check(it)) return integer_of(object);
    if (PyFloat_Check(it)) return PyFloat_AsDouble(it);
    if (PyComplex_Check(it)) return complex_of(it);
    if (PyUnicode_Check(it)) {
      std::string text = text_of(object);
      if (nb::isinstance(object, nb::module_::import_("tessera._symbol").attr("Symbol"))) {
        return Value::Symbol{std::move(text)};
      }
      return text;
    }
    if (PyBytes_Check(it)) {
      return Value::Bytes{{PyBytes_AsString(it), static_cast<std::size_t>(PyBytes_Size(it))}};
    }
    if (PyByteArray_Check(it)) {
      return Value::Bytes{
          {PyByteArray_AsString(it), static_cast<std::size_t>(PyByteArray_Size(it))}};
    }
    if (PyTuple_Check(it)) return Value::Tuple{items_of(object, depth)};
    if (PyList_Check(it)) return items_of(object, depth);
    if (PyAnySet_Check(it)) return Value::Set{items_of(object, depth)};
    if (PyDict_Check(it)) {
      Value::Dict dict;
      for (const auto [key, value] : nb::borrow<nb::dict>(object)) {
        dict.emplace_back(convert(key, depth + 1), convert(value, depth + 1));
      }
      return dict;
    }
    const std::string type = type_of(object);
    if (type == "torch.dtype" || type == "torch.layout")
      return Value::Symbol{text_of(nb::str(object))};
    if (type == "torch.device") {
      return Value::Symbol{"device:" + text_of(nb::str(object))};
    }
    throw Error::expected(ErrorKind::unsupported, {.fqn = name_}, "value",
                          "None, a number, str, bytes, list, tuple, set, dict, or a tensor",
                          "an object of class " + type);
  }

 private:
  std::vector<Value> items_of(nb::handle iterable, int depth) const {
    std::vector<Value> items;
    for (const nb::handle item : nb::iter(iterable)) items.push_back(convert(item, depth + 1));
    return items;
  }

  static Value integer_of(nb::handle object) {
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(object.ptr(), &overflow);
    if (overflow == 0) return static_cast<std::int64_t>(number);
    return Value::BigInt{text_of(stolen(PyNumber_ToBase(object.ptr(), 10)))};
  }

  static std::string text_of(nb::handle object) {
    const nb::object utf8 =
        stolen(PyUnicode_AsEncodedString(object.ptr(), "utf-8", "surrogatepass"));
    return {PyBytes_AsString(utf8.ptr()), static_cast<std::size_t>(PyBytes_Size(utf8.ptr()))};
  }

  static Value complex_of(PyObject* number) {
    using ::tessera::detail::float_to_exact_text;
    return Value::Symbol{"complex:" + float_to_exact_text(PyComplex_RealAsDouble(number)) + "," +
                         float_to_exact_text(PyComplex_ImagAsDouble(number))};
  }

  static std::string type_of(nb::handle object) {
    const nb::handle type = object.type();
    return text_of(type.attr("__module__")) + "." + text_of(type.attr("__qualname__"));
  }

  const std::string& name_;
};

}  // namespace

nb::object text_to_python(std::string_view text) {
  return stolen(
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogateescape"));
}

std::string string_of(const nb::bytes& bytes) {
  return {static_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::string> strings_of(const std::vector<nb::bytes>& texts) {
  std::vector<std::string> strings;
  for (const nb::bytes& text : texts) strings.push_back(string_of(text));
  return strings;
}

nb::object text_or_none(const std::string& text) {
  return text.empty() ? nb::none() : text_to_python(text);
}

nb::object path_or_none(const std::string& path) {
  if (path.empty()) return nb::none();
  return stolen(
      PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

nb::object byte_range_or_none(const std::optional<ByteRange>& range) {
  if (!range) return nb::none();
  return nb::make_tuple(range->begin, range->end);
}

nb::handle position_type() {
  // Never destroyed: the interpreter may end before the static variables.
  static const nb::handle type =
      nb::object(nb::module_::import_("tessera._position").attr("Position")).release();
  return type;
}

nb::list path_to_python(const formats::KeyPath& path, std::string_view name) {
  nb::list keys;
  for (const formats::Key& key : path) {
    if (const auto* text = std::get_if<std::string>(&key)) {
      keys.append(text_to_python(*text));
    } else if (const auto* position = std::get_if<std::int64_t>(&key)) {
      keys.append(position_type()(*position));
    } else {
      keys.append(value_to_python(formats::dict_key_value(std::get<formats::NonStringKey>(key))));
    }
  }
  if (path.empty()) keys.append(text_to_python(name));
  return keys;
}

nb::object value_to_python(const Value& value) {
  return std::visit(ToPython(Place::anywhere), value.storage());
}

Value value_from_python(nb::handle object, const std::string& name) {
  return FromPython(name).convert(object);
}

}  // namespace tessera::python
