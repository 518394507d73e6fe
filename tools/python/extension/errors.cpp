#include "errors.h"

#include "python_remedies.h"
#include "python_value.h"
#include "tessera/base/error.h"

namespace tessera::python {
namespace {

void raise(const Error& error) {
  const ErrorWhere& where = error.where();
  const nb::object type = nb::module_::import_("tessera._errors").attr("Error");
  const nb::object instance =
      type(text_to_python(error.line_with(python_remedy(error.remedy()))),
           nb::arg("kind") = text_to_python(to_string(error.kind())),
           nb::arg("path") = path_or_none(where.path), nb::arg("tensor") = text_or_none(where.fqn),
           nb::arg("byte_range") = byte_range_or_none(where.byte_range));
  PyErr_SetObject(type.ptr(), instance.ptr());
}

}  // namespace

void translate_errors() {
  nb::register_exception_translator([](const std::exception_ptr& exception, void*) {
    try {
      std::rethrow_exception(exception);
    } catch (const Error& error) {
      try {
        raise(error);
      } catch (nb::python_error& failure) {
        failure.restore();
      }
    }
  });
}

}  // namespace tessera::python
