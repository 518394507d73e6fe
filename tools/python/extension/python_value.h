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

/// Returns a str; bytes that are no UTF-8 become lone surrogates, as Python does for file names.
nb::object text_to_python(std::string_view text);

/// Returns the text of a path or a name, from the bytes that Python's `os.fsencode` or `str.encode`
/// made.
std::string string_of(const nb::bytes& bytes);
std::vector<std::string> strings_of(const std::vector<nb::bytes>& texts);

// Return a member of the place of an error or a finding; None if it is empty.
nb::object text_or_none(const std::string& text);
nb::object path_or_none(const std::string& path);
nb::object byte_range_or_none(const std::optional<ByteRange>& range);

/// Returns the keys of an entry: those of dicts, and a tuple of one int for a position in a list.
/// An entry without a path has its name as its one key.
nb::list path_to_python(const formats::KeyPath& path, std::string_view name);

/// Returns the Python object that a value stands for; a Symbol is a `tessera.Symbol`.
nb::object value_to_python(const Value& value);

/// Undoes value_to_python. Takes None, bool, int, float, complex, str, bytes, list, tuple, set,
/// dict, torch.dtype, torch.device, torch.Size and tessera.Symbol; a subclass of int, float, list
/// or dict becomes a plain one. `name` is for errors.
/// Throws: Error(unsupported) naming the type of any other object.
Value value_from_python(nb::handle object, const std::string& name);

}  // namespace tessera::python
