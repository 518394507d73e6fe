#include <nanobind/nanobind.h>

#include "errors.h"
#include "jobs.h"
#include "reader.h"

// What the Python side of the package (src/tessera) is built on; src/tessera/_core.pyi has its
// types. Paths come as bytes, findings and summaries go as tuples and dicts: what people meet is
// Python's.
NB_MODULE(_core, module) {
  module.attr("__version__") = TESSERA_VERSION;
  tessera::python::translate_errors();
  tessera::python::bind_reader(module);
  tessera::python::bind_verify(module);
  tessera::python::bind_move(module);
}
