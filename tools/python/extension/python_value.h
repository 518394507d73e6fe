#pragma once

#include <nanobind/nanobind.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/value.h"
#include "tessera/formats/checkpoint.h"

namespace nb = nanobind;

// Converts Tessera's data to Python's and back. All functions need the GIL.
namespace tessera::python {

/// Returns a str. Bytes that are not UTF-8 become lone surrogates, as in Python's file names.
nb::object text_to_python(std::string_view text);

/// Returns a path or a name as text, from the bytes that Python's `os.fsencode` or `str.encode`
/// made.
std::string string_of(const nb::bytes& bytes);
std::vector<std::string> strings_of(const std::vector<nb::bytes>& texts);

// Both functions return a str for Python, or None if the text is empty.
nb::object text_or_none(const std::string& text);
nb::object path_or_none(const std::string& path);
nb::object byte_range_or_none(const std::optional<ByteRange>& range);

/// Returns `tessera._position.Position`, the class of a position in a list as a key of a path.
nb::handle position_type();
/// Returns the keys of an entry's path. If the path is empty, the name is the only key.
nb::list path_to_python(const formats::KeyPath& path, std::string_view name);

/// Converts a value to a Python object. A Symbol becomes a `tessera.Symbol`.
nb::object value_to_python(const Value& value);

/// Converts a Python object to a value: None, bool, int, float, complex, str, bytes, bytearray,
/// list, tuple, set, frozenset, dict, torch.dtype, torch.device or tessera.Symbol. An object of a
/// subclass, such as torch.Size, loses its class. `name` is for errors. Throws: Error(unsupported)
/// naming the type of any other object, or for a nesting of more than 200 levels.
Value value_from_python(nb::handle object, const std::string& name);

}  // namespace tessera::python
