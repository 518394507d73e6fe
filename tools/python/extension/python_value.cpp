#include "python_value.h"

#include <bit>
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <variant>

namespace tessera::python {
namespace {

/// Takes over a new reference. If it is null, throws the error that Python has set.
nb::object stolen(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

/// Where a value is put. Inside a set, or as a dict's key, a set must be a frozenset.
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
    if (symbol.name.starts_with(kComplex)) return complex_of(symbol.name);
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

  /// Returns a str. A Value keeps surrogates of a str as `surrogatepass` writes them.
  static nb::object str_of(const std::string& text) {
    const auto nbytes = static_cast<Py_ssize_t>(text.size());
    PyObject* str = PyUnicode_DecodeUTF8(text.data(), nbytes, "surrogatepass");
    if (str != nullptr) return nb::steal(str);
    PyErr_Clear();
    return text_to_python(text);
  }

  static nb::object complex_of(const std::string& name) {
    const std::size_t comma = name.find(',');
    const nb::object real = number_of(name.substr(kComplex.size(), comma - kComplex.size()));
    const nb::object imaginary =
        number_of(comma == std::string::npos ? "0" : name.substr(comma + 1));
    return stolen(
        PyComplex_FromDoubles(PyFloat_AsDouble(real.ptr()), PyFloat_AsDouble(imaginary.ptr())));
  }

  static nb::object number_of(const std::string& text) {
    constexpr std::string_view kNanWithBits = "nan:";  // and 16 hex digits
    if (text.starts_with(kNanWithBits)) {
      const std::uint64_t bits = std::strtoull(text.c_str() + kNanWithBits.size(), nullptr, 16);
      return stolen(PyFloat_FromDouble(std::bit_cast<double>(bits)));
    }
    return stolen(PyFloat_FromString(text_to_python(text).ptr()));
  }

  Place place_;
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

nb::object value_to_python(const Value& value) {
  return std::visit(ToPython(Place::anywhere), value.storage());
}

}  // namespace tessera::python
